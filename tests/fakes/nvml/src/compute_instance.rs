//! Compute instances and the MIG devices that they are.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::c_uint;

use fake_state::mig::{ComputeProfile, Profile};
use fake_state::{Card, GpuInstance, Placement};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t, nvmlDeviceAttributes_t,
};

use crate::abi::{Out, length, list, text_array, version_of};
use crate::code::Code;
use crate::handles::{self, Handle, Identity};
use crate::session::{Device, Session, card_handle, mig_handle};
use crate::{entry, gpu_instance};

/// `NVML_COMPUTE_INSTANCE_PROFILE_COUNT` and `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT`.
const PROFILES: u32 = 9;
const ENGINE_PROFILES: u32 = 1;

entry! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: Handle, profile: c_uint, engines: c_uint, info: Out<nvmlComputeInstanceProfileInfo_t>,
    ) |session| {
        let (p, c) = by_enum(session.gpu_instance(instance)?, profile, engines)?;
        info.put(nvmlComputeInstanceProfileInfo_t {
            id: c.id,
            sliceCount: c.slices,
            instanceCount: c.max,
            multiprocessorCount: p.compute_sms(c.slices),
            sharedCopyEngineCount: p.engines.copy,
            sharedDecoderCount: p.engines.decoder,
            sharedEncoderCount: p.engines.encoder,
            sharedJpegCount: p.engines.jpeg,
            sharedOfaCount: p.engines.ofa,
        })
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: Handle, profile: c_uint, engines: c_uint, info: Out<nvmlComputeInstanceProfileInfo_v2_t>,
    ) |session| {
        put_versioned(by_enum(session.gpu_instance(instance)?, profile, engines), info)
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        instance: Handle, id: c_uint, count: Out<c_uint>,
    ) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        count.put(card.compute_remaining(gi.id, id)?.1)
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: Handle, id: c_uint, placements: Out<nvmlComputeInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        let profile = card.active_table()?.by_id(gi.profile_id).ok_or(Code::NOT_FOUND)?;
        let compute = profile.compute_profile(id).ok_or(Code::INVALID_ARGUMENT)?;
        let all: Vec<_> = (0..=profile.slices.saturating_sub(compute.slices))
            .map(|start| nvmlComputeInstancePlacement_t { start, size: compute.slices })
            .collect();
        list(placements, count, &all, Ok(()))
    }

    fn nvmlGpuInstanceCreateComputeInstance(instance: Handle, id: c_uint, compute: Out<Handle>) |session| {
        create(session, instance, id, None, compute)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: Handle, id: c_uint, placement: Out<nvmlComputeInstancePlacement_t>, compute: Out<Handle>,
    ) |session| {
        let nvmlComputeInstancePlacement_t { start, size } = placement.get()?;
        create(session, instance, id, Some(Placement { start, size }), compute)
    }

    fn nvmlComputeInstanceDestroy(compute: Handle) |session| {
        let (card, gi, ci) = session.compute_instance(compute)?;
        session.change(&card.uuid, |card| Ok(card.destroy_compute_instance(gi.id, ci.id)?))
    }

    fn nvmlGpuInstanceGetComputeInstances(
        instance: Handle, id: c_uint, computes: Out<Handle>, count: Out<c_uint>,
    ) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        card.compute_remaining(gi.id, id)?;
        // As with GPU instances: room for as many as the profile allows is the interface's rule.
        let live: Vec<Handle> = gi.compute.iter()
            .filter(|c| c.profile_id == id)
            .map(|c| handle(card, gi.id, c.id))
            .collect();
        computes.fill(&live)?;
        count.put(length(&live))
    }

    fn nvmlGpuInstanceGetComputeInstanceById(instance: Handle, id: c_uint, compute: Out<Handle>) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        let ci = gi.compute.iter().find(|c| c.id == id).ok_or(Code::NOT_FOUND)?;
        compute.put(handle(card, gi.id, ci.id))
    }

    fn nvmlComputeInstanceGetInfo_v2(compute: Handle, info: Out<nvmlComputeInstanceInfo_t>) |session| {
        let (card, gi, ci) = session.compute_instance(compute)?;
        info.put(nvmlComputeInstanceInfo_t {
            device: mig_handle(card, gi.id, ci.id).pointer(),
            gpuInstance: gpu_instance::handle(card, gi.id).pointer(),
            id: ci.id,
            profileId: ci.profile_id,
            placement: nvmlComputeInstancePlacement_t { start: ci.placement.start, size: ci.placement.size },
        })
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Handle, is_mig: Out<c_uint>) |session| {
        is_mig.put(u32::from(session.device(device)?.mig.is_some()))
    }

    fn nvmlDeviceGetGpuInstanceId(device: Handle, id: Out<c_uint>) |session| {
        id.put(session.device(device)?.mig.ok_or(Code::NOT_SUPPORTED)?.0.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Handle, id: Out<c_uint>) |session| {
        id.put(session.device(device)?.mig.ok_or(Code::NOT_SUPPORTED)?.1.id)
    }

    // Zero, not an error, on a card without MIG or with MIG off.
    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) |session| {
        count.put(session.gpu(device)?.active_table().map_or(0, fake_state::mig::Table::max_devices))
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, mig: Out<Handle>) |session| {
        let card = session.gpu(device)?;
        if index >= card.active_table()?.max_devices() {
            return Err(Code::INVALID_ARGUMENT);
        }
        for gi in &card.mig.instances {
            if let Some(ci) = gi.compute.iter().find(|c| c.slot == index) {
                return mig.put(mig_handle(card, gi.id, ci.id));
            }
        }
        Err(Code::NOT_FOUND)
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Handle, device: Out<Handle>) |session| {
        let mig = session.device(mig)?;
        mig.mig.ok_or(Code::INVALID_ARGUMENT)?;
        device.put(card_handle(mig.card))
    }
}

