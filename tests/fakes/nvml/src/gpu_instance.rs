//! MIG mode, profiles, placements and GPU instances.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::c_uint;

use fake_state::mig::{Profile, Table};
use fake_state::{Card, Placement};
use nvml_wrapper_sys::bindings::{
    nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};

use crate::abi::{Out, length, list, text_array, version_of};
use crate::code::Code;
use crate::entry;
use crate::handles::{self, Handle, Identity};
use crate::session::{Session, card_handle};

/// `NVML_GPU_INSTANCE_PROFILE_COUNT`: from here on an enum value is unknown to the library itself.
const PROFILES: u32 = 18;

/// `NVML_GPU_INSTANCE_PROFILE_CAPS_GFX`.
const CAPABILITY_GRAPHICS: u32 = 2;

entry! {
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |session| {
        let card = session.gpu(device)?;
        card.mig_table()?;
        current.put(card.mig.current.into())?;
        pending.put(card.mig.pending.into())
    }

    fn nvmlDeviceSetMigMode(device: Handle, mode: c_uint, activation: Out<c_uint>) |session| {
        let card = session.gpu(device)?;
        let on = match mode {
            0 => false,
            1 => true,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        activation.put(0)?;
        let status = session.change(&card.uuid, |card| Ok(card.set_mig_mode(on)?))?;
        activation.put(status.map_or_else(fake_state::mig::Refusal::code, |()| 0))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: Handle, profile: c_uint, info: Out<nvmlGpuInstanceProfileInfo_t>,
    ) |session| {
        let p = by_enum(session.gpu(device)?, profile)?;
        info.put(nvmlGpuInstanceProfileInfo_t {
            id: p.id,
            isP2pSupported: 0,
            sliceCount: p.slices,
            instanceCount: p.max,
            multiprocessorCount: p.sms,
            copyEngineCount: p.engines.copy,
            decoderCount: p.engines.decoder,
            encoderCount: p.engines.encoder,
            jpegCount: p.engines.jpeg,
            ofaCount: p.engines.ofa,
            memorySizeMB: p.memory_mib,
        })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        device: Handle, profile: c_uint, info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        put_versioned(by_enum(session.gpu(device)?, profile), info)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        device: Handle, id: c_uint, info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
    ) |session| {
        put_versioned(by_id(session.gpu(device)?.mig_table()?, id), info)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        device: Handle, id: c_uint, placements: Out<nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        put_placements(session, device, id, placements, count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Handle, id: c_uint, placements: Out<nvmlGpuInstancePlacement_t>, count: Out<c_uint>,
    ) |session| {
        put_placements(session, device, id, placements, count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Handle, id: c_uint, count: Out<c_uint>) |session| {
        let card = session.gpu(device)?;
        let table = card.active_table()?;
        count.put(card.remaining(table, by_id(table, id)?))
    }

    fn nvmlDeviceCreateGpuInstance(device: Handle, id: c_uint, instance: Out<Handle>) |session| {
        create(session, device, id, None, instance)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Handle, id: c_uint, placement: Out<nvmlGpuInstancePlacement_t>, instance: Out<Handle>,
    ) |session| {
        let nvmlGpuInstancePlacement_t { start, size } = placement.get()?;
        create(session, device, id, Some(Placement { start, size }), instance)
    }

    fn nvmlGpuInstanceDestroy(instance: Handle) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        session.change(&card.uuid, |card| Ok(card.destroy_gpu_instance(gi.id)?))
    }

    fn nvmlDeviceGetGpuInstances(
        device: Handle, id: c_uint, instances: Out<Handle>, count: Out<c_uint>,
    ) |session| {
        let card = session.gpu(device)?;
        let profile = by_id(card.active_table()?, id)?;
        // The interface asks for room for as many as the profile allows; it has no count that goes in.
        let live: Vec<Handle> = card.mig.instances.iter()
            .filter(|g| g.profile_id == profile.id)
            .map(|g| handle(card, g.id))
            .collect();
        instances.fill(&live)?;
        count.put(length(&live))
    }

    fn nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, instance: Out<Handle>) |session| {
        let card = session.gpu(device)?;
        card.active_table()?;
        let gi = card.gpu_instance(id).ok_or(Code::NOT_FOUND)?;
        instance.put(handle(card, gi.id))
    }

    fn nvmlGpuInstanceGetInfo(instance: Handle, info: Out<nvmlGpuInstanceInfo_t>) |session| {
        let (card, gi) = session.gpu_instance(instance)?;
        info.put(nvmlGpuInstanceInfo_t {
            device: card_handle(card).pointer(),
            id: gi.id,
            profileId: gi.profile_id,
            placement: nvmlGpuInstancePlacement_t { start: gi.placement.start, size: gi.placement.size },
        })
    }
}

/// The handle of a GPU instance.
pub(crate) fn handle(card: &Card, gi: u32) -> Handle {
    handles::of(Identity::GpuInstance { card: card.uuid.clone(), gi })
}

fn by_enum(card: &Card, value: u32) -> Result<&'static Profile, Code> {
    let table = card.mig_table()?;
    if value >= PROFILES {
        return Err(Code::INVALID_ARGUMENT);
    }
    table.by_enum(value).ok_or(Code::NOT_SUPPORTED)
}

