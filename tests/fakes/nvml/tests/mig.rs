//! MIG through the raw calls that Mullion makes, against tables kept here and not taken from the library.
#![expect(unsafe_code, reason = "the wrapper has no calls for GPU and compute instances")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::ffi::{CStr, c_uint};
use std::ptr;

use common::Node;
use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_v2_t,
    nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};

/// One card's raw calls, each as a function.
struct Card<'a> {
    lib: &'a NvmlLib,
    device: nvmlDevice_t,
}

fn zeroed<T>() -> T {
    // SAFETY: used for the plain structs of the bindings, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

fn answer<T>(code: c_uint, value: T) -> Result<T, c_uint> {
    if code == 0 { Ok(value) } else { Err(code) }
}

impl<'a> Card<'a> {
    fn of(node: &'a Node, card: &Device<'_>) -> Self {
        // SAFETY: the handle is used while `node` lives.
        Self { lib: node.nvml.lib(), device: unsafe { card.handle() } }
    }

    fn profile(&self, value: u32) -> Result<nvmlGpuInstanceProfileInfo_v2_t, c_uint> {
        let mut info: nvmlGpuInstanceProfileInfo_v2_t = zeroed();
        info.version = u32::try_from(size_of_val(&info)).unwrap() | 2 << 24;
        // SAFETY: the struct outlives the call and carries its version.
        let code =
            unsafe { self.lib.nvmlDeviceGetGpuInstanceProfileInfoV(self.device, value, &raw mut info) };
        answer(code, info)
    }

    fn placements(&self, id: u32) -> Result<Vec<(u32, u32)>, c_uint> {
        let call = |array, count: &mut c_uint| {
            // SAFETY: the array is null or has room for `count`.
            unsafe { self.lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(self.device, id, array, count) }
        };
        let mut count = 0;
        answer(call(ptr::null_mut(), &mut count), ())?;
        let mut all = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; count as usize];
        let mut short = count - 1;
        assert_eq!(call(all.as_mut_ptr(), &mut short), 7, "one too few");
        answer(call(all.as_mut_ptr(), &mut count), all.iter().map(|p| (p.start, p.size)).collect())
    }

    fn create(&self, id: u32, at: Option<(u32, u32)>) -> Result<nvmlGpuInstance_t, c_uint> {
        let mut gi = ptr::null_mut();
        let code = match at {
            Some((start, size)) => {
                let p = nvmlGpuInstancePlacement_t { start, size };
                // SAFETY: both pointers outlive the call.
                unsafe {
                    self.lib.nvmlDeviceCreateGpuInstanceWithPlacement(
                        self.device,
                        id,
                        &raw const p,
                        &raw mut gi,
                    )
                }
            }
            // SAFETY: the pointer outlives the call.
            None => unsafe { self.lib.nvmlDeviceCreateGpuInstance(self.device, id, &raw mut gi) },
        };
        answer(code, gi)
    }

    fn gi_info(&self, gi: nvmlGpuInstance_t) -> Result<nvmlGpuInstanceInfo_t, c_uint> {
        let mut info = zeroed();
        // SAFETY: the struct outlives the call.
        answer(unsafe { self.lib.nvmlGpuInstanceGetInfo(gi, &raw mut info) }, info)
    }

    fn create_ci(&self, gi: nvmlGpuInstance_t, id: u32) -> Result<nvmlComputeInstance_t, c_uint> {
        let mut ci = ptr::null_mut();
        // SAFETY: the pointer outlives the call.
        answer(unsafe { self.lib.nvmlGpuInstanceCreateComputeInstance(gi, id, &raw mut ci) }, ci)
    }

    fn ci_info(&self, ci: nvmlComputeInstance_t) -> Result<nvmlComputeInstanceInfo_t, c_uint> {
        let mut info = zeroed();
        // SAFETY: the struct outlives the call.
        answer(unsafe { self.lib.nvmlComputeInstanceGetInfo_v2(ci, &raw mut info) }, info)
    }

    fn destroy(&self, gi: nvmlGpuInstance_t) -> c_uint {
        // SAFETY: the library checks the handle.
        unsafe { self.lib.nvmlGpuInstanceDestroy(gi) }
    }

    fn destroy_ci(&self, ci: nvmlComputeInstance_t) -> c_uint {
        // SAFETY: the library checks the handle.
        unsafe { self.lib.nvmlComputeInstanceDestroy(ci) }
    }

    fn remaining(&self, id: u32) -> Result<u32, c_uint> {
        let mut count = 0;
        // SAFETY: the count outlives the call.
        let code =
            unsafe { self.lib.nvmlDeviceGetGpuInstanceRemainingCapacity(self.device, id, &raw mut count) };
        answer(code, count)
    }

    fn instances(&self, id: u32) -> Result<Vec<nvmlGpuInstance_t>, c_uint> {
        let mut all = [ptr::null_mut(); 8];
        let mut count = 0;
        // SAFETY: no profile allows more than seven.
        let code =
            unsafe { self.lib.nvmlDeviceGetGpuInstances(self.device, id, all.as_mut_ptr(), &raw mut count) };
        answer(code, all[..count as usize].to_vec())
    }

    fn set_mode(&self, on: u32) -> (c_uint, c_uint) {
        let mut status = 77;
        // SAFETY: the status outlives the call.
        let code = unsafe { self.lib.nvmlDeviceSetMigMode(self.device, on, &raw mut status) };
        (code, status)
    }
}

