//! What a scenario found: tables for people, values for programs.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// The outcome of a scenario.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What was measured, under which settings.
    pub title: String,
    /// The figures.
    pub tables: Vec<Table>,
    /// What must be known to read them.
    pub notes: Vec<String>,
    /// Every single measurement; shape by scenario.
    pub values: Value,
}

/// A table of text cells.
#[derive(Debug, Serialize)]
pub struct Table {
    /// Column heads.
    pub head: Vec<String>,
    /// Rows, each as long as `head`.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|&text| text.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl ToString>) {
        self.rows.push(cells.into_iter().map(|cell| cell.to_string()).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| {} |", self.head.join(" | "))?;
        writeln!(f, "|{}", " --- |".repeat(self.head.len()))?;
        for row in &self.rows {
            writeln!(f, "| {} |", row.join(" | "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "**{}**", self.title)?;
        for table in &self.tables {
            write!(f, "\n{table}")?;
        }
        if !self.notes.is_empty() {
            writeln!(f)?;
        }
        for note in &self.notes {
            writeln!(f, "- {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_markdown() {
        let mut table = Table::new(&["who", "how many"]);
        table.row(["agent", "2"]);
        let report = Report {
            title: "Things".into(),
            tables: vec![table],
            notes: vec!["A note.".into()],
            values: Value::Null,
        };
        assert_eq!(
            report.to_string(),
            "**Things**\n\n| who | how many |\n| --- | --- |\n| agent | 2 |\n\n- A note.\n"
        );
    }
}
