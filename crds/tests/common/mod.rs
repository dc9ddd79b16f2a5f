//! The case files of `tests/cases`; their format: the README there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// One file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cases {
    /// Objects by name.
    pub bases: BTreeMap<String, Value>,
    /// What is tried.
    pub cases: Vec<Case>,
}

/// One attempt.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// What is tried.
    pub name: String,
    /// Name of the object that it starts from.
    pub base: String,
    /// Changes to it before it is created.
    #[serde(default)]
    pub create: Value,
    /// Changes that must be taken.
    #[serde(default)]
    pub given: Vec<Given>,
    /// The change that is tried; null: the creation is.
    #[serde(default)]
    pub update: Value,
    /// Metadata of the binding by which the pod is bound instead; null: it is not.
    #[serde(default)]
    pub bind: Value,
    /// Collection that the binding is sent to; absent: the pod's own.
    pub path: Option<String>,
    /// Of the update.
    pub subresource: Option<String>,
    /// By whom.
    #[serde(default = "admin", rename = "as")]
    pub by: String,
    /// Part of the refusal; absent: it must be taken.
    pub refused: Option<String>,
    /// A CEL rule decides.
    #[serde(default)]
    pub rule: bool,
}

/// A change that must be taken.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// JSON Patch.
    pub patch: Value,
    /// Of what; absent: the object itself.
    pub subresource: Option<String>,
    /// By whom.
    #[serde(default = "admin", rename = "as")]
    pub by: String,
}

fn admin() -> String {
    "admin".to_owned()
}

/// Reads a file of `tests/cases`.
pub fn read(file: &str) -> Cases {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `object` after the JSON Patch `changes` (null: none).
pub fn patched(object: &Value, changes: &Value, case: &str) -> Value {
    let mut object = object.clone();
    if !changes.is_null() {
        let patch: json_patch::Patch =
            serde_json::from_value(changes.clone()).unwrap_or_else(|e| panic!("{case}: {e}"));
        json_patch::patch(&mut object, &patch).unwrap_or_else(|e| panic!("{case}: {e}"));
    }
    object
}

impl Cases {
    /// The object that `case` creates.
    pub fn created(&self, case: &Case) -> Value {
        let base =
            self.bases.get(&case.base).unwrap_or_else(|| panic!("{}: no base {}", case.name, case.base));
        patched(base, &case.create, &case.name)
    }
}
