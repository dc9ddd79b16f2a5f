//! What the parts ask of the API server, and what their roles let them: the same.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};

use anyhow::{Context, Result, ensure};
use mullion_e2e::Lab;
use serde_json::Value;

/// Whatever the suite has done so far, no part was ever refused by RBAC: a right that the code needs and the manifests
/// lack shows here, even where the code goes on without it.
#[test]
fn no_part_asks_for_what_its_role_does_not_grant() -> Result<()> {
    let status: Value = serde_json::from_str(&Lab.run(&["status", "--json"])?)?;
    let path = status["auditLog"].as_str().context("lab status names no audit log")?;
    let (mut refused, mut asked) = (BTreeSet::new(), BTreeSet::new());
    for line in BufReader::new(File::open(path).with_context(|| format!("open {path}"))?).lines() {
        // The last line may be half written.
        let Ok(entry) = serde_json::from_str::<Value>(&line?) else { continue };
        let (user, agent) =
            (entry["user"]["username"].as_str(), entry["userAgent"].as_str().unwrap_or_default());
        let part = user.and_then(|user| user.strip_prefix("system:serviceaccount:mullion-system:"));
        // The tests themselves come with these identities, by kubectl and on purpose.
        let Some(part) = part.filter(|_| !agent.starts_with("kubectl") && !agent.starts_with("curl")) else {
            continue;
        };
        let object = &entry["objectRef"];
        let word = |key: &str| object[key].as_str().unwrap_or_default();
        let slash = if word("subresource").is_empty() { "" } else { "/" };
        let what = format!(
            "{part} {} {}{slash}{}",
            entry["verb"].as_str().unwrap_or_default(),
            word("resource"),
            word("subresource")
        );
        if entry["annotations"]["authorization.k8s.io/decision"] == "forbid" {
            refused.insert(what.clone());
        }
        asked.insert(what);
    }
    for needed in ["mullion-controller create pods/binding", "mullion-nodeagent patch vgpuallocations/status"]
    {
        ensure!(asked.contains(needed), "the audit log has no {needed:?}: {asked:?}");
    }
    ensure!(refused.is_empty(), "refused by RBAC: {refused:?}");
    Ok(())
}
