//! What programs read of cards, through the wrapper that Mullion uses.
#![expect(unsafe_code, reason = "raw calls where the wrapper has none")]

mod common;

use common::{Node, open};
use nvml_wrapper::enum_wrappers::device::{Brand, EccCounter, MemoryError, TemperatureSensor, TopologyLevel};
use nvml_wrapper::enums::device::{DeviceArchitecture, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::CudaComputeCapability;

const MIB: u64 = 1 << 20;

#[test]
fn without_a_state_file_there_is_no_driver() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, "{").unwrap();
    for (case, state) in
        [("unset", None), ("missing", Some(folder.path().join("none"))), ("broken", Some(broken))]
    {
        let error = open(&folder, state).unwrap_err();
        assert!(matches!(error, NvmlError::DriverNotLoaded), "{case}: {error:?}");
    }
}

#[test]
fn every_listed_entry_point_is_exported() {
    let node = Node::new("a30");
    for name in fake_state::calls::NAMES {
        let symbol = format!("{name}\0");
        // SAFETY: the symbol is looked up, not called.
        let found = unsafe { node.nvml.lib().__library.get::<*const ()>(symbol.as_bytes()) };
        assert!(found.is_ok(), "{name}");
    }
}

#[test]
fn the_system_tells_its_versions() {
    let node = Node::new("h100x4");
    assert_eq!(node.nvml.sys_driver_version().unwrap(), "570.124.06");
    assert_eq!(node.nvml.sys_nvml_version().unwrap(), "12.570.124.06");
    assert_eq!(node.nvml.sys_cuda_driver_version().unwrap(), 12080);
    assert_eq!(node.nvml.device_count().unwrap(), 4);
}

#[test]
fn a_card_tells_what_it_is() {
    for (profile, name, compute, architecture, brand, memory, cores) in [
        ("h100x2", "NVIDIA H100 80GB HBM3", (9, 0), DeviceArchitecture::Hopper, Brand::Nvidia, 81559, 16896),
        ("a100x2", "NVIDIA A100-PCIE-40GB", (8, 0), DeviceArchitecture::Ampere, Brand::Nvidia, 40960, 6912),
        (
            "rtxpro6000x2",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            (12, 0),
            DeviceArchitecture::Blackwell,
            Brand::NvidiaRTX,
            97887,
            24064,
        ),
    ] {
        let node = Node::new(profile);
        let card = node.nvml.device_by_index(1).unwrap();
        assert_eq!(card.name().unwrap(), name);
        assert_eq!(card.uuid().unwrap(), node.uuid(1));
        assert_eq!((card.index().unwrap(), card.minor_number().unwrap()), (1, 1));
        let (major, minor) = compute;
        assert_eq!(card.cuda_compute_capability().unwrap(), CudaComputeCapability { major, minor });
        assert_eq!(card.architecture().unwrap(), architecture);
        assert_eq!(card.brand().unwrap(), brand);
        assert_eq!(card.num_cores().unwrap(), cores);
        let info = card.memory_info().unwrap();
        assert_eq!(info.total, memory * MIB);
        assert_eq!(info.used, 0);
        assert_eq!(info.free + info.reserved, info.total);
        let pci = card.pci_info().unwrap();
        let state = node.state().cards[1].pci.clone();
        assert_eq!((pci.bus_id.as_str(), pci.bus), ("00000000:29:00.0", 0x29));
        assert_eq!((pci.pci_device_id, pci.pci_sub_system_id), (state.device_id, Some(state.subsystem_id)));
        assert_eq!(card.temperature(TemperatureSensor::Gpu).unwrap(), 34);
        assert_eq!(card.power_usage().unwrap(), 62_000);
        assert!(card.is_ecc_enabled().unwrap().currently_enabled);
        // As the header says: a whole card has no attributes.
        assert!(matches!(card.attributes(), Err(NvmlError::NotSupported)));
    }
}

#[test]
fn cards_are_found_by_uuid_and_address() {
    let node = Node::new("h100x2");
    let uuid = node.uuid(1);
    assert_eq!(node.nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), 1);
    assert_eq!(node.nvml.device_by_pci_bus_id("0000:29:00.0").unwrap().index().unwrap(), 1);
    assert!(matches!(node.nvml.device_by_uuid("GPU-none"), Err(NvmlError::NotFound)));
    assert!(matches!(node.nvml.device_by_pci_bus_id("0000:2A:00.0"), Err(NvmlError::NotFound)));
    assert!(matches!(node.nvml.device_by_pci_bus_id("here"), Err(NvmlError::InvalidArg)));
    assert!(matches!(node.nvml.device_by_index(2), Err(NvmlError::InvalidArg)));
}

