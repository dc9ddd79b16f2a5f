//! A decision as a `VGPUAllocation` object.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use mullion_core::facts::{ContainerGrant, ContainerKind, PodRef};
use mullion_core::placement::Placement;
use mullion_core::request::{ContainerRequest, MemoryAsk, PodRequest};
use mullion_core::units::NodeName;
use sha2::{Digest as _, Sha256};

use crate::names;
use crate::vgpuallocation::{
    CardScore, ContainerAllocation, Decision, Device, DeviceKind, PodReference, Request, Summary,
    VGPUAllocation, VGPUAllocationSpec,
};

/// Longest part of a pod's name that goes into its allocation's: with hash and uid it stays within 253.
const POD_NAME_KEPT: usize = 235;
/// Characters of a card's uuid that the printer column shows: `GPU-` and its first group.
const SHORT_UUID: usize = 12;

/// Name of a pod's one allocation: `<pod>-<first 8 of its uid>`; a pod name over 235 characters is cut there and
/// 8 hex digits of its SHA-256 go between.
///
/// The name is the lock: a second allocation for the same pod cannot be created.
#[must_use]
pub fn allocation_name(pod_name: &str, pod_uid: &str) -> String {
    let uid: String = pod_uid.chars().take(8).collect();
    if pod_name.len() <= POD_NAME_KEPT {
        return format!("{pod_name}-{uid}");
    }
    let digest = Sha256::digest(pod_name.as_bytes());
    let hash = digest.iter().take(4).fold(String::new(), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    // Pod names are ASCII; a name part may not end in a dot before our hyphen.
    let kept: String = pod_name.chars().take(POD_NAME_KEPT).collect();
    format!("{}-{hash}-{uid}", kept.trim_end_matches(['.', '-']))
}

/// The object that bind creates: the decision, owned by the pod, held by our finalizer.
///
/// `blockOwnerDeletion` stays unset: a pod must never wait for its allocation.
#[must_use]
pub fn allocation_object(
    pod: &PodRef,
    node: &NodeName,
    sequence: u64,
    request: &PodRequest,
    placement: &Placement,
) -> VGPUAllocation {
    let containers = placement.containers.iter().map(|grant| container(grant, request)).collect();
    VGPUAllocation {
        metadata: ObjectMeta {
            name: Some(allocation_name(&pod.name, pod.uid.as_str())),
            namespace: Some(pod.namespace.clone()),
            finalizers: Some(vec![names::FINALIZER.to_owned()]),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.name.clone(),
                uid: pod.uid.0.clone(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: VGPUAllocationSpec {
            pod: PodReference { name: pod.name.clone(), uid: pod.uid.0.clone() },
            node_name: node.0.clone(),
            sequence: i64::try_from(sequence).unwrap_or(i64::MAX),
            summary: summary(&placement.containers),
            containers,
            decision: Some(Decision {
                code: format!("{}/{}", request.node_policy, request.card_policy),
                node_score: placement.score.value,
                card_scores: placement
                    .cards
                    .iter()
                    .map(|c| CardScore { uuid: c.uuid.0.clone(), score: c.value })
                    .collect(),
            }),
        },
        status: None,
    }
}

fn container(grant: &ContainerGrant, request: &PodRequest) -> ContainerAllocation {
    let asked = request.containers.iter().find(|c| c.name == grant.name).map(|c| asked(&c.request));
    ContainerAllocation {
        name: grant.name.clone(),
        kind: grant.kind.into(),
        request: asked.unwrap_or_default(),
        devices: grant
            .devices
            .iter()
            .map(|d| Device {
                uuid: d.uuid.0.clone(),
                memory_mib: mib(d.memory.0),
                core_percent: u32::from(d.cores.get()),
                mig: None,
            })
            .collect(),
    }
}

fn asked(request: &ContainerRequest) -> Request {
    let (memory_mib, memory_percent) = match request.memory {
        MemoryAsk::Mib(memory) => (Some(mib(memory.0)), None),
        MemoryAsk::Percent(percent) => (None, Some(u32::from(percent.get()))),
    };
    Request { count: request.count, memory_mib, memory_percent, core_percent: u32::from(request.cores.get()) }
}

fn mib(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// What `kubectl get` shows: the cards, and the most that the pod holds at one time over all of them.
fn summary(containers: &[ContainerGrant]) -> Summary {
    let cards: BTreeSet<&str> = containers.iter().flat_map(|c| &c.devices).map(|d| d.uuid.as_str()).collect();
    let first = containers.iter().flat_map(|c| &c.devices).map(|d| d.uuid.as_str()).next().unwrap_or("-");
    let short: String = first.chars().take(SHORT_UUID).collect();
    let gpu = if cards.len() > 1 { format!("{short} +{}", cards.len() - 1) } else { short };
    let (memory, cores) = peak(containers);
    Summary { gpu, kind: DeviceKind::Vgpu, memory_mib: mib(memory), core_percent: mib(cores) }
}

/// Memory in MiB and core percent at the pod's peak: each init container runs with the sidecars before it, then
/// sidecars and apps run together.
fn peak(containers: &[ContainerGrant]) -> (u64, u64) {
    let sums = |c: &ContainerGrant| {
        c.devices.iter().fold((0_u64, 0_u64), |(memory, cores), d| {
            (memory.saturating_add(d.memory.0), cores.saturating_add(u64::from(d.cores.get())))
        })
    };
    let (mut running, mut peak) = ((0_u64, 0_u64), (0_u64, 0_u64));
    for c in containers {
        let own = sums(c);
        let now = (running.0.saturating_add(own.0), running.1.saturating_add(own.1));
        peak = (peak.0.max(now.0), peak.1.max(now.1));
        if c.kind != ContainerKind::Init {
            running = now;
        }
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_core::facts::DeviceGrant;
    use mullion_core::request::{ContainerWish, Policy};
    use mullion_core::score::{CardScore as Score, NodeScore};
    use mullion_core::units::{CoreShare, Mib, Percent};

    const UID: &str = "3f2b1c0d-1111-2222-3333-444455556666";

    #[test]
    fn names_are_short_enough_valid_and_one_per_pod() {
        let long = "a".repeat(253);
        let dotted = format!("{}.{}", "a".repeat(234), "b".repeat(18));
        for (case, pod, want) in [
            ("a plain name", "demo".to_owned(), Some("demo-3f2b1c0d".to_owned())),
            ("just short enough", "a".repeat(235), Some(format!("{}-3f2b1c0d", "a".repeat(235)))),
            ("one too long", "a".repeat(236), None),
            ("as long as it gets", long, None),
            ("cut at a dot", dotted, None),
        ] {
            let name = allocation_name(&pod, UID);
            assert!(name.len() <= 253, "{case}: {} characters", name.len());
            assert!(name.ends_with("-3f2b1c0d"), "{case}: {name}");
            assert!(!name.contains(".-"), "{case}: a part of a name may not begin with a hyphen: {name}");
            if let Some(want) = want {
                assert_eq!(name, want, "{case}");
            } else {
                let parts: Vec<&str> = name.rsplitn(3, '-').collect();
                assert!(
                    parts[1].len() == 8 && parts[1].chars().all(|c| c.is_ascii_hexdigit()),
                    "{case}: {name}"
                );
            }
        }
        let (one, other) = (format!("{}1", "a".repeat(240)), format!("{}2", "a".repeat(240)));
        assert_ne!(
            allocation_name(&one, UID),
            allocation_name(&other, UID),
            "the hash tells cut names apart"
        );
        assert_eq!(allocation_name("p", "short"), "p-short", "no uid is too short to be named");
    }

    fn grant(name: &str, kind: ContainerKind, devices: &[(&str, u64, u8)]) -> ContainerGrant {
        let device = |&(uuid, memory, cores): &(&str, u64, u8)| DeviceGrant {
            uuid: uuid.into(),
            memory: Mib(memory),
            cores: CoreShare::new(cores).unwrap(),
        };
        ContainerGrant { name: name.to_owned(), kind, devices: devices.iter().map(device).collect() }
    }

    #[test]
    fn a_decision_survives_the_way_through_the_object() {
        let pod = PodRef { namespace: "team-a".into(), name: "demo".into(), uid: UID.into() };
        let wish = |name: &str, count, memory| ContainerWish {
            name: name.to_owned(),
            kind: ContainerKind::App,
            request: ContainerRequest { count, memory, cores: CoreShare::new(30).unwrap() },
        };
        let request = PodRequest {
            containers: vec![
                wish("main", 2, MemoryAsk::Mib(Mib(3000))),
                wish("side", 1, MemoryAsk::Percent(Percent::new(50).unwrap())),
            ],
            node_policy: Policy::Binpack,
            card_policy: Policy::Spread,
        };
        let containers = vec![
            grant("main", ContainerKind::App, &[("GPU-aaaaaaaa-1", 3000, 30), ("GPU-bbbbbbbb-1", 3000, 30)]),
            grant("side", ContainerKind::App, &[("GPU-bbbbbbbb-1", 40_960, 30)]),
        ];
        let placement = Placement {
            containers: containers.clone(),
            cards: vec![Score { uuid: "GPU-aaaaaaaa-1".into(), value: 40, ..Score::default() }],
            score: NodeScore { value: 77, ..NodeScore::default() },
        };
        let object = allocation_object(&pod, &"node-a".into(), 7, &request, &placement);

        assert_eq!(object.metadata.name.as_deref(), Some("demo-3f2b1c0d"));
        assert_eq!(object.metadata.finalizers.as_deref(), Some(&["mullion.io/release".to_owned()][..]));
        let owners = object.metadata.owner_references.clone().unwrap();
        assert_eq!((owners.len(), owners[0].uid.as_str()), (1, UID));
        assert_eq!((owners[0].block_owner_deletion, owners[0].controller), (None, None));
        let spec = &object.spec;
        assert_eq!(spec.containers[0].request.memory_mib, Some(3000));
        assert_eq!(spec.containers[1].request.memory_mib, None);
        assert_eq!(spec.containers[1].request.memory_percent, Some(50));
        let decision = spec.decision.clone().unwrap();
        assert_eq!((decision.code.as_str(), decision.node_score), ("binpack/spread", 77));
        assert_eq!(decision.card_scores[0].score, 40);
        assert_eq!(spec.summary.gpu, "GPU-aaaaaaaa +1");
        assert_eq!((spec.summary.memory_mib, spec.summary.core_percent), (46_960, 90));
        assert!(serde_json::to_value(&object).unwrap().get("status").is_none(), "no null is sent");

        let fact = crate::facts::allocation(&object);
        assert_eq!(fact.pod, pod);
        assert_eq!((fact.node.as_str(), fact.sequence), ("node-a", 7));
        assert_eq!(fact.containers, containers);
        assert!(!fact.prepared && !fact.released);
    }

    #[test]
    fn the_peak_counts_init_containers_with_the_sidecars_before_them() {
        use ContainerKind::{App, Init, Sidecar};
        let card = |memory| vec![("GPU-a", memory, 10_u8)];
        for (case, containers, want) in [
            ("apps add up", vec![("a", App, 3), ("b", App, 4)], (7, 20)),
            ("an init container alone is the peak", vec![("i", Init, 9), ("a", App, 4)], (9, 10)),
            ("a sidecar before it runs on", vec![("s", Sidecar, 2), ("i", Init, 9), ("a", App, 4)], (11, 20)),
            ("a sidecar after it does not", vec![("i", Init, 9), ("s", Sidecar, 2), ("a", App, 4)], (9, 20)),
        ] {
            let grants: Vec<_> =
                containers.iter().map(|(name, kind, memory)| grant(name, *kind, &card(*memory))).collect();
            assert_eq!(peak(&grants), want, "{case}");
        }
    }
}
