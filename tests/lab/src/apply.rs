//! Applies manifests the way `kubectl apply --server-side` does, without starting a program per file.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::api;

/// Applies `objects` in order and waits until each custom resource definition among them is served.
pub fn all(objects: &[Value]) -> Result<()> {
    let mut paths = Paths::default();
    for object in objects {
        let what = describe(object);
        let path = paths.of(object).with_context(|| format!("cannot apply {what}"))?;
        api::apply(&path, object).with_context(|| format!("cannot apply {what}"))?;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    for object in objects.iter().filter(|object| object["kind"] == "CustomResourceDefinition") {
        let path = paths.of(object)?;
        while !is_established(&api::get(&path)?) {
            if Instant::now() > deadline {
                bail!("{} was not served within 20 s", describe(object));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

fn is_established(definition: &Value) -> bool {
    definition["status"]["conditions"].as_array().is_some_and(|conditions| {
        conditions.iter().any(|condition| condition["type"] == "Established" && condition["status"] == "True")
    })
}

/// Kind and name, for messages.
fn describe(object: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!("{} {}", word(&object["kind"]), word(&object["metadata"]["name"]))
}

/// Where objects live, by what the API server says it serves.
#[derive(Debug, Default)]
struct Paths {
    served: BTreeMap<String, Value>,
}

impl Paths {
    fn of(&mut self, object: &Value) -> Result<String> {
        let version = object["apiVersion"].as_str().context("no apiVersion")?;
        let kind = object["kind"].as_str().context("no kind")?;
        let name = object["metadata"]["name"].as_str().context("no metadata.name")?;
        let base = if version.contains('/') { format!("/apis/{version}") } else { format!("/api/{version}") };
        if !self.served.contains_key(version) {
            self.served.insert(version.to_owned(), api::get(&base)?);
        }
        let resources =
            self.served[version]["resources"].as_array().context("discovery without resources")?;
        let resource = resources
            .iter()
            .find(|resource| {
                resource["kind"] == kind && !resource["name"].as_str().unwrap_or("/").contains('/')
            })
            .with_context(|| format!("{version} has no kind {kind}"))?;
        let plural = resource["name"].as_str().context("a resource without a name")?;
        if resource["namespaced"] == true {
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
            Ok(format!("{base}/namespaces/{namespace}/{plural}/{name}"))
        } else {
            Ok(format!("{base}/{plural}/{name}"))
        }
    }
}
