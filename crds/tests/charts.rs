//! The plain manifests agree with the names in the code.

#![expect(clippy::panic, reason = "a test program: a panic is how it fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mullion_core::request;
use mullion_crds::names;
use serde_json::Value;

fn documents(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/mullion").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_scheduler_leaves_every_resource_of_ours_to_the_extender() {
    let config = &documents("scheduler.yaml")[0];
    assert_eq!(config["profiles"][0]["schedulerName"], names::SCHEDULER);
    assert_eq!(config["percentageOfNodesToScore"], 100, "a sample of the nodes would hide some that fit");
    let extender = &config["extenders"][0];
    let managed = extender["managedResources"].as_array().unwrap();
    let mut resources: Vec<&str> = managed.iter().map(|r| r["name"].as_str().unwrap()).collect();
    resources.sort_unstable();
    let mut served = [request::COUNT, request::MEMORY, request::MEMORY_PERCENTAGE, request::CORES];
    served.sort_unstable();
    assert_eq!(resources, served);
    assert!(managed.iter().all(|r| r["ignoredByScheduler"] == true));
    assert_eq!((&extender["nodeCacheCapable"], &extender["ignorable"]), (&true.into(), &false.into()));
    assert_eq!(extender["httpTimeout"], "30s");
}

/// WH-06: what the parser calls state the policy calls state, and the webhook is shown.
#[test]
fn policy_and_parser_agree_on_whose_an_annotation_is() {
    let policies = documents("admission-policies.yaml");
    let policy = policies
        .iter()
        .find(|p| p["metadata"]["name"] == "mullion-pods" && p["spec"]["failurePolicy"] == "Fail");
    let owned =
        policy.unwrap()["spec"]["variables"].as_array().unwrap().iter().find(|v| v["name"] == "owned");
    let expression = owned.unwrap()["expression"].as_str().unwrap();
    for (key, is_owned) in [
        ("hami.io/bind-phase", true),
        ("hami.io/bind-time", true),
        ("hami.io/vgpu-devices-allocated", true),
        ("hami.io/vgpu-devices-to-allocate", true),
        ("hami.io/vgpu-mig-allocations", true),
        ("hami.io/vgpu-node", true),
        ("hami.io/vgpu-time", true),
        (names::POKE_ANNOTATION, true),
        ("mullion.io/mig-profile", false),
        ("mullion.io/mig-spread", false),
        (request::CARD_POLICY, false),
        (request::NODE_POLICY, false),
        ("example.com/vgpu-node", false),
    ] {
        let pod = request::PodView {
            annotations: [(key.to_owned(), "x".to_owned())].into(),
            ..request::PodView::default()
        };
        assert_eq!(request::owned_annotation(&pod).is_some(), is_owned, "the parser on {key}");
        let prefixes = ["mullion.io/", "hami.io/vgpu-", "hami.io/bind-"];
        assert!(prefixes.iter().all(|p| expression.contains(p)), "{expression}");
        let wish = expression.contains(&format!("'{key}'"));
        assert_eq!(prefixes.iter().any(|p| key.starts_with(p)) && !wish, is_owned, "the policy on {key}");
    }
}

#[test]
fn the_webhook_sees_pods_at_creation_only_and_fails_closed() {
    let documents = documents("webhook.yaml");
    let configuration = documents.iter().find(|d| d["kind"] == "MutatingWebhookConfiguration").unwrap();
    assert_eq!(configuration["webhooks"].as_array().unwrap().len(), 1);
    let webhook = &configuration["webhooks"][0];
    assert_eq!((&webhook["failurePolicy"], &webhook["sideEffects"]), (&"Fail".into(), &"None".into()));
    assert_eq!(webhook["rules"][0]["operations"], serde_json::json!(["CREATE"]));
    assert_eq!(webhook["rules"][0]["resources"], serde_json::json!(["pods"]));
    assert!(webhook.get("objectSelector").is_none(), "no pod can take itself out by a label");
    let ways_out = webhook["namespaceSelector"]["matchExpressions"].as_array().unwrap();
    let mut labels: Vec<&str> = ways_out.iter().map(|way| way["key"].as_str().unwrap()).collect();
    labels.sort_unstable();
    let mut known = names::OPT_OUT_LABELS;
    known.sort_unstable();
    assert_eq!(labels, known, "the controller leaves alone what the webhook never sees");
    for way in ways_out {
        assert_eq!(
            (&way["operator"], &way["values"]),
            (&"NotIn".into(), &serde_json::json!([names::OPT_OUT]))
        );
    }
    let condition = webhook["matchConditions"][0]["expression"].as_str().unwrap();
    for slip in request::MISSPELT {
        // Limits and requests, of containers and of init containers.
        assert_eq!(condition.matches(&format!("'{slip}'")).count(), 4, "{slip}");
    }
    for optional in [
        "c.resources",
        "c.resources.limits",
        "c.resources.requests",
        "object.spec.initContainers",
        "object.metadata.annotations",
    ] {
        assert!(
            condition.contains(&format!("has({optional})")),
            "{optional} may be absent: an error refuses any pod"
        );
    }
}