fn name(info: &nvmlGpuInstanceProfileInfo_v2_t) -> &str {
    // SAFETY: the library ends the name with a null byte.
    unsafe { CStr::from_ptr(info.name.as_ptr()) }.to_str().unwrap()
}

type Row = (&'static str, u32, u32, &'static [u32], u32, u32, u64, u32);

/// Name, enum, id, starts, size, max, MiB, SMs: the tables of public captures.
const ORACLES: &[(&str, &[Row])] = &[
    (
        "a100",
        &[
            ("MIG 1g.5gb", 0, 19, &[0, 1, 2, 3, 4, 5, 6], 1, 7, 4864, 14),
            ("MIG 1g.5gb+me", 7, 20, &[0, 1, 2, 3, 4, 5, 6], 1, 1, 4864, 14),
            ("MIG 1g.10gb", 9, 15, &[0, 2, 4, 6], 2, 4, 9856, 14),
            ("MIG 2g.10gb", 1, 14, &[0, 2, 4], 2, 3, 9856, 28),
            ("MIG 3g.20gb", 2, 9, &[0, 4], 4, 2, 19968, 42),
            ("MIG 4g.20gb", 3, 5, &[0], 4, 1, 19968, 56),
            ("MIG 7g.40gb", 4, 0, &[0], 8, 1, 40192, 98),
        ],
    ),
    (
        "h100",
        &[
            ("MIG 1g.10gb", 0, 19, &[0, 1, 2, 3, 4, 5, 6], 1, 7, 9984, 16),
            ("MIG 1g.10gb+me", 7, 20, &[0, 1, 2, 3, 4, 5, 6], 1, 1, 9984, 16),
            ("MIG 1g.20gb", 9, 15, &[0, 2, 4, 6], 2, 4, 20096, 26),
            ("MIG 2g.20gb", 1, 14, &[0, 2, 4], 2, 3, 20096, 32),
            ("MIG 3g.40gb", 2, 9, &[0, 4], 4, 2, 40448, 60),
            ("MIG 4g.40gb", 3, 5, &[0], 4, 1, 40448, 64),
            ("MIG 7g.80gb", 4, 0, &[0], 8, 1, 81152, 132),
        ],
    ),
    (
        "a30",
        &[
            ("MIG 1g.6gb", 0, 14, &[0, 1, 2, 3], 1, 4, 5952, 14),
            ("MIG 2g.12gb", 1, 5, &[0, 2], 2, 2, 11968, 28),
            ("MIG 4g.24gb", 3, 0, &[0], 4, 1, 24000, 56),
            ("MIG 1g.6gb+me", 7, 21, &[0, 1, 2, 3], 1, 1, 5952, 14),
            ("MIG 2g.12gb+me", 8, 6, &[0, 2], 2, 1, 11968, 28),
        ],
    ),
    (
        "rtxpro6000",
        &[
            ("MIG 1g.24gb", 0, 14, &[0, 3, 6, 9], 3, 4, 24192, 46),
            ("MIG 1g.24gb+me", 7, 21, &[0, 3, 6, 9], 3, 1, 24192, 46),
            ("MIG 1g.24gb+gfx", 10, 47, &[0, 3, 6, 9], 3, 4, 24192, 46),
            ("MIG 1g.24gb+me.all", 15, 65, &[0, 3, 6, 9], 3, 1, 24192, 46),
            ("MIG 1g.24gb-me", 13, 67, &[0, 3, 6, 9], 3, 4, 24192, 46),
            ("MIG 2g.48gb", 1, 5, &[0, 6], 6, 2, 48512, 94),
            ("MIG 2g.48gb+gfx", 11, 35, &[0, 6], 6, 2, 48512, 94),
            ("MIG 2g.48gb+me.all", 16, 64, &[0, 6], 6, 1, 48512, 94),
            ("MIG 2g.48gb-me", 14, 66, &[0, 6], 6, 2, 48512, 94),
            ("MIG 4g.96gb", 3, 0, &[0], 12, 1, 97408, 188),
            ("MIG 4g.96gb+gfx", 12, 32, &[0], 12, 1, 97408, 188),
        ],
    ),
];