fn by_id(table: &Table, id: u32) -> Result<&'static Profile, Code> {
    table.by_id(id).ok_or(Code::INVALID_ARGUMENT)
}

fn create(
    session: &Session,
    device: Handle,
    id: u32,
    placement: Option<Placement>,
    instance: Out<Handle>,
) -> Result<(), Code> {
    let card = session.gpu(device)?;
    if instance.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let gi = session.change(&card.uuid, |card| Ok(card.create_gpu_instance(id, placement)?))?;
    instance.put(handle(card, gi))
}

fn put_placements(
    session: &Session,
    device: Handle,
    id: u32,
    placements: Out<nvmlGpuInstancePlacement_t>,
    count: Out<c_uint>,
) -> Result<(), Code> {
    let profile = by_id(session.gpu(device)?.mig_table()?, id)?;
    let all: Vec<_> = profile
        .placements()
        .map(|Placement { start, size }| nvmlGpuInstancePlacement_t { start, size })
        .collect();
    list(placements, count, &all, Ok(()))
}

/// Fills the struct whose version the caller has set.
fn put_versioned(
    profile: Result<&Profile, Code>,
    info: Out<nvmlGpuInstanceProfileInfo_v2_t>,
) -> Result<(), Code> {
    let version = info.cast::<c_uint>().get()?;
    let second = version_of::<nvmlGpuInstanceProfileInfo_v2_t>(2);
    let third = version_of::<nvmlGpuInstanceProfileInfo_v3_t>(3);
    if version != second && version != third {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let p = profile?;
    let name = text_array(&format!("MIG {}", p.name));
    if version == second {
        return info.put(nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: p.id,
            isP2pSupported: 0,
            sliceCount: p.slices,
            instanceCount: p.max,
            multiprocessorCount: p.sms,
            copyEngineCount: p.engines.copy,
            decoderCount: p.engines.decoder,
            encoderCount: p.engines.encoder,
            jpegCount: p.engines.jpeg,
            ofaCount: p.engines.ofa,
            memorySizeMB: p.memory_mib,
            name,
        });
    }
    info.cast().put(nvmlGpuInstanceProfileInfo_v3_t {
        version,
        id: p.id,
        sliceCount: p.slices,
        instanceCount: p.max,
        multiprocessorCount: p.sms,
        copyEngineCount: p.engines.copy,
        decoderCount: p.engines.decoder,
        encoderCount: p.engines.encoder,
        jpegCount: p.engines.jpeg,
        ofaCount: p.engines.ofa,
        memorySizeMB: p.memory_mib,
        name,
        capabilities: if p.graphics { CAPABILITY_GRAPHICS } else { 0 },
    })
}
