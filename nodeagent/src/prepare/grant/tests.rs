use super::*;
use mullion_core::facts::DeviceGrant;
use mullion_core::refusal::Code;

fn device(uuid: &str, memory: u64, cores: u8) -> DeviceGrant {
    DeviceGrant { uuid: uuid.into(), memory: Mib(memory), cores: CoreShare::new(cores).unwrap() }
}

fn container(name: &str, kind: ContainerKind, devices: Vec<DeviceGrant>) -> ContainerGrant {
    ContainerGrant { name: name.to_owned(), kind, devices }
}

fn allocation() -> AllocationFact {
    AllocationFact {
        uid: "a-1".into(),
        name: "pod-12345678".to_owned(),
        pod: PodRef { namespace: "team".to_owned(), name: "pod".to_owned(), uid: "p-1".into() },
        node: "node-a".into(),
        sequence: 1,
        created: 0,
        containers: vec![
            container("small", ContainerKind::Init, vec![device("GPU-0", 1000, 10)]),
            container("big", ContainerKind::Init, vec![device("GPU-0", 9000, 10)]),
            container("main", ContainerKind::App, vec![device("GPU-0", 3000, 30)]),
            container("two", ContainerKind::App, vec![device("GPU-1", 500, 0), device("GPU-0", 100, 0)]),
        ],
        prepared: false,
        init_done: false,
        released: false,
    }
}

fn view(index: u32) -> CardView {
    CardView {
        name: CardName { uuid: format!("GPU-{index}"), index, minor: index },
        mode: CardMode::Shared,
        present: true,
        replaced_by: None,
        fault: None,
        memory_scaling: 100,
    }
}

fn missing() -> Unusable {
    Unusable::Missing { library: "/usr/local/vgpu/libvgpu.so".into() }
}

struct Case {
    allocation: Option<AllocationFact>,
    standing: Option<Standing>,
    cards: Option<BTreeMap<GpuUuid, CardView>>,
    container: &'static str,
    ids: usize,
    unusable: Option<Unusable>,
    pod_name: Option<(&'static str, &'static str)>,
    enforcement: Enforcement,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            allocation: Some(allocation()),
            standing: Some(Standing::Holds),
            cards: Some([0, 1].map(|i| (format!("GPU-{i}").into(), view(i))).into()),
            container: "main",
            ids: 1,
            unusable: None,
            pod_name: None,
            enforcement: Enforcement::Required,
        }
    }
}

impl Case {
    fn card(mut self, uuid: &str, change: impl Fn(&mut CardView)) -> Self {
        change(self.cards.as_mut().unwrap().get_mut(&GpuUuid::from(uuid)).unwrap());
        self
    }

    fn fact(mut self, change: impl Fn(&mut AllocationFact)) -> Self {
        change(self.allocation.as_mut().unwrap());
        self
    }

    fn decide(&self) -> Result<Given, Refusal> {
        let question = Question {
            node: &"node-a".into(),
            pod: &"p-1".into(),
            pod_name: self.pod_name,
            container: self.container,
            ids: self.ids,
            allocation: self.allocation.as_ref(),
            standing: self.standing.as_ref(),
            cards: self.cards.as_ref(),
            enforcement: self.enforcement,
            unusable: self.unusable.as_ref(),
        };
        decide(&question, 20)
    }
}

#[test]
fn a_container_gets_its_own_cards_in_order_and_nothing_else() {
    let given = Case { container: "two", ids: 2, ..Case::default() }.decide().unwrap();
    let devices: Vec<_> =
        given.devices.iter().map(|d| (d.card.uuid.as_str(), d.memory.0, d.cores.get())).collect();
    assert_eq!(devices, [("GPU-1", 500, 0), ("GPU-0", 100, 0)]);
    assert_eq!((given.kind, given.enforced, given.pod.name.as_str()), (ContainerKind::App, true, "pod"));
}