#[test]
fn profiles_are_those_of_the_captures() {
    for &(profile, rows) in ORACLES {
        let node = Node::with_mig(profile);
        let device = node.nvml.device_by_index(0).unwrap();
        let card = Card::of(&node, &device);
        for value in 0..20 {
            let wanted = rows.iter().find(|r| r.1 == value);
            let Some(&(want, _, id, starts, size, max, mib, sms)) = wanted else {
                let code = if value < 18 { 3 } else { 2 };
                assert_eq!(card.profile(value).err(), Some(code), "{profile} enum {value}");
                continue;
            };
            let info = card.profile(value).unwrap();
            assert_eq!(name(&info), want);
            let got = (info.id, info.instanceCount, info.memorySizeMB, info.multiprocessorCount);
            assert_eq!(got, (id, max, mib, sms), "{want}");
            assert_eq!(
                card.placements(id).unwrap(),
                starts.iter().map(|s| (*s, size)).collect::<Vec<_>>(),
                "{want}"
            );
            assert_eq!(card.remaining(id), Ok(max), "{want}");
        }
    }
}

/// On an empty card every legal place works and no other: a 1g never at 7, a 2g never at 6.
#[test]
fn each_placement_is_accepted_or_refused_as_listed() {
    for &(profile, rows) in ORACLES {
        let node = Node::with_mig(profile);
        let device = node.nvml.device_by_index(0).unwrap();
        let card = Card::of(&node, &device);
        for &(row, _, id, starts, size, ..) in rows {
            for start in 0..14 {
                for width in [size - 1, size, size + 1] {
                    let got = card.create(id, Some((start, width)));
                    let legal = width == size && starts.contains(&start);
                    assert_eq!(got.is_ok(), legal, "{profile} {row} at {start}:{width}");
                    match got {
                        Ok(gi) => assert_eq!(card.destroy(gi), 0),
                        Err(code) => assert_eq!(code, 2),
                    }
                }
            }
        }
    }
}

#[test]
fn taken_units_and_engines_are_refused_for_want_of_resources() {
    let node = Node::with_mig("h100");
    let device = node.nvml.device_by_index(0).unwrap();
    let card = Card::of(&node, &device);
    card.create(9, Some((4, 4))).unwrap();
    assert_eq!(card.create(19, Some((5, 1))), Err(23));
    card.create(20, Some((0, 1))).unwrap();
    assert_eq!(card.create(20, Some((1, 1))), Err(23), "one +me only");
    assert_eq!(card.create(0, None), Err(23));
    assert_eq!([19, 20, 15, 14, 9, 5].map(|id| card.remaining(id).unwrap()), [3, 0, 1, 1, 0, 0]);
}

