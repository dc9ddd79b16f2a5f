//! Random histories of a cluster: two deciders that each see the facts late, an agent per node, pods that come
//! and go, cards that fail and return. Whatever happens, no card is over-given and every fold agrees.

mod common;

use std::collections::BTreeMap;

use common::{allocation, cards, kube_fact, node_fact, observed, percent, pod, share, snapshot};
use mullion_core::facts::{AllocationFact, CardFact, CardMode, ContainerKind, Event};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::request::{ContainerRequest, ContainerWish, MemoryAsk, PodRequest, Policy};
use mullion_core::units::{AllocationUid, GpuUuid, Mib, NodeName};
use proptest::prelude::*;
use proptest::sample::Index;

const NODES: [&str; 2] = ["node-a", "node-b"];

/// One thing that happens.
#[derive(Clone, Debug)]
enum Step {
    /// A decider places a pod by what it has seen.
    Decide { decider: usize, node: usize, request: PodRequest },
    /// A decider, or an agent, sees some more facts.
    See { who: usize, facts: usize },
    /// A bind fails: its allocation is never written.
    Fail { decider: usize, node: usize, request: PodRequest },
    /// A node's agent prepares one of its allocations, if its own ledger says that it stands.
    Prepare { node: usize, which: Index },
    /// The init containers of a prepared one end.
    InitDone { node: usize, which: Index },
    /// A pod ends and its agent proves it.
    Release { node: usize, which: Index },
    /// The object of a released one goes.
    Gone { which: Index },
    /// A card fails, or recovers.
    Health { node: usize, card: Index, healthy: bool },
    /// The kubelet's plugin dies, or is back.
    Plugin { node: usize, slots: u64 },
}

fn requests() -> impl Strategy<Value = PodRequest> {
    let kinds = prop::sample::select(vec![ContainerKind::Init, ContainerKind::Sidecar, ContainerKind::App]);
    let memory = prop_oneof![
        3 => (1_u64..=6).prop_map(|m| MemoryAsk::Mib(Mib(m * 1000))),
        1 => prop::sample::select(vec![percent(30), percent(100)]),
    ];
    let cores = prop::sample::select(vec![0_u8, 0, 30, 50, 100]);
    let policies = prop::sample::select(vec![Policy::Binpack, Policy::Spread]);
    (prop::collection::vec((kinds, 1_u32..=2, memory, cores), 1..=3), policies).prop_map(
        |(containers, card_policy)| {
            let wish = |(at, (kind, count, memory, cores))| {
                let request = ContainerRequest { count, memory, cores: share(cores) };
                ContainerWish { name: format!("c{at}"), kind, request }
            };
            PodRequest { card_policy, ..pod(containers.into_iter().enumerate().map(wish).collect()) }
        },
    )
}

fn steps() -> impl Strategy<Value = Step> {
    let node = 0..NODES.len();
    let which = any::<Index>;
    prop_oneof![
        8 => (0..2_usize, node.clone(), requests())
            .prop_map(|(decider, node, request)| Step::Decide { decider, node, request }),
        6 => (0..4_usize, 1..6_usize).prop_map(|(who, facts)| Step::See { who, facts }),
        1 => (0..2_usize, node.clone(), requests())
            .prop_map(|(decider, node, request)| Step::Fail { decider, node, request }),
        6 => (node.clone(), which()).prop_map(|(node, which)| Step::Prepare { node, which }),
        2 => (node.clone(), which()).prop_map(|(node, which)| Step::InitDone { node, which }),
        3 => (node.clone(), which()).prop_map(|(node, which)| Step::Release { node, which }),
        1 => which().prop_map(|which| Step::Gone { which }),
        1 => (node.clone(), which(), any::<bool>())
            .prop_map(|(node, card, healthy)| Step::Health { node, card, healthy }),
        1 => (node, prop::sample::select(vec![0_u64, 8, 20]))
            .prop_map(|(node, slots)| Step::Plugin { node, slots }),
    ]
}

/// Somebody with a ledger: how far it has seen, and what it sees.
struct Observer {
    ledger: Ledger,
    seen: usize,
}

/// The cluster.
struct World {
    /// Every fact, in the order in which the API server took them.
    log: Vec<Event>,
    deciders: [Observer; 2],
    agents: [Observer; 2],
    inventory: [Vec<CardFact>; 2],
    allocations: u32,
    voided: u32,
}