// DP-06, DP-12, BL-09, WH-09
#[test]
#[expect(clippy::too_many_lines, reason = "one row per reason")]
fn every_way_in_which_a_container_may_not_start() {
    let by = Shortage { uuid: "GPU-0".into(), code: Code::MemoryShort, asked: 3000, free: 10 };
    let void = Standing::Void { by };
    let gone = Standing::DeviceGone { uuid: "GPU-0".into() };
    for (name, case, code, fragment, retriable, fails) in [
        (
            "placed by hand",
            Case { allocation: None, ..Case::default() },
            "NoAllocation",
            "nodeName",
            true,
            false,
        ),
        (
            "placed by hand, seen by the watch",
            Case { allocation: None, pod_name: Some(("team", "pod")), ..Case::default() },
            "NoAllocation",
            "pod team/pod has",
            true,
            false,
        ),
        (
            "not known",
            Case { allocation: None, ..Case::default() },
            "NoAllocation",
            "with uid p-1 has",
            true,
            false,
        ),
        ("not folded in", Case { standing: None, ..Case::default() }, "NoAllocation", "20 s", true, false),
        (
            "another node's",
            Case::default().fact(|a| a.node = "node-b".into()),
            "OtherNode",
            "node-b",
            false,
            false,
        ),
        (
            "no such container",
            Case { container: "x", ..Case::default() },
            "ContainerUnknown",
            "\"x\"",
            false,
            true,
        ),
        (
            "too many ids",
            Case { ids: 3, ..Case::default() },
            "DeviceCountMismatch",
            "1 cards, the kubelet 3",
            false,
            true,
        ),
        (
            "too few ids",
            Case { container: "two", ..Case::default() },
            "DeviceCountMismatch",
            "2 cards, the kubelet 1",
            false,
            true,
        ),
        ("void", Case { standing: Some(void), ..Case::default() }, "Void", "GPU-0", false, false),
        (
            "released",
            Case { standing: Some(Standing::Released), ..Case::default() },
            "Released",
            "ended",
            false,
            false,
        ),
        (
            "driver silent",
            Case { cards: None, ..Case::default() },
            "DriverNotReady",
            "DriverReady",
            true,
            false,
        ),
        (
            "card not known",
            Case { cards: Some(BTreeMap::new()), standing: Some(gone), ..Case::default() },
            "DeviceGone",
            "GPU-0",
            false,
            true,
        ),
        (
            "card vanished",
            Case::default().card("GPU-0", |c| c.present = false),
            "DeviceGone",
            "GPU-0",
            false,
            true,
        ),
        (
            "card vanished under a pod that ran",
            Case::default().fact(|a| a.prepared = true).card("GPU-0", |c| c.present = false),
            "CardUnhealthy",
            "not list",
            true,
            false,
        ),
        (
            "card replaced under a pod that ran",
            Case::default().fact(|a| a.prepared = true).card("GPU-0", |c| {
                (c.present, c.replaced_by) = (false, Some("GPU-9".to_owned()));
            }),
            "DeviceGone",
            "GPU-0",
            false,
            true,
        ),
        (
            "card ill",
            Case::default().card("GPU-0", |c| c.fault = Some("XID 79".to_owned())),
            "CardUnhealthy",
            "XID 79",
            true,
            false,
        ),
        (
            "MIG on",
            Case::default().card("GPU-0", |c| c.mode = CardMode::Mig),
            "CardInMigMode",
            "MIG",
            true,
            false,
        ),
        (
            "no library",
            Case { unusable: Some(missing()), ..Case::default() },
            "HookMissing",
            "libvgpu.so",
            true,
            false,
        ),
        (
            "big init again",
            Case { container: "big", ..Case::default() }.fact(|a| a.init_done = true),
            "InitRerun",
            "\"big\"",
            false,
            true,
        ),
    ] {
        let refusal = case.decide().expect_err(name);
        assert_eq!(
            (refusal.code(), refusal.retriable(), refusal.fails_allocation()),
            (code, retriable, fails),
            "{name}"
        );
        assert!(refusal.to_string().contains(fragment), "{name}: {refusal}");
    }
}

#[test]
fn what_must_not_stop_a_container() {
    for (name, case) in [
        ("another card is ill", Case::default().card("GPU-1", |c| c.fault = Some("XID 79".to_owned()))),
        ("a restart", Case::default().fact(|a| a.prepared = true)),
        ("an init container that crashed", Case { container: "big", ..Case::default() }),
        (
            "a new sandbox, small init",
            Case { container: "small", ..Case::default() }.fact(|a| a.init_done = true),
        ),
        ("its apps after init", Case::default().fact(|a| a.init_done = true)),
        ("report", Case { unusable: Some(missing()), enforcement: Enforcement::Report, ..Case::default() }),
    ] {
        let given = case.decide().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(given.enforced, case.unusable.is_none(), "{name}");
    }
}

#[test]
fn the_environment_is_hamis() {
    let mut given = Case { container: "two", ids: 2, ..Case::default() }.decide().unwrap();
    let plain = ContainerSettings::default();
    assert_eq!(
        environment(&given, &plain, "/usr/local/vgpu/usage.cache"),
        [
            "NVIDIA_VISIBLE_DEVICES=void",
            "CUDA_DEVICE_MEMORY_LIMIT_0=500m",
            "CUDA_DEVICE_MEMORY_LIMIT_1=100m",
            "CUDA_DEVICE_SM_LIMIT=0",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/usage.cache",
        ]
    );
    given.devices[1].memory_scaling = 150;
    let all = ContainerSettings { libcuda_log_level: Some(4), disable_core_limit: true };
    let env = environment(&given, &all, "/u");
    assert_eq!(
        env[5..],
        ["CUDA_OVERSUBSCRIBE=true", "LIBCUDA_LOG_LEVEL=4", "GPU_CORE_UTILIZATION_POLICY=disable"]
    );
}

#[test]
fn the_pages_say_what_was_given() {
    let mut given = Case { container: "two", ids: 2, ..Case::default() }.decide().unwrap();
    given.devices[1].memory_scaling = 200;
    let (page, usage) = pages(&given, "00000000000000ff", Enforcement::Report).unwrap();
    assert_eq!((page.grant, page.enforcement), (255, page::Enforcement::Report));
    let seen: Vec<_> = page
        .devices
        .iter()
        .map(|d| {
            (d.uuid.as_str(), d.memory_limit.get() >> 20, d.core.get(), d.real_memory.map(|m| m.get() >> 20))
        })
        .collect();
    assert_eq!(seen, [("GPU-1", 500, 100, None), ("GPU-0", 100, 100, Some(50))]);
    assert_eq!(usage.devices.len(), 2);
    given.devices[0].memory = Mib(0);
    assert_eq!(
        pages(&given, "00000000000000ff", Enforcement::Report).unwrap_err().code(),
        "AllocationInvalid"
    );
}
