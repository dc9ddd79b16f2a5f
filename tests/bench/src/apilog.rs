//! The API server's audit log: who wrote what, and when.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde::Deserialize;

/// One finished request.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// `create`, `patch`, `get`, …
    pub verb: String,
    /// Who.
    pub user: User,
    /// With which program.
    #[serde(default)]
    pub user_agent: String,
    /// On what; absent for paths that are no resource.
    pub object_ref: Option<ObjectRef>,
    /// When it was done.
    pub stage_timestamp: Timestamp,
    /// How it ended.
    #[serde(default)]
    pub response_status: ResponseStatus,
}

/// Who asked.
#[derive(Clone, Debug, Deserialize)]
pub struct User {
    /// Name, such as `system:serviceaccount:mullion-system:mullion-controller`.
    pub username: String,
}

/// What was asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    /// Plural, such as `pods`.
    pub resource: String,
    /// Such as `binding`.
    pub subresource: String,
    /// Empty for objects of the cluster.
    pub namespace: String,
    /// Empty for collections.
    pub name: String,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct ResponseStatus {
    /// HTTP status.
    #[serde(default)]
    pub code: u16,
}

impl Entry {
    /// Whether it could change anything.
    pub fn is_write(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
            // Asking for a token or a review creates nothing that is kept.
            && !self.what().ends_with("/token")
            && !self.what().ends_with("reviews")
    }

    /// Whether it went through.
    pub fn succeeded(&self) -> bool {
        (200..300).contains(&self.response_status.code)
    }

    /// `resource` or `resource/subresource`.
    pub fn what(&self) -> String {
        match &self.object_ref {
            None => String::new(),
            Some(object) if object.subresource.is_empty() => object.resource.clone(),
            Some(object) => format!("{}/{}", object.resource, object.subresource),
        }
    }

    /// Who wrote, in a word: a part of Mullion, or the cluster's own.
    pub fn writer(&self) -> String {
        let is_scheduler = self.user_agent.starts_with("kube-scheduler/");
        match self.user.username.as_str() {
            "system:serviceaccount:mullion-system:mullion-controller" if is_scheduler => {
                "Mullion's kube-scheduler".into()
            }
            "system:serviceaccount:mullion-system:mullion-controller" => "mullion-controller".into(),
            "system:serviceaccount:mullion-system:mullion-nodeagent" => "mullion-nodeagent".into(),
            "kubernetes-admin" => "user".into(),
            name if name.starts_with("system:node:") => "kubelet".into(),
            name => name.trim_start_matches("system:").into(),
        }
    }

    /// Whether one of Mullion's identities sent it, the scheduler beside the controller included.
    pub fn is_mullions(&self) -> bool {
        self.user.username.starts_with("system:serviceaccount:mullion-system:")
    }
}

/// Reads what is appended from now on.
#[derive(Debug)]
pub struct Tail {
    file: File,
}

impl Tail {
    /// Starts at the present end of the log.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn start(path: &Path) -> Result<Self> {
        let mut file =
            File::open(path).with_context(|| format!("cannot open the audit log {}", path.display()))?;
        file.seek(SeekFrom::End(0)).context("cannot seek in the audit log")?;
        Ok(Self { file })
    }

    /// Everything since the start; a last line that is still being written is left out.
    ///
    /// # Errors
    /// When a line is no audit event.
    pub fn read(self) -> Result<Vec<Entry>> {
        entries(BufReader::new(self.file))
    }
}

fn entries(mut log: impl BufRead) -> Result<Vec<Entry>> {
    let mut all = Vec::new();
    let mut line = String::new();
    // The start may lie inside of a line that was being written then.
    let mut is_first = true;
    while log.read_line(&mut line).context("cannot read the audit log")? > 0 && line.ends_with('\n') {
        match serde_json::from_str(&line) {
            Ok(entry) => all.push(entry),
            Err(_) if is_first => {}
            Err(error) => return Err(error).with_context(|| format!("not an audit event: {line}")),
        }
        is_first = false;
        line.clear();
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINDING: &str = r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"x","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/pods/p/binding","verb":"create","user":{"username":"system:serviceaccount:mullion-system:mullion-controller","groups":[]},"sourceIPs":["10.97.0.101"],"userAgent":"mullion-controller","objectRef":{"resource":"pods","namespace":"a","name":"p","uid":"u","apiVersion":"v1","subresource":"binding"},"responseStatus":{"metadata":{},"status":"Success","code":201},"requestReceivedTimestamp":"2026-01-01T00:00:00.000001Z","stageTimestamp":"2026-01-01T00:00:00.004Z"}"#;

    #[test]
    fn reads_whole_lines_and_says_who_did_what() {
        let text = format!("half a line\"}}\n{BINDING}\n{}", &BINDING[..40]);
        let all = entries(text.as_bytes()).unwrap();
        assert_eq!(all.len(), 1);
        let entry = &all[0];
        assert_eq!((entry.what().as_str(), entry.writer().as_str()), ("pods/binding", "mullion-controller"));
        assert!(entry.is_write() && entry.succeeded() && entry.is_mullions());
        assert_eq!(entry.stage_timestamp, "2026-01-01T00:00:00.004Z".parse().unwrap());
        assert!(entries(format!("{BINDING}\nrubbish\n").as_bytes()).is_err(), "in the middle it is an error");
    }

    #[test]
    fn writers_and_writes() {
        let entry =
            |from: &str, to: &str| -> Entry { serde_json::from_str(&BINDING.replace(from, to)).unwrap() };
        for (case, entry, writer, is_write) in [
            (
                "scheduler",
                entry(r#""mullion-controller","objectRef"#, r#""kube-scheduler/v1","objectRef"#),
                "Mullion's kube-scheduler",
                true,
            ),
            ("read", entry("\"create\"", "\"watch\""), "mullion-controller", false),
            ("token", entry("\"binding\"}", "\"token\"}"), "mullion-controller", false),
            (
                "kubelet",
                entry("system:serviceaccount:mullion-system:mullion-controller", "system:node:node-a"),
                "kubelet",
                true,
            ),
        ] {
            assert_eq!((entry.writer().as_str(), entry.is_write()), (writer, is_write), "{case}");
        }
    }
}
