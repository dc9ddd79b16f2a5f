//! The definitions without an API server: they are fresh, and their CEL rules decide as the cases say.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test program: a panic is how it fails")]

#[expect(dead_code, reason = "who makes an attempt matters to a real API server only")]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{Cases, patched, read};
use kube::CustomResourceExt as _;
use kube_cel::Validator;
use mullion_crds::manifest::manifests;
use mullion_crds::{GPUNode, MIGLayout, VGPUAllocation};
use serde_json::{Value, json};

fn definitions() -> BTreeMap<String, Value> {
    let parsed = manifests().unwrap().into_iter().map(|(file, text)| {
        let value: Value = serde_saphyr::from_str(&text).unwrap();
        (file.trim_end_matches(".yaml").trim_end_matches('s').to_owned(), value)
    });
    parsed.collect()
}

#[test]
fn generated_files_are_fresh() {
    for (name, fresh) in manifests().unwrap() {
        let stored = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap_or_default();
        assert!(stored == fresh, "crds/{name} is stale: run `cargo run -p mullion-crds --bin crdgen`");
    }
}

#[test]
fn rules_decide_as_the_cases_say() {
    let definitions = definitions();
    let (mut decided, mut met) = (0, std::collections::BTreeSet::new());
    for (kind, definition) in &definitions {
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let cases: Cases = read(&format!("{kind}.yaml"));
        for case in cases.cases.iter().filter(|c| c.rule) {
            let mut old = None;
            let mut object = cases.created(case);
            for given in &case.given {
                object = patched(&object, &given.patch, &case.name);
            }
            // The API server fills in defaults before it evaluates; the one that rules read is the strategy.
            if kind == "miglayout" && object["spec"].get("strategy").is_none() {
                object["spec"]["strategy"] = json!("Static");
            }
            if !case.update.is_null() {
                old = Some(object.clone());
                object = patched(&object, &case.update, &case.name);
            }
            let name = format!("{kind}: {}", case.name);
            match (Validator::new().validate(schema, &object, old.as_ref()), &case.refused) {
                (Ok(()), None) => {}
                (Err(errors), Some(text)) => {
                    assert!(errors.to_string().contains(text.as_str()), "{name}: {errors}");
                    met.extend(errors.iter().map(|e| e.rule.clone()));
                }
                (Ok(()), Some(text)) => panic!("{name}: taken, but should be refused: {text}"),
                (Err(errors), None) => panic!("{name}: refused: {errors}"),
            }
            decided += 1;
        }
    }
    assert!(decided > 30, "only {decided} cases");
    let rules: Vec<String> = definitions.values().flat_map(rules).collect();
    assert!(rules.len() >= 14, "only {} rules", rules.len());
    for rule in rules {
        assert!(met.contains(&rule), "no case is refused by the rule {rule}");
    }
}

/// Every CEL rule in a definition.
fn rules(value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => {
            let own = map.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten();
            let own = own.filter_map(|rule| rule["rule"].as_str()).map(str::to_owned);
            own.chain(map.values().flat_map(rules)).collect()
        }
        Value::Array(list) => list.iter().flat_map(rules).collect(),
        _ => Vec::new(),
    }
}

