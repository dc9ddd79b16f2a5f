use super::*;

/// A container whose limits are `limits`.
fn container(limits: &[(&str, &str)]) -> ContainerView {
    ContainerView {
        name: "gpu-main".to_owned(),
        kind: ContainerKind::App,
        limits: map(limits),
        requests: BTreeMap::new(),
        env: BTreeMap::new(),
        privileged: false,
    }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn pod(annotations: &[(&str, &str)], containers: Vec<ContainerView>) -> PodView {
    PodView {
        namespace: "team-a".to_owned(),
        name: "train".to_owned(),
        annotations: map(annotations),
        containers,
        ..PodView::default()
    }
}

fn parse(limits: &[(&str, &str)]) -> Result<Option<ContainerRequest>, RequestError> {
    parse_container(&container(limits), &Defaults::default())
}

fn asks(count: u32, memory: MemoryAsk, cores: u8) -> ContainerRequest {
    ContainerRequest { count, memory, cores: CoreShare::new(cores).unwrap() }
}

fn mib(memory: u64) -> MemoryAsk {
    MemoryAsk::Mib(Mib(memory))
}

fn percent(percent: u8) -> MemoryAsk {
    MemoryAsk::Percent(Percent::new(percent).unwrap())
}

/// A pod of one GPU container with these annotations.
fn annotated(annotations: &[(&str, &str)]) -> Result<Option<PodRequest>, RequestError> {
    parse_pod(&pod(annotations, vec![container(&[(COUNT, "1"), (MEMORY, "3000")])]), &Defaults::default())
}

#[test]
fn a_container_asks_for() {
    for (case, limits, want) in [
        ("nothing", &[][..], None),
        ("nothing of ours", &[("cpu", "500m"), ("nvidia.com/hostdev", "1")], None),
        ("no card", &[(COUNT, "0")], None),
        ("a bare count: whole cards", &[(COUNT, "2")], Some(asks(2, percent(100), 100))),
        ("HAMi's example", &[(COUNT, "1"), (MEMORY, "3000"), (CORES, "30")], Some(asks(1, mib(3000), 30))),
        // WH-12: memory alone is one card, best effort on cores.
        ("memory alone", &[(MEMORY, "3000")], Some(asks(1, mib(3000), 0))),
        ("memory with a decimal k", &[(MEMORY, "20k")], Some(asks(1, mib(20_000), 0))),
        ("percentage alone", &[(MEMORY_PERCENTAGE, "50")], Some(asks(1, percent(50), 0))),
        (
            "all of the memory is the whole card",
            &[(MEMORY_PERCENTAGE, "100")],
            Some(asks(1, percent(100), 100)),
        ),
        (
            "all of the memory, cores named",
            &[(MEMORY_PERCENTAGE, "100"), (CORES, "20")],
            Some(asks(1, percent(100), 20)),
        ),
        ("cores alone: all of the memory", &[(CORES, "30")], Some(asks(1, percent(100), 30))),
        ("cores 0: best effort", &[(COUNT, "1"), (CORES, "0")], Some(asks(1, percent(100), 0))),
        ("the largest count", &[(COUNT, "64"), (MEMORY, "1")], Some(asks(64, mib(1), 0))),
        ("the largest memory", &[(MEMORY, "2147483647")], Some(asks(1, mib(2_147_483_647), 0))),
    ] {
        assert_eq!(parse(limits), Ok(want), "{case}");
    }
}

#[test]
fn a_configured_memory_makes_a_bare_count_a_slice() {
    let defaults = Defaults { memory: Some(Mib(4000)), ..Defaults::default() };
    let parse = |limits: &[(&str, &str)]| parse_container(&container(limits), &defaults).unwrap().unwrap();
    assert_eq!(parse(&[(COUNT, "1")]), asks(1, mib(4000), 0));
    assert_eq!(parse(&[(CORES, "30")]), asks(1, mib(4000), 30));
    assert_eq!(parse(&[(MEMORY, "1")]), asks(1, mib(1), 0));
}

#[test]
fn a_container_is_refused_for() {
    for (case, limits, code, says) in [
        // WH-10
        ("a binary suffix", &[(MEMORY, "16Gi")][..], "MalformedQuantity", "write 16384"),
        ("a binary suffix below a MiB", &[(MEMORY, "512Ki")], "MalformedQuantity", "no binary suffix"),
        (
            "a binary suffix past 64 bits",
            &[(MEMORY, "99999999999999999Ei")],
            "MalformedQuantity",
            "no binary suffix",
        ),
        ("a binary suffix on a count", &[(COUNT, "1Gi")], "MalformedQuantity", "no binary suffix"),
        ("megabytes", &[(MEMORY, "16000M")], "MalformedQuantity", "counts MiB"),
        ("gigabytes", &[(MEMORY, "16G")], "MalformedQuantity", "counts MiB"),
        (
            "thousandths",
            &[(MEMORY, "1500m")],
            "MalformedQuantity",
            "(fractions) are not taken: write a whole",
        ),
        ("a fraction", &[(MEMORY, "0.5")], "MalformedQuantity", "fractions"),
        ("an exponent", &[(MEMORY, "1e3")], "MalformedQuantity", "whole number"),
        ("a negative number", &[(MEMORY, "-1")], "MalformedQuantity", "negative: write a whole number"),
        ("a sign", &[(MEMORY, "+1")], "MalformedQuantity", "whole number"),
        ("nothing at all", &[(MEMORY, "")], "MalformedQuantity", "whole number"),
        ("only a suffix", &[(MEMORY, "k")], "MalformedQuantity", "whole number"),
        ("a space", &[(MEMORY, " 3000")], "MalformedQuantity", "whole number"),
        ("digits of another script", &[(MEMORY, "３０００")], "MalformedQuantity", "whole number"),
        ("2^31", &[(MEMORY, "2147483648")], "QuantityOutOfRange", "range 1 to 2147483647: it counts MiB"),
        ("2^32", &[(MEMORY, "4294967296")], "QuantityOutOfRange", "range 1 to 2147483647: it counts MiB"),
        ("2^64", &[(MEMORY, "18446744073709551616")], "MalformedQuantity", "too large"),
        ("2^64 by suffix", &[(MEMORY, "18446744073709552k")], "MalformedQuantity", "too large"),
        ("no memory", &[(COUNT, "1"), (MEMORY, "0")], "QuantityOutOfRange", "whole card"),
        ("no percentage", &[(MEMORY_PERCENTAGE, "0")], "QuantityOutOfRange", "range 1 to 100: "),
        ("more than the card", &[(MEMORY_PERCENTAGE, "101")], "QuantityOutOfRange", "range 1 to 100: "),
        ("more than its compute", &[(CORES, "101")], "QuantityOutOfRange", "range 0 to 100: "),
        ("too many cards", &[(COUNT, "65")], "QuantityOutOfRange", "range 1 to 64: "),
        ("5k cards", &[(COUNT, "5k")], "QuantityOutOfRange", "memory goes to nvidia.com/gpumem"),
        ("memory of no card", &[(COUNT, "0"), (MEMORY, "3000")], "CountZero", "at least 1"),
        ("cores of no card", &[(COUNT, "0"), (CORES, "0")], "CountZero", "nvidia.com/gpucores"),
        ("memory twice", &[(MEMORY, "1"), (MEMORY_PERCENTAGE, "1")], "MemoryAskedTwice", "keep one"),
        (
            "priority",
            &[(COUNT, "1"), ("nvidia.com/priority", "0")],
            "UnsupportedResource",
            "CUDA_TASK_PRIORITY",
        ),
        (
            "NVIDIA's MIG resources",
            &[("nvidia.com/mig-1g.10gb", "1")],
            "UnsupportedResource",
            "mig-1g.10gb is not supported: MIG instances",
        ),
        // WH-08
        ("a misspelt memory", &[(COUNT, "1"), ("nvidia.com/gpu-mem", "1")], "UnsupportedResource", "gpu-mem"),
        ("memory under another name", &[("nvidia.com/mem", "1")], "UnsupportedResource", "gpumem"),
        (
            "cores under another name",
            &[(COUNT, "1"), ("nvidia.com/cores", "1")],
            "UnsupportedResource",
            "gpucores",
        ),
        ("misspelt cores", &[("nvidia.com/gpucore", "1")], "UnsupportedResource", "use nvidia.com/gpu"),
        ("NVIDIA's shared cards", &[("nvidia.com/gpu.shared", "1")], "UnsupportedResource", "gpu.shared"),
    ] {
        let error = parse(limits).expect_err(case);
        let text = error.to_string();
        assert_eq!(error.code(), code, "{case}: {text}");
        assert!(text.starts_with("container gpu-main: "), "{case}: {text}");
        assert!(text.contains(says), "{case}: {text}");
    }
}

#[test]
fn limits_win_over_requests() {
    for (case, limit, request, want) in [
        ("limit only", Some("3000"), None, Ok(3000)),
        ("request only", None, Some("3000"), Ok(3000)),
        ("equal", Some("3000"), Some("3k"), Ok(3000)),
        ("different", Some("3000"), Some("2000"), Err("LimitDiffersFromRequest")),
        ("a malformed request beside a good limit", Some("3000"), Some("3Gi"), Err("MalformedQuantity")),
    ] {
        let mut view = container(&[]);
        view.limits.extend(limit.map(|v| (MEMORY.to_owned(), v.to_owned())));
        view.requests.extend(request.map(|v| (MEMORY.to_owned(), v.to_owned())));
        let got = parse_container(&view, &Defaults::default());
        let got = got.map(|r| r.unwrap().memory).map_err(|e| e.code());
        assert_eq!(got, want.map(mib), "{case}");
    }
}

#[test]
fn containers_that_no_limit_would_hold_are_refused() {
    for (case, privileged, env, want) in [
        ("plain", false, None, Ok(())),
        ("privileged", true, None, Err("PrivilegedContainer")),
        ("limits off", false, Some(Some("true")), Err("ControlDisabled")),
        ("limits off, other spelling", false, Some(Some("1")), Err("ControlDisabled")),
        ("limits from elsewhere", false, Some(None), Err("ControlDisabled")),
        ("limits on", false, Some(Some("false")), Ok(())),
    ] {
        let mut view = container(&[(COUNT, "1")]);
        view.privileged = privileged;
        view.env.extend(env.map(|v| (DISABLE_CONTROL.to_owned(), v.map(str::to_owned))));
        let got = parse_container(&view, &Defaults::default()).map(|_| ()).map_err(|e| e.code());
        assert_eq!(got, want, "{case}");
        // The same container without GPUs is none of our business.
        view.limits.clear();
        assert_eq!(parse_container(&view, &Defaults::default()), Ok(None), "{case}, no GPU");
    }
}

#[test]
fn of_two_wishes_the_one_that_is_right_is_kept() {
    for (policy, priority, want, codes) in [
        ("force", "high", (true, 1), vec!["MalformedPriority"]),
        ("disable", "0", (false, 0), vec!["CoreLimitLifted"]),
        ("forced", "", (false, 1), vec!["UnknownCorePolicy", "MalformedPriority"]),
    ] {
        let mut view = container(&[(COUNT, "1")]);
        for (key, value) in [(CORE_POLICY, policy), (TASK_PRIORITY, priority)] {
            view.env.insert(key.to_owned(), Some(value.to_owned()));
        }
        let (wishes, wrong) = compute_wishes_as_far_as_read(&view);
        assert_eq!((wishes.force, wishes.priority), want, "{policy}, {priority}");
        assert_eq!(wrong.iter().map(RequestError::code).collect::<Vec<_>>(), codes);
    }
}

#[test]
fn compute_wishes_are_read_or_refused() {
    let plain = ComputeWishes::default();
    let forced = ComputeWishes { force: true, ..plain };
    for (case, key, value, want) in [
        ("nothing", "OTHER", Some("x"), Ok(plain)),
        ("force", CORE_POLICY, Some("force"), Ok(forced)),
        ("in any case", CORE_POLICY, Some("FoRcE"), Ok(forced)),
        ("default", CORE_POLICY, Some("Default"), Ok(plain)),
        ("empty", CORE_POLICY, Some(""), Ok(plain)),
        ("the own limit lifted", CORE_POLICY, Some("DISABLE"), Err("CoreLimitLifted")),
        ("a typo", CORE_POLICY, Some("forced"), Err("UnknownCorePolicy")),
        ("from elsewhere", CORE_POLICY, None, Err("UnknownCorePolicy")),
        ("most urgent", TASK_PRIORITY, Some("0"), Ok(ComputeWishes { priority: 0, ..plain })),
        ("patient", TASK_PRIORITY, Some("7"), Ok(ComputeWishes { priority: 7, ..plain })),
        ("negative", TASK_PRIORITY, Some("-1"), Err("MalformedPriority")),
        ("a word", TASK_PRIORITY, Some("high"), Err("MalformedPriority")),
        ("too large", TASK_PRIORITY, Some("2147483648"), Err("MalformedPriority")),
        ("empty", TASK_PRIORITY, Some(""), Err("MalformedPriority")),
        ("from elsewhere", TASK_PRIORITY, None, Err("MalformedPriority")),
    ] {
        let mut view = container(&[(COUNT, "1")]);
        view.env.insert(key.to_owned(), value.map(str::to_owned));
        assert_eq!(compute_wishes(&view).map_err(|e| e.code()), want, "{case}");
        let (wishes, wrong) = compute_wishes_as_far_as_read(&view);
        assert_eq!(wishes, want.unwrap_or(plain), "{case}, as far as read");
        assert_eq!(wrong.first().map(RequestError::code), want.err(), "{case}, as far as read");
        assert!(wrong.len() <= 1, "{case}");
        // Only a creation is refused for it: a pod that is there already is placed and looked after.
        let mut pod = PodView { containers: vec![view], ..PodView::default() };
        let admitted = admit_pod(&pod, &Defaults::default()).map(|_| ()).map_err(|e| e.code());
        assert_eq!(admitted, want.map(|_| ()), "{case}, at admission");
        assert!(parse_pod(&pod, &Defaults::default()).is_ok(), "{case}, later");
        pod.containers[0].limits.clear();
        assert_eq!(admit_pod(&pod, &Defaults::default()), Ok(None), "{case}, no GPU");
    }
}

#[test]
fn policies_are_whole_words() {
    use Policy::{Binpack, Spread};
    for (case, annotations, want) in [
        ("defaults", &[][..], Ok((Binpack, Spread))),
        ("both", &[(NODE_POLICY, "spread"), (CARD_POLICY, "binpack")], Ok((Spread, Binpack))),
        // FS-04
        ("a typo", &[(CARD_POLICY, "pack")], Err("UnknownPolicy")),
        ("a typo at the node", &[(NODE_POLICY, "pack")], Err("UnknownPolicy")),
        ("capitals", &[(NODE_POLICY, "Binpack")], Err("UnknownPolicy")),
        ("a space", &[(CARD_POLICY, "binpack ")], Err("UnknownPolicy")),
        ("empty", &[(CARD_POLICY, "")], Err("UnknownPolicy")),
        ("a word of HAMi's", &[(CARD_POLICY, "topology-aware")], Err("UnsupportedPolicy")),
        ("a chain", &[(CARD_POLICY, "numa,binpack")], Err("UnsupportedPolicy")),
        ("a chain with a typo", &[(CARD_POLICY, "numa,pack")], Err("UnknownPolicy")),
        ("a card word at the node", &[(NODE_POLICY, "mutex")], Err("UnknownPolicy")),
    ] {
        let got = annotated(annotations);
        if let Err(error) = &got {
            assert!(error.to_string().contains("binpack") && error.to_string().contains("spread"), "{case}");
        }
        let got = got.map(|r| r.unwrap()).map(|r| (r.node_policy, r.card_policy)).map_err(|e| e.code());
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn wishes_that_are_not_served_are_refused() {
    for key in [
        "nvidia.com/use-gputype",
        "nvidia.com/nouse-gputype",
        "nvidia.com/use-gpuuuid",
        "nvidia.com/nouse-gpuuuid",
        "nvidia.com/vgpu-mode",
        "nvidia.com/numa-bind",
        "hami.io/device-scoring-weights",
        "mullion.io/mig-profile",
        "mullion.io/mig-spread",
    ] {
        let error = annotated(&[(key, "A100")]).expect_err(key);
        assert_eq!(error.code(), "UnsupportedAnnotation", "{key}");
        assert!(error.to_string().contains(key), "{error}");
        // A pod without GPUs may carry what it likes.
        let plain = pod(&[(key, "A100")], vec![container(&[("cpu", "1")])]);
        assert_eq!(parse_pod(&plain, &Defaults::default()), Ok(None), "{key}");
    }
}

// WH-06: an annotation is a wish or it is refused; it is never state.
#[test]
fn a_forged_record_is_refused_at_creation_and_ignored_afterwards() {
    for key in [
        "hami.io/vgpu-node",
        "hami.io/vgpu-time",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/vgpu-mig-allocations",
        "hami.io/bind-phase",
        "hami.io/bind-time",
        "mullion.io/allocated",
    ] {
        let gpu = pod(&[(key, "x")], vec![container(&[(COUNT, "1")])]);
        let error = admit_pod(&gpu, &Defaults::default()).expect_err(key);
        assert_eq!(error.code(), "OwnedAnnotation", "{key}");
        assert!(error.to_string().contains(key), "{error}");
        let bare = pod(&[], vec![container(&[(COUNT, "1")])]);
        assert_eq!(parse_pod(&gpu, &Defaults::default()), parse_pod(&bare, &Defaults::default()), "{key}");
    }
    let wish = pod(&[(NODE_POLICY, "spread")], vec![container(&[(COUNT, "1")])]);
    assert!(admit_pod(&wish, &Defaults::default()).is_ok(), "a wish is not state");
}

// WH-08
#[test]
fn a_resource_written_as_annotation_does_not_pass_in_silence() {
    for key in [COUNT, MEMORY, MEMORY_PERCENTAGE, CORES, "nvidia.com/priority"] {
        let error = annotated(&[(key, "3000")]).expect_err(key);
        assert_eq!(error.code(), "ResourceAsAnnotation", "{key}");
        let plain = pod(&[(key, "3000")], vec![container(&[])]);
        assert_eq!(parse_pod(&plain, &Defaults::default()), Ok(None), "{key}");
        assert!(warnings(&plain)[0].contains("resources.limits"), "{key}");
    }
    assert_eq!(warnings(&pod(&[], vec![])), Vec::<String>::new());
    for (key, slips) in [
        ("nvidia.com/use-gpuuid", 1),
        ("nvidia.com/usegputype", 1),
        ("nvidia.com/nouse-gpu-type", 1),
        ("hami.io/gpu-schedulerpolicy", 1),
        (CARD_POLICY, 0),
        ("nvidia.com/use-gputype", 0),
        ("nvidia.com/user", 0),
        ("nvidia.com/used-by", 0),
        ("nvidia.com/gpu.deploy.dcgm", 0),
    ] {
        let wishes = pod(&[(key, "spread")], vec![container(&[(COUNT, "1")])]);
        assert_eq!(warnings(&wishes).len(), slips, "{key}");
        assert_eq!(
            warnings(&pod(&[(key, "spread")], vec![container(&[])])).len(),
            0,
            "{key} where no GPU is asked for"
        );
    }
    let mut opted_out = pod(&[], vec![container(&[(COUNT, "1")])]);
    opted_out.labels = map(&[("hami.io/webhook", "ignore")]);
    assert!(warnings(&opted_out)[0].contains("namespace"));
}

#[test]
fn who_is_concerned() {
    for (case, limits, want) in [
        ("none", &[][..], false),
        ("cpu", &[("cpu", "1")], false),
        ("another driver of the vendor", &[("nvidia.com/hostdev", "1")], false),
        ("count", &[(COUNT, "0")], true),
        ("cores", &[(CORES, "1")], true),
        ("priority", &[("nvidia.com/priority", "1")], true),
        ("mig", &[("nvidia.com/mig-1g.5gb", "1")], true),
        ("misspelt", &[("nvidia.com/gpu-mem", "1")], true),
        ("under another name", &[("nvidia.com/memory", "1")], true),
        ("a card that a passthrough plugin offers", &[("nvidia.com/GA102GL_A10", "1")], false),
    ] {
        let mut view = container(limits);
        assert_eq!(mentions_us(&pod(&[], vec![view.clone()])), want, "{case}");
        view.requests = std::mem::take(&mut view.limits);
        assert_eq!(mentions_us(&pod(&[], vec![view])), want, "{case}, as request");
    }
}

#[test]
fn a_pod_keeps_names_and_kinds() {
    let named = |name: &str, kind, limits: &[(&str, &str)]| ContainerView {
        name: name.to_owned(),
        kind,
        ..container(limits)
    };
    let gpu = &[(COUNT, "1"), (MEMORY, "4000")][..];
    let containers = vec![
        named("prep", ContainerKind::Init, &[]),
        named("fetch", ContainerKind::Init, gpu),
        named("proxy", ContainerKind::Sidecar, gpu),
        named("gpu-main", ContainerKind::App, gpu),
    ];
    let request = parse_pod(&pod(&[], containers), &Defaults::default()).unwrap().unwrap();
    let got: Vec<_> = request.containers.iter().map(|c| (c.name.as_str(), c.kind)).collect();
    assert_eq!(
        got,
        [("fetch", ContainerKind::Init), ("proxy", ContainerKind::Sidecar), ("gpu-main", ContainerKind::App)]
    );
    assert_eq!(request.slots(), 2, "the init ends before the others start");
}

#[test]
fn one_name_twice_is_refused() {
    let twice = pod(&[], vec![container(&[(COUNT, "1")]), container(&[])]);
    assert_eq!(parse_pod(&twice, &Defaults::default()).unwrap_err().code(), "DuplicateContainer");
}

#[test]
fn a_long_text_is_cut_in_messages() {
    let value = "9".repeat(10_000);
    let text = parse(&[(MEMORY, &value)]).unwrap_err().to_string();
    assert!(text.len() < 300, "{}", text.len());
}

#[test]
fn a_pod_has_as_many_containers_with_gpus_as_an_allocation_holds() {
    let named = |number: usize| ContainerView { name: format!("c{number}"), ..container(&[(COUNT, "1")]) };
    for (case, gpus, others, want) in [
        ("as many as there may be", MAX_CONTAINERS, 0, Ok(MAX_CONTAINERS)),
        ("others do not count", 1, 1000, Ok(1)),
        ("one too many", MAX_CONTAINERS + 1, 0, Err("TooManyContainers")),
        ("a pod made to be hard", 10_000, 0, Err("TooManyContainers")),
    ] {
        let other = |number: usize| ContainerView { name: format!("o{number}"), ..container(&[]) };
        let containers = (0..gpus).map(named).chain((0..others).map(other)).collect();
        let pod = PodView { containers, ..PodView::default() };
        let got = parse_pod(&pod, &Defaults::default());
        let got = got.map(|r| r.unwrap().containers.len()).map_err(|e| e.code());
        assert_eq!(got, want, "{case}");
    }
}