#[test]
fn topology_shows_numa_nodes_and_bridged_pairs() {
    let node = Node::new("h100x4");
    let card = |i| node.nvml.device_by_index(i).unwrap();
    for (index, numa, cpus) in [(1, 0b01, 0xFFFF_FFFF), (2, 0b10, 0xFFFF_FFFF_0000_0000)] {
        assert_eq!(card(index).memory_affinity(1, 0).unwrap(), [numa]);
        assert_eq!(card(index).cpu_affinity(2).unwrap(), [cpus, 0]);
    }
    // Told only where the GPU's own memory is a NUMA node.
    assert!(matches!(card(0).numa_node_id(), Err(NvmlError::NotSupported)));
    let ancestor = |a, b| card(a).topology_common_ancestor(card(b)).unwrap();
    assert_eq!(ancestor(0, 1), TopologyLevel::Single);
    assert_eq!(ancestor(0, 2), TopologyLevel::System);
    assert_eq!(ancestor(3, 3), TopologyLevel::Internal);
    let zero = card(0);
    let (first, last, beyond) =
        (zero.link_wrapper_for(0), zero.link_wrapper_for(11), zero.link_wrapper_for(12));
    assert!(first.is_active().unwrap() && last.is_active().unwrap() && !beyond.is_active().unwrap());
    assert_eq!(first.remote_pci_info().unwrap().bus_id, card(1).pci_info().unwrap().bus_id);
    assert!(matches!(zero.link_wrapper_for(18).is_active(), Err(NvmlError::InvalidArg)));
    node.fake("lost 1");
    assert!(!first.is_active().unwrap());
    let unlinked = Node::new("a100x2");
    let card = unlinked.nvml.device_by_index(0).unwrap();
    assert!(matches!(card.link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
}

#[test]
fn processes_and_load_show_at_once() {
    let node = Node::new("h100x2");
    let card = node.nvml.device_by_index(0).unwrap();
    assert_eq!(card.running_compute_processes().unwrap(), []);
    assert!(matches!(card.process_utilization_stats(None), Err(NvmlError::NotFound)));
    node.fake("process 0 4242 3000 30");
    node.fake("process 0 4243 500 20");
    let got = card.running_compute_processes().unwrap();
    let got: Vec<_> = got.iter().map(|p| (p.pid, &p.used_gpu_memory, p.gpu_instance_id)).collect();
    let used = |mib| UsedGpuMemory::Used(mib * MIB);
    assert_eq!(got, [(4242, &used(3000), None), (4243, &used(500), None)]);
    assert_eq!(card.running_graphics_processes().unwrap(), []);
    assert_eq!(card.utilization_rates().unwrap().gpu, 50);
    let memory = card.memory_info().unwrap();
    assert_eq!(memory.used, 3500 * MIB);
    assert_eq!(memory.free, memory.total - memory.reserved - memory.used);
    let samples = card.process_utilization_stats(None).unwrap();
    assert_eq!(samples.iter().map(|s| (s.pid, s.sm_util)).collect::<Vec<_>>(), [(4242, 30), (4243, 20)]);
    assert_eq!(node.nvml.device_by_index(1).unwrap().running_compute_processes().unwrap(), []);
}

/// Blackwell answers the newer call for busy times alone.
#[test]
fn newer_cards_tell_busy_times_by_another_call() {
    use nvml_wrapper_sys::bindings::{nvmlProcessUtilizationInfo_v1_t, nvmlProcessesUtilizationInfo_v1_t};
    let node = Node::new("rtxpro6000");
    node.fake("process 0 4242 3000 30");
    let card = node.nvml.device_by_index(0).unwrap();
    assert!(matches!(card.process_utilization_stats(None), Err(NvmlError::NotSupported)));
    // SAFETY: the handle is used while the library is open.
    let handle = unsafe { card.handle() };
    let call = node.nvml.lib().nvmlDeviceGetProcessesUtilizationInfo.as_ref().unwrap();
    let size = u32::try_from(size_of::<nvmlProcessesUtilizationInfo_v1_t>()).unwrap();
    let mut info = nvmlProcessesUtilizationInfo_v1_t {
        version: size | 1 << 24,
        processSamplesCount: 0,
        lastSeenTimeStamp: 0,
        procUtilArray: std::ptr::null_mut(),
    };
    // SAFETY: the card's handle and a struct of that version; without an array the call tells the count alone.
    let code = unsafe { call(handle, &raw mut info) };
    assert_eq!((code, info.processSamplesCount), (7, 1));
    let mut samples = [nvmlProcessUtilizationInfo_v1_t {
        timeStamp: 0,
        pid: 0,
        smUtil: 0,
        memUtil: 0,
        encUtil: 0,
        decUtil: 0,
        jpgUtil: 0,
        ofaUtil: 0,
    }];
    info.procUtilArray = samples.as_mut_ptr();
    // SAFETY: as above, with an array of the announced length.
    let code = unsafe { call(handle, &raw mut info) };
    assert_eq!((code, samples[0].pid, samples[0].smUtil), (0, 4242, 30));
    info.version = size | 2 << 24;
    // SAFETY: as above.
    assert_eq!(unsafe { call(handle, &raw mut info) }, 25);
}

#[test]
fn memory_errors_are_counted_by_kind() {
    let node = Node::new("a100");
    node.edit(|s| {
        s.cards[0].ecc.volatile.corrected = 3;
        s.cards[0].ecc.aggregate.uncorrected = 1;
    });
    let card = node.nvml.device_by_index(0).unwrap();
    for (kind, counter, want) in [
        (MemoryError::Corrected, EccCounter::Volatile, 3),
        (MemoryError::Uncorrected, EccCounter::Volatile, 0),
        (MemoryError::Corrected, EccCounter::Aggregate, 0),
        (MemoryError::Uncorrected, EccCounter::Aggregate, 1),
    ] {
        assert_eq!(card.total_ecc_errors(kind, counter).unwrap(), want, "{kind:?} {counter:?}");
    }
}

#[test]
fn calls_are_counted() {
    let node = Node::new("a30x2");
    for _ in 0..3 {
        node.nvml.device_by_index(0).unwrap().uuid().unwrap();
    }
    let calls = node.state().calls;
    assert_eq!(calls.get("nvmlInit_v2"), Some(&1));
    assert_eq!(calls.get("nvmlDeviceGetHandleByIndex_v2"), Some(&3));
    assert_eq!(calls.get("nvmlDeviceGetUUID"), Some(&3));
    assert_eq!(calls.get("nvmlDeviceGetName"), None);
}