/// The API server counts the cost of a rule from these.
#[test]
fn what_rules_read_is_bounded() {
    fn unbounded(path: &str, schema: &Value, found: &mut Vec<String>) {
        match schema["type"].as_str() {
            Some("array") if schema.get("maxItems").is_none() => found.push(path.to_owned()),
            Some("string") if ["maxLength", "enum", "format"].iter().all(|k| schema.get(*k).is_none()) => {
                found.push(path.to_owned());
            }
            _ => {}
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            unbounded(&format!("{path}.{name}"), property, found);
        }
        if let Some(items) = schema.get("items") {
            unbounded(&format!("{path}[]"), items, found);
        }
    }
    let definitions = definitions();
    let schema = &definitions["vgpuallocation"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut found = Vec::new();
    unbounded("", schema, &mut found);
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn no_definition_has_what_the_api_server_warns_of_or_what_breaks_has() {
    for (kind, definition) in definitions() {
        let text = definition.to_string();
        for word in ["nullable", "uint32", "uint64", "\"$ref\"", "anyOf"] {
            assert!(!text.contains(word), "{kind} has {word}");
        }
    }
}

/// `kubectl explain gpunode.spec.cordon` says what becomes of new pods and of those that run, also for a single card.
#[test]
fn what_a_cordon_does_is_explained() {
    let definition = &definitions()["gpunode"];
    let spec =
        &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
    for field in [&spec["cordon"], &spec["cards"]["items"]["properties"]["cordon"]] {
        let text = field["description"].as_str().unwrap();
        for part in ["no new pod", "stay Pending", "run on", "Nothing is evicted"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }
}

/// `kubectl explain` says what MIG does not do yet, where somebody asks for it.
#[test]
fn what_mig_does_not_do_yet_is_explained() {
    let schema = |kind: &str| definitions()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let (node, layout) = (schema("gpunode"), schema("miglayout"));
    let spec = &node["properties"]["spec"]["properties"];
    for (field, part) in [
        (&spec["mode"], "`mig` closes the card for new GPU pods"),
        (&spec["cards"]["items"]["properties"]["mode"], "`mig` closes the card for new GPU pods"),
        (&layout, "Not acted on yet"),
        (&layout["properties"]["spec"], "not acted on yet"),
    ] {
        let text = field["description"].as_str().unwrap();
        assert!(text.contains(part) && !text.contains('\n'), "{part:?} is not in {text}");
    }
}

#[test]
fn names_columns_and_selectable_fields() {
    let columns = |kind: &str| -> Vec<String> {
        let definition = &definitions()[kind];
        let columns =
            definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap().clone();
        columns.iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(columns("gpunode"), ["USABLE-GPUS", "FREE-MEM", "MIG", "LAYOUT", "HEALTH", "CORDON", "AGE"]);
    assert_eq!(
        columns("vgpuallocation"),
        ["POD", "NODE", "GPU", "KIND", "MEM(MIB)", "CORES", "PHASE", "AGE"]
    );
    assert_eq!(columns("miglayout"), ["TARGETS", "APPLIED", "BLOCKED", "FAILED", "AGE"]);
    for (crd, short, scope) in [
        (GPUNode::crd(), "gn", "Cluster"),
        (VGPUAllocation::crd(), "vga", "Namespaced"),
        (MIGLayout::crd(), "ml", "Cluster"),
    ] {
        assert_eq!(crd.spec.names.short_names, Some(vec![short.to_owned()]));
        assert_eq!(crd.spec.names.categories, Some(vec!["mullion".to_owned()]), "{short}");
        assert_eq!(crd.spec.scope, scope, "{short}");
    }
    let definition = &definitions()["vgpuallocation"]["spec"]["versions"][0];
    let fields = json!([{"jsonPath": ".spec.nodeName"}, {"jsonPath": ".spec.pod.name"}]);
    assert_eq!(definition["selectableFields"], fields);
    let status = &definition["schema"]["openAPIV3Schema"]["properties"]["status"];
    assert_eq!(status["default"], json!({"phase": "Bound"}), "a fresh object shows a phase");
}

/// The bases are what the types of this crate write.
#[test]
fn types_and_definitions_agree() {
    let allocation = read("vgpuallocation.yaml").bases["allocation"].clone();
    let typed: VGPUAllocation = serde_json::from_value(allocation.clone()).unwrap();
    assert_eq!(serde_json::to_value(&typed).unwrap(), allocation);
    let layouts = read("miglayout.yaml");
    for base in layouts.bases.values() {
        let typed: MIGLayout = serde_json::from_value(base.clone()).unwrap();
        let back: MIGLayout = serde_json::from_value(serde_json::to_value(&typed).unwrap()).unwrap();
        assert_eq!(typed, back);
    }
}
