//! What a scenario found: tables for people, values for programs.

use std::fmt;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
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

/// How a program tells its outcome.
#[derive(Clone, Copy, Debug, Args)]
pub struct Printing {
    /// How to print the figures.
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// Markdown tables.
    Table,
    /// JSON, with every single measurement.
    Json,
}

impl Printing {
    /// Prints what came of `program`; its exit status.
    pub fn end(self, program: &str, report: Result<Report>) -> ExitCode {
        match report.and_then(|report| self.print(&report)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{program}: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    fn print(self, report: &Report) -> Result<()> {
        match self.output {
            Output::Table => print!("{report}"),
            Output::Json => println!("{}", serde_json::to_string_pretty(report)?),
        }
        Ok(())
    }
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