impl World {
    fn new() -> Self {
        let observer = || Observer { ledger: Ledger::default(), seen: 0 };
        let small = |cards: Vec<CardFact>| {
            let modes = [CardMode::Shared, CardMode::Shared, CardMode::Exclusive];
            let with = |(card, mode)| CardFact { slots: 4, mode, ..card };
            cards.into_iter().zip(modes).map(with).collect::<Vec<_>>()
        };
        let inventory = [small(cards(3, 10_000)), small(cards(2, 8000))];
        let mut world = Self {
            log: Vec::new(),
            deciders: [observer(), observer()],
            agents: [observer(), observer()],
            inventory,
            allocations: 0,
            voided: 0,
        };
        for (node, name) in NODES.into_iter().enumerate() {
            world.log.push(Event::KubeNodeObserved(kube_fact(name, 20)));
            world.report(node);
        }
        for who in 0..4 {
            world.see(who, usize::MAX);
        }
        world
    }

    fn report(&mut self, node: usize) {
        let fact = node_fact(NODES[node], self.inventory[node].clone());
        self.log.push(Event::NodeObserved(fact));
    }

    fn observer(&mut self, who: usize) -> &mut Observer {
        if who < 2 { &mut self.deciders[who] } else { &mut self.agents[who - 2] }
    }

    fn see(&mut self, who: usize, facts: usize) {
        let from = self.observer(who).seen;
        let to = from.saturating_add(facts).min(self.log.len());
        let news = self.log[from..to].to_vec();
        let observer = self.observer(who);
        for event in &news {
            observer.ledger.apply(event);
        }
        observer.seen = to;
    }

    /// What the agent of `node` changes about one of its allocations it knows at once; all others see it later.
    fn agent_writes(&mut self, node: usize, fact: &AllocationFact) {
        self.agents[node].ledger.apply(&observed(fact));
        self.log.push(observed(fact));
    }

    /// One of the agent's allocations that `filter` lets through.
    fn pick(
        &self,
        node: usize,
        which: Index,
        filter: impl Fn(&AllocationFact) -> bool,
    ) -> Option<AllocationFact> {
        let known = self.agents[node].ledger.allocations_on(&NODES[node].into());
        let known: Vec<_> = known.filter(|a| filter(a)).cloned().collect();
        (!known.is_empty()).then(|| which.get(&known).clone())
    }

    fn decide(
        &mut self,
        decider: usize,
        node: usize,
        request: &PodRequest,
    ) -> Result<Option<AllocationFact>, TestCaseError> {
        let ledger = &mut self.deciders[decider].ledger;
        let name = NodeName::from(NODES[node]);
        let Ok(placement) = ledger.fit(request, &name) else { return Ok(None) };
        self.allocations += 1;
        // Clocks disagree: creation times are in no order.
        let created = i64::from(self.allocations * 7 % 5);
        let uid = format!("{:02}-{decider}", self.allocations * 37 % 100);
        let fact = AllocationFact { created, ..allocation(&uid, ledger, NODES[node], &placement) };
        prop_assert!(ledger.apply(&Event::Held(fact.clone())));
        prop_assert_eq!(ledger.hold_standing(&fact.pod.uid), Some(Standing::Holds));
        Ok(Some(fact))
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Decide { decider, node, request } => {
                if let Some(fact) = self.decide(decider, node, &request)? {
                    self.log.push(observed(&fact));
                }
            }
            Step::Fail { decider, node, request } => {
                let before = snapshot(&self.deciders[decider].ledger);
                if let Some(fact) = self.decide(decider, node, &request)? {
                    self.deciders[decider].ledger.apply(&Event::HoldEnded(fact.pod.uid));
                }
                prop_assert_eq!(snapshot(&self.deciders[decider].ledger), before);
            }
            Step::See { who, facts } => self.see(who, facts),
            Step::Prepare { node, which } => {
                if let Some(fact) = self.pick(node, which, |a| !a.prepared && !a.released) {
                    match self.agents[node].ledger.standing(&fact.uid) {
                        Some(Standing::Holds) => {
                            self.agent_writes(node, &AllocationFact { prepared: true, ..fact });
                        }
                        // Its pod is evicted.
                        Some(Standing::Void { .. }) => {
                            self.voided += 1;
                            self.agent_writes(node, &AllocationFact { released: true, ..fact });
                        }
                        _ => {}
                    }
                }
            }
            Step::InitDone { node, which } => {
                if let Some(fact) = self.pick(node, which, |a| a.prepared && !a.released) {
                    self.agent_writes(node, &AllocationFact { init_done: true, ..fact });
                }
            }
            Step::Release { node, which } => {
                if let Some(fact) = self.pick(node, which, |a| !a.released) {
                    self.agent_writes(node, &AllocationFact { released: true, ..fact });
                }
            }
            Step::Gone { which } => {
                let all = Ledger::replay(&self.log);
                let over: Vec<_> = all.allocations().filter(|a| a.released).collect();
                if !over.is_empty() {
                    self.log.push(Event::AllocationGone(which.get(&over).uid.clone()));
                }
            }
            Step::Health { node, card, healthy } => {
                let at = card.index(self.inventory[node].len());
                self.inventory[node][at].healthy = healthy;
                self.report(node);
            }
            Step::Plugin { node, slots } => {
                self.log.push(Event::KubeNodeObserved(kube_fact(NODES[node], slots)));
            }
        }
        self.check()
    }

    /// No ledger over-gives, and what really runs fits: counted here anew, from the facts alone.
    fn check(&self) -> Result<(), TestCaseError> {
        for observer in self.deciders.iter().chain(&self.agents) {
            prop_assert_eq!(observer.ledger.overcommitted(), vec![]);
        }
        for (node, agent) in self.agents.iter().enumerate() {
            let live = agent.ledger.allocations_on(&NODES[node].into());
            let live: Vec<_> = live.filter(|a| a.prepared && !a.released).collect();
            for card in &self.inventory[node] {
                let (mut memory, mut cores, mut slots) = (0, 0, 0);
                for peak in live.iter().map(|a| peak(a, &card.uuid)) {
                    memory += peak.0;
                    cores += peak.1;
                    slots += peak.2;
                }
                let most = if card.mode == CardMode::Exclusive { 1 } else { card.slots };
                prop_assert!(memory <= card.memory.0, "{} MiB on {}", memory, card.uuid);
                prop_assert!(cores <= u64::from(card.cores), "{} % on {}", cores, card.uuid);
                prop_assert!(slots <= u64::from(most), "{} containers on {}", slots, card.uuid);
            }
        }
        Ok(())
    }
}

