//! The device list and what identifies a device.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_char, c_int, c_uint};

use fake_state::Card;
use nvml_wrapper_sys::bindings::{nvmlDeviceAttributes_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t};

use crate::abi::{Out, Text, length, text_array, version_of};
use crate::code::Code;
use crate::compute_instance;
use crate::entry;
use crate::handles::Handle;
use crate::session::{Device, Session, card_handle, mig_handle};

/// Bytes of a MiB; the library speaks bytes, the state file MiB.
pub(crate) const MIB: u64 = 1 << 20;

entry! {
    fn nvmlDeviceGetCount(count: Out<c_uint>) |session| {
        put_count(session, count)
    }

    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) |session| {
        put_count(session, count)
    }

    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: Out<Handle>) |session| {
        put_by_index(session, index, device)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Handle>) |session| {
        put_by_index(session, index, device)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, device: Out<Handle>) |session| {
        let uuid = uuid.read()?;
        if let Some(card) = session.state.listed().find(|c| c.uuid == uuid) {
            return put_card(card, device);
        }
        for card in session.state.listed().filter(|c| !c.lost) {
            for gi in &card.mig.instances {
                if let Some(ci) = gi.compute.iter().find(|c| c.uuid == uuid) {
                    return device.put(mig_handle(card, gi.id, ci.id));
                }
            }
        }
        Err(Code::NOT_FOUND)
    }

    fn nvmlDeviceGetHandleByPciBusId(bus_id: Text, device: Out<Handle>) |session| {
        put_by_address(session, bus_id, device)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Text, device: Out<Handle>) |session| {
        put_by_address(session, bus_id, device)
    }

    fn nvmlDeviceGetName(device: Handle, name: Out<c_char>, length: c_uint) |session| {
        let device = session.device(device)?;
        let text = match compute_instance::profile_name(&device) {
            Some(profile) => format!("{} {profile}", device.card.model),
            None => device.card.model.clone(),
        };
        name.put_text(length, &text)
    }

    fn nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) |session| {
        brand.put(session.device(device)?.card.brand)
    }

    fn nvmlDeviceGetUUID(device: Handle, uuid: Out<c_char>, length: c_uint) |session| {
        let device = session.device(device)?;
        uuid.put_text(length, device.mig.map_or(&device.card.uuid, |(_, ci)| &ci.uuid))
    }

    fn nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) |session| {
        let device = session.device(device)?;
        let place = session.state.listed().position(|c| c.uuid == device.card.uuid);
        let place = place.and_then(|p| c_uint::try_from(p).ok()).ok_or(Code::UNKNOWN)?;
        index.put(device.mig.map_or(place, |(_, ci)| ci.slot))
    }

    fn nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) |session| {
        minor.put(session.gpu(device)?.minor)
    }

    fn nvmlDeviceGetPciInfo_v3(device: Handle, info: Out<nvmlPciInfo_t>) |session| {
        info.put(pci_info(session.device(device)?.card))
    }

    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: Out<nvmlMemory_t>) |session| {
        let Memory { total, reserved, used } = Memory::of(session, &session.device(device)?);
        // The first version counts what the driver keeps as used.
        let used = used + reserved;
        memory.put(nvmlMemory_t { total, used, free: total.saturating_sub(used) })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Out<nvmlMemory_v2_t>) |session| {
        let Memory { total, reserved, used } = Memory::of(session, &session.device(device)?);
        let version = version_of::<nvmlMemory_v2_t>(2);
        if memory.cast::<c_uint>().get()? != version {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let free = total.saturating_sub(used + reserved);
        memory.put(nvmlMemory_v2_t { version, total, reserved, free, used })
    }

    // Only MIG devices have attributes; the header says so.
    fn nvmlDeviceGetAttributes_v2(device: Handle, attributes: Out<nvmlDeviceAttributes_t>) |session| {
        attributes.put(compute_instance::attributes(&session.device(device)?).ok_or(Code::NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetNumGpuCores(device: Handle, cores: Out<c_uint>) |session| {
        cores.put(session.gpu(device)?.cores)
    }

    fn nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) |session| {
        architecture.put(session.device(device)?.card.architecture)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) |session| {
        let (high, low) = session.device(device)?.card.compute;
        major.put(high)?;
        minor.put(low)
    }
}

struct Memory {
    total: u64,
    reserved: u64,
    used: u64,
}

impl Memory {
    /// In bytes.
    fn of(session: &Session, device: &Device<'_>) -> Self {
        let card = device.card;
        let (total, reserved, used) = match compute_instance::memory_mib(device) {
            Some((total, used)) => (total, 0, used),
            None => (card.memory_mib, card.reserved_mib, card.used_mib()),
        };
        let [total, reserved, used] = [total, reserved, used].map(|mib| mib.saturating_mul(MIB));
        // Programs run on whole cards.
        let used = if device.mig.is_none() { used.saturating_add(session.live_bytes(card)) } else { used };
        Self { total, reserved: reserved.min(total), used: used.min(total) }
    }
}

fn put_count(session: &Session, count: Out<c_uint>) -> Result<(), Code> {
    count.put(length(&session.state.listed().collect::<Vec<_>>()))
}

/// A lost card stays in the list, but gives no handle.
fn put_card(card: &Card, device: Out<Handle>) -> Result<(), Code> {
    if card.lost { Err(Code::GPU_IS_LOST) } else { device.put(card_handle(card)) }
}

fn put_by_index(session: &Session, index: c_uint, device: Out<Handle>) -> Result<(), Code> {
    put_card(session.state.listed().nth(index as usize).ok_or(Code::INVALID_ARGUMENT)?, device)
}

fn put_by_address(session: &Session, bus_id: Text, device: Out<Handle>) -> Result<(), Code> {
    let wanted = address(&bus_id.read()?).ok_or(Code::INVALID_ARGUMENT)?;
    let card = session.state.listed().find(|c| address(&c.pci.bus_id) == Some(wanted));
    put_card(card.ok_or(Code::NOT_FOUND)?, device)
}

/// `[domain:]bus:device[.function]` in hexadecimal, as people and drivers write it.
fn address(text: &str) -> Option<[u32; 3]> {
    let text = text.split_once('.').map_or(text, |(before, _)| before);
    let parts: Option<Vec<u32>> = text.split(':').map(|p| u32::from_str_radix(p, 16).ok()).collect();
    match *parts? {
        [domain, bus, device] => Some([domain, bus, device]),
        [bus, device] => Some([0, bus, device]),
        _ => None,
    }
}

pub(crate) fn pci_info(card: &Card) -> nvmlPciInfo_t {
    let [domain, bus, device] = address(&card.pci.bus_id).unwrap_or_default();
    nvmlPciInfo_t {
        busIdLegacy: text_array(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pciDeviceId: card.pci.device_id,
        pciSubSystemId: card.pci.subsystem_id,
        busId: text_array(&card.pci.bus_id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling() {
        for (text, want) in [
            ("00000000:1B:00.0", Some([0, 0x1B, 0])),
            ("0000:1b:00.0", Some([0, 0x1B, 0])),
            ("1B:00.0", Some([0, 0x1B, 0])),
            ("00000001:D1:01", Some([1, 0xD1, 1])),
            ("", None),
            ("1B", None),
            ("0:0:1B:0", None),
            ("zz:00.0", None),
            ("fffffffff:1B:00.0", None),
        ] {
            assert_eq!(address(text), want, "{text}");
        }
    }
}