#[test]
fn an_instance_lives_from_create_to_destroy() {
    let node = Node::with_mig("a100");
    let device = node.nvml.device_by_index(0).unwrap();
    let card = Card::of(&node, &device);
    let gi = card.create(9, Some((4, 4))).unwrap();
    let info = card.gi_info(gi).unwrap();
    assert_eq!((info.profileId, info.placement.start, info.placement.size), (9, 4, 4));
    assert_eq!(info.device, card.device);
    assert_eq!(card.instances(9), Ok(vec![gi]));
    assert_eq!(card.instances(19), Ok(vec![]));
    assert_eq!(card.instances(99), Err(2));

    let mut compute: nvmlComputeInstanceProfileInfo_v2_t = zeroed();
    compute.version = u32::try_from(size_of_val(&compute)).unwrap() | 2 << 24;
    // SAFETY: the struct outlives the call and carries its version.
    let code = unsafe { card.lib.nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 2, 0, &raw mut compute) };
    assert_eq!((code, compute.id, compute.sliceCount, compute.multiprocessorCount), (0, 2, 3, 42));
    let ci = card.create_ci(gi, compute.id).unwrap();
    assert_eq!(card.create_ci(gi, compute.id), Err(23));
    let made = card.ci_info(ci).unwrap();
    assert_eq!((made.gpuInstance, made.id, made.profileId), (gi, 0, 2));

    // SAFETY: the handle belongs to this library.
    let mig = unsafe { Device::new(made.device, &node.nvml) };
    let uuid = mig.uuid().unwrap();
    assert!(uuid.starts_with("MIG-"));
    assert_eq!(mig.name().unwrap(), "NVIDIA A100-PCIE-40GB MIG 3g.20gb");
    assert!(mig.mig_is_mig_device_handle().unwrap() && !device.mig_is_mig_device_handle().unwrap());
    assert_eq!(mig.mig_parent_device().unwrap().uuid().unwrap(), node.uuid(0));
    let attributes = mig.attributes().unwrap();
    assert_eq!((attributes.multiprocessor_count, attributes.memory_size_mb), (42, 19968));
    assert_eq!(mig.memory_info().unwrap().total, 19968 << 20);
    assert_eq!(device.mig_device_count().unwrap(), 7);
    assert_eq!(device.mig_device_by_index(0).unwrap().uuid().unwrap(), uuid);
    assert!(matches!(device.mig_device_by_index(1), Err(NvmlError::NotFound)));
    assert_eq!(node.nvml.device_by_uuid(uuid.as_str()).unwrap().uuid().unwrap(), uuid);

    node.fake(&format!("process 0 4242 100 5 {}", info.id));
    assert_eq!(mig.running_compute_processes().unwrap()[0].gpu_instance_id, Some(info.id));
    assert_eq!(card.destroy_ci(ci), 19, "a process runs in it");
    node.fake("process 0 4242 0");
    assert_eq!(card.destroy(gi), 19, "it has a compute instance");
    assert_eq!(card.destroy_ci(ci), 0);
    assert_eq!(card.destroy_ci(ci), 6);
    assert!(matches!(mig.uuid(), Err(NvmlError::InvalidArg)));
    assert_eq!(card.destroy(gi), 0);
    assert_eq!(card.destroy(gi), 6);
    assert_eq!(card.gi_info(gi).err(), Some(6));
}

#[test]
fn holes_stay_in_the_list_of_mig_devices() {
    let node = Node::with_mig("h100");
    let device = node.nvml.device_by_index(0).unwrap();
    let card = Card::of(&node, &device);
    let made: Vec<_> = (0..3)
        .map(|start| {
            let gi = card.create(19, Some((start, 1))).unwrap();
            (gi, card.create_ci(gi, 0).unwrap())
        })
        .collect();
    assert_eq!((card.destroy_ci(made[1].1), card.destroy(made[1].0)), (0, 0));
    let listed: Vec<bool> = (0..4).map(|i| device.mig_device_by_index(i).is_ok()).collect();
    assert_eq!(listed, [true, false, true, false]);
}