/// The most that `allocation` uses of a card at one time: MiB, percent, containers.
fn peak(allocation: &AllocationFact, uuid: &GpuUuid) -> (u64, u64, u64) {
    let mut most = (0, 0, 0);
    let containers = &allocation.containers;
    let take = |running: &[usize]| {
        let devices = running.iter().flat_map(|&c| &containers[c].devices).filter(|d| &d.uuid == uuid);
        devices.fold((0, 0, 0), |(memory, cores, slots), d| {
            (memory + d.memory.0, cores + u64::from(d.cores.get()), slots + 1)
        })
    };
    let mut phases =
        vec![(0..containers.len()).filter(|&c| containers[c].kind != ContainerKind::Init).collect()];
    for init in (0..containers.len()).filter(|&c| containers[c].kind == ContainerKind::Init) {
        let beside = (0..init).filter(|&c| containers[c].kind == ContainerKind::Sidecar);
        let phase: Vec<usize> = beside.chain([init]).collect();
        if !allocation.init_done {
            phases.push(phase);
        }
    }
    for phase in phases {
        let now = take(&phase);
        most = (most.0.max(now.0), most.1.max(now.1), most.2.max(now.2));
    }
    most
}

/// `log` with facts about different objects shuffled by `keys` and some repeated. What is said of one node keeps
/// its order, as a watch delivers it; allocations need no order at all.
fn shuffled(log: &[Event], keys: &[usize]) -> Vec<Event> {
    let key = |at: usize| keys[at % keys.len()].wrapping_mul(at | 1);
    let mut lanes: BTreeMap<String, Vec<Event>> = BTreeMap::new();
    for (at, event) in log.iter().enumerate() {
        let lane = match event {
            Event::NodeObserved(fact) => format!("gpu {}", fact.name),
            Event::KubeNodeObserved(fact) => format!("kube {}", fact.name),
            _ => format!("free {at}"),
        };
        lanes.entry(lane).or_default().push(event.clone());
        if key(at) % 4 == 0 {
            lanes.entry(format!("again {at}")).or_default().extend(match event {
                Event::AllocationObserved(_) | Event::AllocationGone(_) => Some(event.clone()),
                _ => None,
            });
        }
    }
    let mut lanes: Vec<_> = lanes.into_values().map(|events| events.into_iter().peekable()).collect();
    let mut out = Vec::new();
    for at in 0.. {
        lanes.retain_mut(|lane| lane.peek().is_some());
        if lanes.is_empty() {
            break;
        }
        let lane = key(at) % lanes.len();
        out.extend(lanes[lane].next());
    }
    out
}

