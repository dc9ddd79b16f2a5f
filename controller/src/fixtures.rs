//! Small facts for tests.

use std::sync::Arc;

use mullion_core::facts::{CardFact, CardMode, ContainerKind, KubeNodeFact, NodeFact};
use mullion_core::request::{ContainerRequest, ContainerWish, Defaults, MemoryAsk, PodRequest, Policy};
use mullion_core::units::{CoreShare, Mib};

use crate::config::Config;
use crate::fake_api::FakeApi;
use crate::metrics::Metrics;
use crate::reconcile::Context;
use crate::store::Store;

/// What reconcilers share, on `api` and knowing nothing.
pub fn context(api: &FakeApi) -> Context {
    Context {
        cluster: api.cluster(),
        store: Arc::new(Store::new(Defaults::default())),
        turns: Arc::default(),
        metrics: Metrics::new(),
        config: Arc::new(Config::default()),
    }
}

/// A healthy shared card.
pub fn card(uuid: &str, memory: u64) -> CardFact {
    CardFact {
        uuid: uuid.into(),
        index: 0,
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: Mib(memory),
        cores: 100,
        slots: 10,
        numa_node: None,
        healthy: true,
        cordoned: false,
        mode: CardMode::Shared,
    }
}

/// A `GPUNode` that fits [`kube_node`].
pub fn node(name: &str, cards: Vec<CardFact>) -> NodeFact {
    NodeFact {
        name: name.into(),
        node_uid: format!("uid-of-{name}").into(),
        observation: 1,
        cordoned: false,
        driver_ready: true,
        cards,
    }
}

/// A Node with that many slots.
pub fn kube_node(name: &str, slots: u64) -> KubeNodeFact {
    KubeNodeFact { name: name.into(), uid: format!("uid-of-{name}").into(), allocatable_slots: slots }
}

/// One app container on one card, best effort.
pub fn request(memory: u64) -> PodRequest {
    let request =
        ContainerRequest { count: 1, memory: MemoryAsk::Mib(Mib(memory)), cores: CoreShare::BEST_EFFORT };
    PodRequest {
        containers: vec![ContainerWish { name: "main".to_owned(), kind: ContainerKind::App, request }],
        node_policy: Policy::Binpack,
        card_policy: Policy::Spread,
    }
}