#[test]
fn the_mode_changes_at_once_on_hopper_and_after_a_reset_on_ampere() {
    for (case, profile, status, now) in [("Hopper", "h100", 0, 1), ("Ampere", "a100", 16, 0)] {
        let node = Node::new(profile);
        let device = node.nvml.device_by_index(0).unwrap();
        let card = Card::of(&node, &device);
        assert_eq!(device.mig_device_count().unwrap(), 0, "{case}");
        assert_eq!((card.create(0, None), card.instances(0)), (Err(3), Err(3)), "{case}");
        assert_eq!(card.placements(9).unwrap(), [(0, 4), (4, 4)], "{case}: told with MIG off as well");
        assert_eq!(card.set_mode(2).0, 2, "{case}");
        assert_eq!(card.set_mode(1), (0, status), "{case}");
        let mode = device.mig_mode().unwrap();
        assert_eq!((mode.current, mode.pending), (now, 1), "{case}");
        node.fake("reset 0");
        assert_eq!(device.mig_mode().unwrap().current, 1, "{case}");
        card.create(0, None).unwrap();
        assert_eq!(card.set_mode(0), (0, 19), "{case}");
        node.fake("reset 0");
        assert_eq!(card.instances(0), Err(3), "{case}");
    }
}

#[test]
fn profile_structs_come_in_three_versions() {
    let node = Node::with_mig("rtxpro6000");
    let device = node.nvml.device_by_index(0).unwrap();
    let card = Card::of(&node, &device);
    let mut first: nvmlGpuInstanceProfileInfo_t = zeroed();
    // SAFETY: the struct outlives the call.
    let code = unsafe { card.lib.nvmlDeviceGetGpuInstanceProfileInfo(card.device, 10, &raw mut first) };
    assert_eq!((code, first.id, first.encoderCount), (0, 47, 1));
    let mut third: nvmlGpuInstanceProfileInfo_v3_t = zeroed();
    third.version = u32::try_from(size_of_val(&third)).unwrap() | 3 << 24;
    // SAFETY: the struct outlives the call; its version tells that it is the longer one.
    let code =
        unsafe { card.lib.nvmlDeviceGetGpuInstanceProfileInfoV(card.device, 10, (&raw mut third).cast()) };
    assert_eq!((code, third.id, third.capabilities), (0, 47, 2));
    for version in [0, 1, u32::try_from(size_of::<nvmlGpuInstanceProfileInfo_v2_t>()).unwrap() | 4 << 24] {
        third.version = version;
        // SAFETY: the struct is long enough for every version.
        let code = unsafe {
            card.lib.nvmlDeviceGetGpuInstanceProfileInfoV(card.device, 10, (&raw mut third).cast())
        };
        assert_eq!(code, 25, "{version:#x}");
    }
}

/// The call fails, the card does not change: what a caller must be able to rely on when it re-reads.
#[test]
fn a_failed_create_leaves_nothing() {
    let node = Node::with_mig("h100");
    let device = node.nvml.device_by_index(0).unwrap();
    let card = Card::of(&node, &device);
    node.fake("error nvmlDeviceCreateGpuInstanceWithPlacement 23 1");
    assert_eq!(card.create(19, Some((0, 1))), Err(23));
    assert_eq!(card.instances(19), Ok(vec![]));
    let gi = card.create(19, Some((0, 1))).unwrap();
    node.fake("error nvmlGpuInstanceCreateComputeInstance 23 1");
    assert_eq!(card.create_ci(gi, 0), Err(23));
    node.fake("lost 0");
    assert_eq!((card.create_ci(gi, 0), card.destroy(gi)), (Err(15), 15));
    node.fake("restore 0");
    assert_eq!(card.destroy(gi), 0);
}