proptest! {
    #![proptest_config(common::config(2000))]

    #[test]
    fn no_card_is_ever_over_given(
        steps in prop::collection::vec(steps(), 1..60),
        keys in prop::collection::vec(any::<usize>(), 1..16),
    ) {
        let mut world = World::new();
        for step in steps {
            world.step(step)?;
        }
        // Everyone catches up: all folds are one, live or replayed, in whatever order, duplicates and all.
        for who in 0..4 {
            world.see(who, usize::MAX);
        }
        let replayed = Ledger::replay(&world.log);
        let want = snapshot(&replayed);
        for observer in world.deciders.iter().chain(&world.agents) {
            prop_assert_eq!(observer.ledger.holds().count(), 0, "a hold outlived its allocation");
            prop_assert_eq!(snapshot(&observer.ledger), snapshot(&replayed));
        }
        let mixed = Ledger::replay(&shuffled(&world.log, &keys));
        prop_assert_eq!(snapshot(&mixed), want);
        world.check()?;
    }

    /// With one decider that sees its own holds nobody is ever void, in whatever order pods are prepared: that
    /// needs every rule of the fold to be symmetric.
    #[test]
    fn one_decider_voids_nobody(
        requests in prop::collection::vec(requests(), 1..20),
        order in prop::collection::vec((any::<Index>(), 0..4_u8), 0..40),
    ) {
        let mut ledger = World::new().deciders[0].ledger.clone();
        let name = NodeName::from(NODES[0]);
        let mut all: Vec<AllocationFact> = Vec::new();
        let mut waiting = requests.into_iter();
        for (which, act) in order {
            if act == 0 || all.is_empty() {
                let Some(request) = waiting.next() else { continue };
                let Ok(placement) = ledger.fit(&request, &name) else { continue };
                let fact = allocation(&format!("{:02}", all.len()), &ledger, NODES[0], &placement);
                ledger.apply(&Event::Held(fact.clone()));
                ledger.apply(&observed(&fact));
                all.push(fact);
            } else {
                let at = which.index(all.len());
                let fact = &mut all[at];
                match act {
                    1 => fact.prepared = true,
                    2 if fact.prepared => fact.init_done = true,
                    _ => fact.released = true,
                }
                let fact = fact.clone();
                ledger.apply(&observed(&fact));
            }
            for fact in &all {
                let standing = ledger.standing(&fact.uid).unwrap();
                prop_assert!(matches!(standing, Standing::Holds | Standing::Released), "{:?}", standing);
            }
            prop_assert_eq!(ledger.void_on(&name), Vec::<AllocationUid>::new());
        }
    }

    /// Usage is the sum over what holds: nothing is carried along by hand.
    #[test]
    fn usage_is_the_sum_of_what_holds(steps in prop::collection::vec(steps(), 1..40)) {
        let mut world = World::new();
        for step in steps {
            world.step(step)?;
            for who in [0, 2] {
                world.see(who, 1);
            }
            let ledger = &world.deciders[0].ledger;
            for node in NODES.map(NodeName::from) {
                for usage in ledger.card_usage(&node) {
                    let observed = ledger.allocations_on(&node);
                    let observed = observed.filter(|a| ledger.standing(&a.uid) == Some(Standing::Holds));
                    let holds = ledger.holds().filter(|h| h.node == node);
                    let holds = holds.filter(|h| ledger.hold_standing(&h.pod.uid) == Some(Standing::Holds));
                    let sum = observed.chain(holds).map(|a| peak(a, &usage.card.uuid));
                    let sum = sum.fold((0, 0, 0), |s, p| (s.0 + p.0, s.1 + p.1, s.2 + p.2));
                    prop_assert_eq!((usage.used.memory.0, usage.used.cores, usage.used.slots), sum);
                    prop_assert_eq!(usage.free.memory.0, usage.card.memory.0 - sum.0);
                }
            }
        }
    }
}

/// The histories are worth something only if deciders do collide in them.
#[test]
fn histories_do_hold_collisions() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::new(common::config(1));
    let histories = prop::collection::vec(steps(), 60);
    let mut voided = 0;
    for _ in 0..100 {
        let mut world = World::new();
        for step in histories.new_tree(&mut runner).unwrap().current() {
            world.step(step).unwrap();
        }
        voided += world.voided;
    }
    assert!(voided > 10, "{voided}");
}