#[test]
fn no_two_agents_run_on_a_node() {
    let daemon_set = &documents("nodeagent.yaml")[0];
    assert_eq!(daemon_set["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"], 0);
}

/// MO-04: the agent tells the runtime and the monitor paths as it sees them, so a folder that it shares with containers
/// has the same path inside and outside of it.
#[test]
fn the_agent_sees_shared_folders_where_the_node_has_them() {
    let daemon_set = &documents("nodeagent.yaml")[0];
    let pod = &daemon_set["spec"]["template"]["spec"];
    let list = |value: &Value| value.as_array().unwrap().clone();
    let mut shared = 0;
    for mount in list(&pod["containers"][0]["volumeMounts"]) {
        let volume = list(&pod["volumes"]).into_iter().find(|v| v["name"] == mount["name"]).unwrap();
        if !["hook", "state", "cdi"].contains(&mount["name"].as_str().unwrap()) {
            continue;
        }
        shared += 1;
        assert_eq!(volume["hostPath"]["path"], mount["mountPath"], "{mount}");
    }
    assert_eq!(shared, 3);
}

/// What each part's roles grant, as `verb resource` or `verb resource name`. A line more here is a right more for
/// whoever gets hold of that part's token: it stands beside the code that needs it.
#[test]
fn roles_grant_what_the_code_does() {
    let granted = |role: &str| -> BTreeSet<String> {
        let documents = documents("rbac.yaml");
        let roles = documents.iter().filter(|d| {
            matches!(d["kind"].as_str(), Some("Role" | "ClusterRole")) && d["metadata"]["name"] == role
        });
        let words = |rule: &Value, key: &str| -> Vec<String> {
            rule[key].as_array().into_iter().flatten().filter_map(|w| w.as_str().map(str::to_owned)).collect()
        };
        let mut all = BTreeSet::new();
        for rule in roles.flat_map(|role| role["rules"].as_array().into_iter().flatten()) {
            let mut names = words(rule, "resourceNames");
            if names.is_empty() {
                names.push(String::new());
            }
            for verb in words(rule, "verbs") {
                for resource in words(rule, "resources") {
                    for name in &names {
                        let line = format!("{verb} {resource} {name}");
                        assert!(all.insert(line.trim_end().to_owned()), "{role}: {line} stands twice");
                    }
                }
            }
        }
        all
    };
    let lines = |text: &str| text.lines().map(|l| l.trim().to_owned()).filter(|l| !l.is_empty()).collect();
    let controller: BTreeSet<String> = lines(
        "
        get pods
        list pods
        watch pods
        patch pods
        create pods/binding
        create pods/eviction
        get nodes
        list nodes
        watch nodes
        get namespaces
        get gpunodes
        list gpunodes
        watch gpunodes
        get vgpuallocations
        list vgpuallocations
        watch vgpuallocations
        create vgpuallocations
        patch vgpuallocations
        delete vgpuallocations
        patch vgpuallocations/status
        create events
        patch events
        list mutatingwebhookconfigurations mullion
        watch mutatingwebhookconfigurations mullion
        patch mutatingwebhookconfigurations mullion
        create secrets
        list secrets mullion-webhook-tls
        watch secrets mullion-webhook-tls
        update secrets mullion-webhook-tls
        create leases
        get leases mullion-controller
        update leases mullion-controller
        get leases mullion-scheduler
        update leases mullion-scheduler
        ",
    );
    let agent: BTreeSet<String> = lines(
        "
        get pods
        list pods
        watch pods
        list nodes
        watch nodes
        get gpunodes
        list gpunodes
        watch gpunodes
        create gpunodes
        update gpunodes/status
        get vgpuallocations
        list vgpuallocations
        watch vgpuallocations
        patch vgpuallocations
        patch vgpuallocations/status
        create events
        patch events
        ",
    );
    assert_eq!(granted("mullion-controller"), controller);
    assert_eq!(granted("mullion-nodeagent"), agent);
    for right in controller.iter().chain(&agent) {
        assert!(!right.contains('*'), "{right}: no wildcards");
    }
}
