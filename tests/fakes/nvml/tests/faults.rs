//! Events, lost cards, injected errors and latency, and callers that misbehave.
#![expect(unsafe_code, reason = "raw calls with arguments that the wrapper never passes")]

mod common;

use std::ptr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{Node, with_state};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventSet_t, nvmlGpuInstance_t, nvmlMemory_v2_t};

fn xid(error: Option<&XidError>) -> Option<u64> {
    match error {
        Some(XidError::Value(value)) => Some(*value),
        _ => None,
    }
}

#[test]
fn a_waiting_program_gets_the_xids_of_its_cards_in_order() {
    let node = Node::new("h100x3");
    node.fake("xid 0 13");
    let card = |i| node.nvml.device_by_index(i).unwrap();
    let set = node.nvml.create_event_set().unwrap();
    let set = card(0).register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).unwrap();
    let set = card(1).register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)), "an event from before the registration");
    let started = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            started.wait();
            node.fake("xid 2 31");
            node.fake("xid 1 48");
            node.fake("xid 0 94");
        });
        started.wait();
        for (index, code) in [(1, 48), (0, 94)] {
            let event = set.wait(5_000).unwrap();
            assert_eq!(event.device.uuid().unwrap(), node.uuid(index));
            assert_eq!(xid(event.event_data.as_ref()), Some(code));
            assert!(event.event_type.contains(EventTypes::CRITICAL_XID_ERROR));
        }
    });
    let before = Instant::now();
    assert!(matches!(set.wait(60), Err(NvmlError::Timeout)));
    assert!(before.elapsed() >= Duration::from_millis(60));
}

#[test]
fn a_removed_card_says_xid_79_and_is_lost_until_restored() {
    let node = Node::new("h100x2");
    let (uuid, card) = (node.uuid(0), node.nvml.device_by_index(0).unwrap());
    let set = node.nvml.create_event_set().unwrap();
    let set = card.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|e| e.error).unwrap();
    node.fake("remove 0");
    assert_eq!(xid(set.wait(5_000).unwrap().event_data.as_ref()), Some(79));
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    assert_eq!(node.nvml.device_count().unwrap(), 2);
    let lost = |error: Option<NvmlError>| assert!(matches!(error, Some(NvmlError::GpuLost)), "{error:?}");
    lost(node.nvml.device_by_index(0).err());
    lost(node.nvml.device_by_uuid(uuid.as_str()).err());
    lost(card.uuid().err());
    lost(card.memory_info().err());
    lost(card.running_compute_processes().err());
    let other = node.nvml.device_by_index(1).unwrap();
    assert_eq!((other.index().unwrap(), other.uuid().unwrap()), (1, node.uuid(1)));
    node.fake("restore 0");
    assert_eq!(card.uuid().unwrap(), uuid);
    assert_eq!(node.nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), 0);
    node.fake("unlist 0");
    assert_eq!(node.nvml.device_count().unwrap(), 1);
    assert_eq!(node.nvml.device_by_index(0).unwrap().uuid().unwrap(), node.uuid(1));
    assert!(matches!(node.nvml.device_by_uuid(uuid.as_str()), Err(NvmlError::NotFound)));
}

#[test]
fn injected_errors_hit_the_named_call_that_often() {
    let node = Node::new("a100x2");
    let card = node.nvml.device_by_index(0).unwrap();
    node.fake("error nvmlDeviceGetUUID 18 2");
    for _ in 0..2 {
        assert!(matches!(card.uuid(), Err(NvmlError::LibRmVersionMismatch)));
        card.name().unwrap();
    }
    assert_eq!(card.uuid().unwrap(), node.uuid(0));
    node.fake("error * 999 1");
    assert!(matches!(card.name(), Err(NvmlError::Unknown)));
    card.name().unwrap();
    assert!(node.state().errors.is_empty());
}

#[test]
fn of_many_calls_at_once_exactly_n_fail() {
    let node = Node::new("a100");
    node.fake("error nvmlDeviceGetName 3 7");
    let failed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let card = node.nvml.device_by_index(0).unwrap();
                    (0..10).filter(|_| card.name().is_err()).count()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(failed, 7);
    assert_eq!(node.state().calls.get("nvmlDeviceGetName"), Some(&40));
}