fn handle(card: &Card, gi: u32, ci: u32) -> Handle {
    handles::of(Identity::ComputeInstance { card: card.uuid.clone(), gi, ci })
}

/// Profiles of a MIG device.
fn profiles<'a>(device: &Device<'a>) -> Option<(&'static Profile, &'static ComputeProfile, &'a GpuInstance)> {
    let (gi, ci) = device.mig?;
    let profile = device.card.mig_table().ok()?.by_id(gi.profile_id)?;
    Some((profile, profile.compute_profile(ci.profile_id)?, gi))
}

/// The part of a MIG device's name that follows the model.
pub(crate) fn profile_name(device: &Device<'_>) -> Option<String> {
    profiles(device).map(|(p, c, _)| name(p, c))
}

/// A compute instance that is the whole GPU instance goes by that one's name.
fn name(profile: &Profile, compute: &ComputeProfile) -> String {
    if compute.slices == profile.slices {
        format!("MIG {}", profile.name)
    } else {
        format!("MIG {}c.{}", compute.slices, profile.name)
    }
}

/// Total and used memory of a MIG device: that of its GPU instance.
pub(crate) fn memory_mib(device: &Device<'_>) -> Option<(u64, u64)> {
    let (profile, _, gi) = profiles(device)?;
    let used = device.card.processes.iter().filter(|p| p.gpu_instance == Some(gi.id));
    let used = used.fold(0_u64, |sum, p| sum.saturating_add(p.memory_mib));
    Some((profile.memory_mib, used.min(profile.memory_mib)))
}

/// Attributes of a MIG device.
pub(crate) fn attributes(device: &Device<'_>) -> Option<nvmlDeviceAttributes_t> {
    let (p, c, _) = profiles(device)?;
    Some(nvmlDeviceAttributes_t {
        multiprocessorCount: p.compute_sms(c.slices),
        sharedCopyEngineCount: p.engines.copy,
        sharedDecoderCount: p.engines.decoder,
        sharedEncoderCount: p.engines.encoder,
        sharedJpegCount: p.engines.jpeg,
        sharedOfaCount: p.engines.ofa,
        gpuInstanceSliceCount: p.slices,
        computeInstanceSliceCount: c.slices,
        memorySizeMB: p.memory_mib,
    })
}

fn by_enum(
    (card, gi): (&Card, &GpuInstance),
    value: u32,
    engines: u32,
) -> Result<(&'static Profile, &'static ComputeProfile), Code> {
    if value >= PROFILES || engines >= ENGINE_PROFILES {
        return Err(Code::INVALID_ARGUMENT);
    }
    let profile = card.active_table()?.by_id(gi.profile_id).ok_or(Code::NOT_FOUND)?;
    let compute = profile.compute.iter().find(|c| c.enum_value == value).ok_or(Code::NOT_SUPPORTED)?;
    Ok((profile, compute))
}

fn create(
    session: &Session,
    instance: Handle,
    id: u32,
    placement: Option<Placement>,
    compute: Out<Handle>,
) -> Result<(), Code> {
    let (card, gi) = session.gpu_instance(instance)?;
    if compute.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let ci = session.change(&card.uuid, |card| Ok(card.create_compute_instance_at(gi.id, id, placement)?))?;
    compute.put(handle(card, gi.id, ci))
}

/// Fills the struct whose version the caller has set.
fn put_versioned(
    profiles: Result<(&Profile, &ComputeProfile), Code>,
    info: Out<nvmlComputeInstanceProfileInfo_v2_t>,
) -> Result<(), Code> {
    let version = info.cast::<c_uint>().get()?;
    let second = version_of::<nvmlComputeInstanceProfileInfo_v2_t>(2);
    let third = version_of::<nvmlComputeInstanceProfileInfo_v3_t>(3);
    if version != second && version != third {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let (p, c) = profiles?;
    let second = nvmlComputeInstanceProfileInfo_v2_t {
        version,
        id: c.id,
        sliceCount: c.slices,
        instanceCount: c.max,
        multiprocessorCount: p.compute_sms(c.slices),
        sharedCopyEngineCount: p.engines.copy,
        sharedDecoderCount: p.engines.decoder,
        sharedEncoderCount: p.engines.encoder,
        sharedJpegCount: p.engines.jpeg,
        sharedOfaCount: p.engines.ofa,
        name: text_array(&name(p, c)),
    };
    if version != third {
        return info.put(second);
    }
    info.cast().put(nvmlComputeInstanceProfileInfo_v3_t {
        version,
        id: second.id,
        sliceCount: second.sliceCount,
        instanceCount: second.instanceCount,
        multiprocessorCount: second.multiprocessorCount,
        sharedCopyEngineCount: second.sharedCopyEngineCount,
        sharedDecoderCount: second.sharedDecoderCount,
        sharedEncoderCount: second.sharedEncoderCount,
        sharedJpegCount: second.sharedJpegCount,
        sharedOfaCount: second.sharedOfaCount,
        name: second.name,
        capabilities: 0,
    })
}
