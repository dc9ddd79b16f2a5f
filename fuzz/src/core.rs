//! What pods wish, and what API objects say.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use mullion_controller::guard::Guard;
use mullion_core::facts::{CardFact, CardMode, ContainerKind, Event, KubeNodeFact, NodeFact};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::placement::Shape;
use mullion_core::request::{
    COUNT, ContainerView, Defaults, MemoryAsk, PodView, admit_pod, mentions_us, parse_pod, warnings,
};
use mullion_core::units::Mib;
use mullion_crds::{GPUNode, VGPUAllocation, facts as read};

/// A node of healthy cards.
pub(crate) fn node(name: &str, cards: u32) -> [Event; 2] {
    let card = |index| CardFact {
        uuid: format!("GPU-{index}").as_str().into(),
        index,
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: Mib(81_559),
        cores: 100,
        slots: 10,
        numa_node: None,
        healthy: true,
        cordoned: false,
        mode: CardMode::Shared,
    };
    let fact = NodeFact {
        name: name.into(),
        node_uid: "u".into(),
        observation: 1,
        cordoned: false,
        driver_ready: true,
        cards: (0..cards).map(card).collect(),
    };
    let kube = KubeNodeFact { name: name.into(), uid: "u".into(), allocatable_slots: u64::from(cards) * 10 };
    [Event::NodeObserved(fact), Event::KubeNodeObserved(kube)]
}

/// Wishes, a line each: `[` begins a container of the kind that follows, `@KEY=VALUE` is an annotation, `!NAME=VALUE` a
/// variable, `<KEY=VALUE` a request, and `KEY=VALUE` a limit.
pub fn wishes(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut pod = PodView { name: "p".to_owned(), namespace: "ns".to_owned(), ..PodView::default() };
    for line in text.lines().take(500) {
        if let Some(kind) = line.strip_prefix('[') {
            let kind = match kind.as_bytes().first() {
                Some(b'i') => ContainerKind::Init,
                Some(b's') => ContainerKind::Sidecar,
                _ => ContainerKind::App,
            };
            let name = format!("c{}", pod.containers.len());
            pod.containers.push(ContainerView {
                name,
                kind,
                limits: BTreeMap::new(),
                requests: BTreeMap::new(),
                env: BTreeMap::new(),
                privileged: line.contains('#'),
            });
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        let value = value.to_owned();
        if let Some(key) = key.strip_prefix('@') {
            pod.annotations.insert(key.to_owned(), value);
        } else if let Some(last) = pod.containers.last_mut() {
            if let Some(name) = key.strip_prefix('!') {
                last.env.insert(name.to_owned(), Some(value));
            } else if let Some(key) = key.strip_prefix('<') {
                last.requests.insert(key.to_owned(), value);
            } else {
                last.limits.insert(key.to_owned(), value);
            }
        }
    }
    pod.containers.truncate(16);
    decide(&pod);
}

fn decide(pod: &PodView) {
    let defaults = Defaults::default();
    for warning in warnings(pod) {
        crate::sayable(&warning);
    }
    let admitted = admit_pod(pod, &defaults);
    match parse_pod(pod, &defaults) {
        Err(error) => {
            crate::sayable(&error.to_string());
            assert!(mentions_us(pod) && admitted.is_err(), "{error}");
        }
        Ok(None) => assert!(!matches!(admitted, Ok(Some(_)))),
        Ok(Some(request)) => {
            assert!(mentions_us(pod));
            for wish in &request.containers {
                assert!(wish.request.count >= 1);
                assert!(wish.request.memory != MemoryAsk::Mib(Mib(0)));
            }
            place(&request);
        }
    }
}

/// What fits an empty node, and what is then taken there: both verdicts agree, and a hold that was given stands.
fn place(request: &mullion_core::request::PodRequest) {
    let mut ledger = Ledger::default();
    for event in node("n", 3) {
        ledger.apply(&event);
    }
    let (shape, name) = (Shape::new(request), "n".into());
    match shape.fit(&ledger, &name) {
        Err(refusal) => {
            assert_eq!(shape.check(&ledger, &name).unwrap_err(), refusal.code);
            crate::sayable(&refusal.to_string());
        }
        Ok(placement) => {
            assert!(shape.check(&ledger, &name).is_ok());
            let pod = mullion_core::facts::PodRef {
                namespace: "ns".to_owned(),
                name: "p".to_owned(),
                uid: "12345678-p".into(),
            };
            let object = mullion_crds::object::allocation_object(&pod, &name, 1, request, &placement);
            ledger.apply(&Event::Held(read::allocation(&object)));
            assert_eq!(ledger.hold_standing(&pod.uid), Some(Standing::Holds));
            assert!(ledger.overcommitted().is_empty());
        }
    }
}

/// API objects, a line each, into one fold. No object is so strange that a card is given twice, unless it says of
/// itself that it was handed out.
pub fn facts(data: &[u8]) {
    let mut ledger = Ledger::default();
    for event in node("n", 3) {
        ledger.apply(&event);
    }
    for line in data.split(|&byte| byte == b'\n').take(64) {
        if let Ok(Guard(Ok(object))) = serde_json::from_slice::<Guard<VGPUAllocation>>(line) {
            let mut fact = read::allocation(&object);
            fact.prepared = false;
            ledger.apply(&Event::AllocationObserved(fact));
        } else if let Ok(Guard(Err(remains))) = serde_json::from_slice::<Guard<VGPUAllocation>>(line) {
            let uid = remains.metadata.uid.unwrap_or_default().into();
            ledger.apply(&Event::AllocationUnreadable { uid, node: remains.node.map(Into::into) });
        }
        if let Ok(object) = serde_json::from_slice::<GPUNode>(line)
            && let Some(fact) = read::node(&object)
        {
            ledger.apply(&Event::NodeObserved(fact));
        }
        if let Ok(object) = serde_json::from_slice::<Node>(line) {
            ledger.apply(&Event::KubeNodeObserved(read::kube_node(&object, COUNT)));
        }
        if let Ok(object) = serde_json::from_slice::<Pod>(line) {
            decide(&mullion_crds::pod::view(&object));
        }
        assert!(ledger.overcommitted().is_empty());
    }
    let request = parse_pod(&one(), &Defaults::default()).unwrap().unwrap();
    let shape = Shape::new(&request);
    for name in ledger.nodes() {
        let (fit, check) = (shape.fit(&ledger, name), shape.check(&ledger, name));
        assert_eq!(fit.map_err(|refusal| refusal.code).err(), check.err());
    }
}

fn one() -> PodView {
    let container = ContainerView {
        name: "main".to_owned(),
        kind: ContainerKind::App,
        limits: [(COUNT.to_owned(), "1".to_owned())].into(),
        requests: BTreeMap::new(),
        env: BTreeMap::new(),
        privileged: false,
    };
    PodView { containers: vec![container], ..PodView::default() }
}