#[test]
fn a_slow_call_delays_nobody_else_and_sees_what_happened_meanwhile() {
    let node = Node::new("a100x2");
    let (zero, one) = (node.nvml.device_by_index(0).unwrap(), node.nvml.device_by_index(1).unwrap());
    node.fake("latency nvmlDeviceGetUUID 400");
    std::thread::scope(|scope| {
        let start = Instant::now();
        let slow = scope.spawn(|| zero.uuid());
        std::thread::sleep(Duration::from_millis(100));
        one.name().unwrap();
        assert!(!slow.is_finished());
        node.fake("lost 0");
        assert!(matches!(slow.join().unwrap(), Err(NvmlError::GpuLost)));
        assert!(start.elapsed() >= Duration::from_millis(400));
    });
}

#[test]
fn hostile_arguments_are_refused() {
    let node = Node::new("h100");
    let lib = node.nvml.lib();
    let card = node.nvml.device_by_index(0).unwrap();
    // SAFETY: the handle is used in this test alone, while `node` lives.
    let good = unsafe { card.handle() };
    let set = node.nvml.create_event_set().unwrap();
    // SAFETY: as above; the set is freed by its owner.
    let set = unsafe { set.handle() };
    let off_by_one = good.wrapping_byte_add(1);
    let next = good.wrapping_byte_add(1 << 30);
    let mut buffer = [0; 96];
    for (case, device) in [
        ("null", ptr::null_mut()),
        ("garbage", ptr::without_provenance_mut(0xDEAD_BEEF)),
        ("all ones", ptr::without_provenance_mut(usize::MAX)),
        ("beside a handle", off_by_one),
        ("beyond the handles", next),
        ("a handle of another kind", set.cast()),
    ] {
        // SAFETY: the library checks handles; the buffer has the given length.
        let code = unsafe { lib.nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 96) };
        assert_eq!(code, 2, "{case}");
    }
    let mut any: nvmlDevice_t = ptr::null_mut();
    // SAFETY: null is what is tested.
    assert_eq!(unsafe { lib.nvmlDeviceGetIndex(good, ptr::null_mut()) }, 2);
    // SAFETY: the buffer is longer than the given length.
    assert_eq!(unsafe { lib.nvmlDeviceGetUUID(good, buffer.as_mut_ptr(), 40) }, 7);
    // SAFETY: null is what is tested.
    assert_eq!(unsafe { lib.nvmlDeviceGetUUID(good, ptr::null_mut(), 96) }, 2);
    // SAFETY: null is what is tested.
    assert_eq!(unsafe { lib.nvmlDeviceGetHandleByUUID(ptr::null(), &raw mut any) }, 2);
    // SAFETY: the handle is checked.
    assert_eq!(unsafe { lib.nvmlEventSetFree(good as nvmlEventSet_t) }, 2);
    // SAFETY: the handle is checked.
    assert_eq!(unsafe { lib.nvmlGpuInstanceDestroy(good as nvmlGpuInstance_t) }, 2);
    let mut memory = nvmlMemory_v2_t { version: 1, total: 0, reserved: 0, free: 0, used: 0 };
    // SAFETY: the struct is the right one, its version is not.
    assert_eq!(unsafe { lib.nvmlDeviceGetMemoryInfo_v2(good, &raw mut memory) }, 25);
}

#[test]
fn after_the_last_shutdown_nothing_answers() {
    let node = Node::new("a30");
    let lib = node.nvml.lib();
    let mut count = 0;
    // SAFETY: no arguments.
    assert_eq!(unsafe { lib.nvmlShutdown() }, 0);
    // SAFETY: `count` outlives the call.
    assert_eq!(unsafe { lib.nvmlDeviceGetCount_v2(&raw mut count) }, 1);
    // SAFETY: no arguments.
    assert_eq!(unsafe { lib.nvmlShutdown() }, 1);
    node.fake("error nvmlInit_v2 18 1");
    for (init, after) in [(18, 1), (0, 0)] {
        // SAFETY: no arguments.
        let init_now = || unsafe { lib.nvmlInit_v2() };
        assert_eq!(with_state(Some(node.store.path().to_owned()), init_now), init);
        // SAFETY: `count` outlives the call.
        assert_eq!(unsafe { lib.nvmlDeviceGetCount_v2(&raw mut count) }, after);
    }
    assert_eq!(count, 1);
}
