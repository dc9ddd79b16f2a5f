//! Properties of the parser: it takes what it documents, and refuses everything else without a panic.

mod common;

use std::collections::BTreeMap;

use mullion_core::facts::ContainerKind;
use mullion_core::request::{
    CARD_POLICY, CORES, COUNT, ContainerView, Defaults, MEMORY, MEMORY_PERCENTAGE, MemoryAsk, NODE_POLICY,
    PodView, admit_pod, mentions_us, parse_container, parse_pod, warnings,
};
use mullion_core::units::Mib;
use proptest::prelude::*;

fn limits_of(limits: BTreeMap<String, String>) -> ContainerView {
    ContainerView {
        name: "a".to_owned(),
        kind: ContainerKind::App,
        limits,
        requests: BTreeMap::new(),
        env: BTreeMap::new(),
        privileged: false,
    }
}

/// Text that looks like a quantity more often than chance, and sometimes not at all.
fn quantity() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[0-9]{1,24}",
        "[-+]?[0-9]{0,12}[.eE]?[0-9]{0,4}(k|m|n|u|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?",
        any::<u64>().prop_map(|n| n.to_string()),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![COUNT, MEMORY, MEMORY_PERCENTAGE, CORES, "nvidia.com/priority"])
            .prop_map(str::to_owned),
        prop::sample::select(vec![NODE_POLICY, CARD_POLICY, "hami.io/vgpu-node", "nvidia.com/use-gputype"])
            .prop_map(str::to_owned),
        "(nvidia.com|hami.io|mullion.io)/[a-z0-9.-]{0,12}",
        any::<String>(),
    ]
}

fn pairs() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map(key(), quantity(), 0..5)
}

fn any_container() -> impl Strategy<Value = ContainerView> {
    let kind = prop::sample::select(vec![ContainerKind::Init, ContainerKind::Sidecar, ContainerKind::App]);
    let env = prop::collection::btree_map(
        prop_oneof![Just("CUDA_DISABLE_CONTROL".to_owned()), any::<String>()],
        prop::option::of(quantity()),
        0..3,
    );
    (any::<String>(), kind, pairs(), pairs(), env, any::<bool>()).prop_map(
        |(name, kind, limits, requests, env, privileged)| ContainerView {
            name,
            kind,
            limits,
            requests,
            env,
            privileged,
        },
    )
}

fn any_pod() -> impl Strategy<Value = PodView> {
    (pairs(), pairs(), prop::collection::vec(any_container(), 0..5)).prop_map(
        |(annotations, labels, containers)| PodView { annotations, labels, containers, ..PodView::default() },
    )
}

proptest! {
    #![proptest_config(common::config(2000))]

    // BL-07
    #[test]
    fn no_pod_makes_the_parser_panic(pod in any_pod()) {
        let defaults = Defaults::default();
        let parsed = parse_pod(&pod, &defaults);
        if let Err(error) = &parsed {
            prop_assert!(!error.code().is_empty());
            prop_assert!(error.to_string().len() < 2000);
        }
        if !mentions_us(&pod) {
            prop_assert_eq!(&parsed, &Ok(None));
        }
        if let Ok(Some(request)) = &parsed {
            prop_assert!(!request.containers.is_empty());
            prop_assert_eq!(parse_pod(&pod, &defaults), parsed.clone());
        }
        if let Ok(admitted) = admit_pod(&pod, &defaults) {
            prop_assert_eq!(Ok(admitted), parsed);
        }
        let _ = warnings(&pod);
    }

    // WH-10: booked exactly as documented, or refused; never wrapped, never zero.
    #[test]
    fn memory_is_booked_exactly_or_refused(text in quantity()) {
        let limits = BTreeMap::from([(MEMORY.to_owned(), text.clone())]);
        match parse_container(&limits_of(limits), &Defaults::default()) {
            Ok(Some(request)) => {
                let digits = text.strip_suffix('k').unwrap_or(&text);
                let scale = if digits == text { 1 } else { 1000 };
                let number: u128 = digits.parse().unwrap();
                let MemoryAsk::Mib(Mib(booked)) = request.memory else {
                    return Err(TestCaseError::fail("not MiB"));
                };
                prop_assert_eq!(u128::from(booked), number * scale);
                prop_assert!((1..=2_147_483_647).contains(&booked));
            }
            Ok(None) => prop_assert!(false, "{} was ignored", text),
            Err(error) => prop_assert!(error.to_string().contains(MEMORY)),
        }
    }

    // FS-06: containers without GPUs are nowhere, so they can shift nothing.
    #[test]
    fn containers_without_gpus_change_nothing(
        gpu in prop::collection::vec((1_u32..4, 1_u64..9000, 0_u8..=100, 0_usize..3), 1..4),
        idle in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..3), 0..4),
    ) {
        let kinds = [ContainerKind::Init, ContainerKind::Sidecar, ContainerKind::App];
        let mut containers = Vec::new();
        for (position, (count, memory, cores, kind)) in gpu.into_iter().enumerate() {
            let limits = BTreeMap::from([
                (COUNT.to_owned(), count.to_string()),
                (MEMORY.to_owned(), memory.to_string()),
                (CORES.to_owned(), cores.to_string()),
            ]);
            let name = format!("gpu-{position}");
            containers.push(ContainerView { name, kind: kinds[kind], ..limits_of(limits) });
        }
        let pod = PodView { containers: containers.clone(), ..PodView::default() };
        let want = parse_pod(&pod, &Defaults::default());
        for (position, (place, kind)) in idle.into_iter().enumerate() {
            let name = format!("idle-{position}");
            let view = ContainerView { name, kind: kinds[kind], ..limits_of(BTreeMap::new()) };
            containers.insert(place.index(containers.len() + 1), view);
        }
        let pod = PodView { containers, ..PodView::default() };
        prop_assert_eq!(parse_pod(&pod, &Defaults::default()), want);
    }
}
