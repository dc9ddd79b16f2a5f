//! Mullion's manifests as an installation would apply them, and what the lab changes in them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::layout::WEBHOOK_HOST;

/// Kinds that the lab does not apply: its parts run as supervised processes, and the others are no API objects.
const NOT_APPLIED: [&str; 5] =
    ["ControllerConfig", "DaemonSet", "Deployment", "KubeSchedulerConfiguration", "NodeAgentConfig"];

/// Port on which a controller serves the webhook.
const WEBHOOK_PORT: u16 = 9443;

/// Every document of the YAML files in `dir`, in the order of the file names.
pub fn read(dir: &Path) -> Result<Vec<Value>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let documents = parse(&text).with_context(|| format!("{} is not YAML", file.display()))?;
        all.extend(documents);
    }
    Ok(all)
}

fn parse(text: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    Ok(documents.into_iter().filter(Value::is_object).collect())
}

/// What is applied of `documents`: definitions and namespaces first, webhooks by URL.
pub fn to_apply(documents: Vec<Value>) -> Vec<Value> {
    let mut kept: Vec<Value> = documents
        .into_iter()
        .filter(|object| !NOT_APPLIED.iter().any(|kind| object["kind"] == *kind))
        .collect();
    kept.iter_mut().for_each(webhook_by_url);
    kept.sort_by_key(|object| match object["kind"].as_str() {
        Some("Namespace") => 0,
        Some("CustomResourceDefinition") => 1,
        // A webhook or policy may refuse what comes after it.
        Some("MutatingWebhookConfiguration" | "ValidatingAdmissionPolicyBinding") => 3,
        _ => 2,
    });
    kept
}

/// No kube-proxy, so no Services: the API server finds the controllers by its host table.
fn webhook_by_url(object: &mut Value) {
    if object["kind"] != "MutatingWebhookConfiguration" {
        return;
    }
    for webhook in object["webhooks"].as_array_mut().into_iter().flatten() {
        let Some(config) = webhook["clientConfig"].as_object_mut() else { continue };
        if let Some(service) = config.remove("service") {
            let path = service["path"].as_str().unwrap_or("/");
            config.insert("url".into(), format!("https://{WEBHOOK_HOST}:{WEBHOOK_PORT}{path}").into());
        }
    }
}

/// The scheduler's configuration among `documents`, itself or inside a `ConfigMap`.
///
/// # Errors
/// When there is none.
pub fn scheduler_config(documents: &[Value]) -> Result<Value> {
    const KIND: &str = "KubeSchedulerConfiguration";
    let embedded = documents
        .iter()
        .filter(|object| object["kind"] == "ConfigMap")
        .filter_map(|object| object["data"].as_object())
        .flat_map(|data| data.values())
        .filter_map(|text| parse(text.as_str()?).ok())
        .flatten();
    documents.iter().cloned().chain(embedded).find(|object| object["kind"] == KIND).with_context(|| {
        format!("charts/mullion has no {KIND}: the scheduler beside the controller needs one")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEBHOOK: &str = "
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: mullion}
webhooks:
- name: pods.mullion.io
  clientConfig: {caBundle: Cg==, service: {namespace: mullion-system, name: mullion-webhook, path: /webhook, port: 443}}
";

    #[test]
    fn a_webhook_is_called_by_url_and_keeps_its_ca() {
        let applied = to_apply(parse(WEBHOOK).unwrap());
        let config = &applied[0]["webhooks"][0]["clientConfig"];
        assert_eq!(config["url"], "https://mullion-webhook.mullion-system.svc:9443/webhook");
        assert_eq!(config["caBundle"], "Cg==");
        assert!(config.get("service").is_none(), "the API server takes one of the two");
    }

    #[test]
    fn parts_are_not_applied_and_order_is_safe() {
        let text = format!(
            "{WEBHOOK}---\nkind: Deployment\n---\n# nothing\n---\nkind: ConfigMap\n---\nkind: CustomResourceDefinition\n---\nkind: Namespace\n"
        );
        let applied = to_apply(parse(&text).unwrap());
        let kinds: Vec<_> = applied.iter().filter_map(|object| object["kind"].as_str()).collect();
        assert_eq!(
            kinds,
            ["Namespace", "CustomResourceDefinition", "ConfigMap", "MutatingWebhookConfiguration"]
        );
    }

    #[test]
    fn finds_the_scheduler_configuration() {
        let plain = "kind: KubeSchedulerConfiguration\nprofiles: [{schedulerName: a}]\n";
        let wrapped = "kind: ConfigMap\ndata:\n  config.yaml: |\n    kind: KubeSchedulerConfiguration\n    profiles: [{schedulerName: a}]\n";
        for (case, text) in [("a file", plain), ("a ConfigMap", wrapped)] {
            let config = scheduler_config(&parse(text).unwrap()).unwrap();
            assert_eq!(config["profiles"][0]["schedulerName"], "a", "{case}");
        }
        assert!(scheduler_config(&[]).is_err(), "none");
    }
}
