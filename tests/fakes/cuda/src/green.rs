//! Green contexts: a share of a card's SMs.
//!
//! One holds the card's primary context, which has what is allocated and loaded through it, and takes `FAKE_CUDA_GREEN_CONTEXT_MIB` (32, a guess: no figure was published) for channels of its
//! own.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::c_uint;
use std::sync::Arc;

use crate::abi::{Code, Device, Handle, Out};
use crate::context::Cell;
use crate::driver::Driver;
use crate::gate::entry;

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: c_uint = 1;

/// SMs come in groups of this size (Hopper and later: 8).
const GROUP: c_uint = 8;

/// `CUdevResource`, 12.4 to 13.x.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resource {
    kind: c_uint,
    padding: [u8; 92],
    sms: c_uint,
    rest: [u8; 44],
}

const _: () = assert!(size_of::<Resource>() == 144);

fn resource(sms: c_uint) -> Resource {
    Resource { kind: SM, padding: [0; 92], sms, rest: [0; 44] }
}

impl Driver {
    /// The context of a green context.
    pub(crate) fn green_context(&self, green: Handle) -> Result<Arc<Cell>, Code> {
        let context = self.contexts.get(&green).filter(|c| c.green);
        context.map(|c| Arc::clone(&c.cell)).ok_or(Code::INVALID_HANDLE)
    }

    /// The context that has what comes while `cell` is current.
    pub(crate) fn owner(&self, cell: &Cell) -> Handle {
        let is_green = self.contexts.get(&cell.handle).is_some_and(|c| c.green);
        if is_green { self.primaries[cell.ordinal].handle } else { cell.handle }
    }

    fn sms_of(&self, context: Handle) -> Result<c_uint, Code> {
        self.contexts.get(&context).map(|c| c.sms).ok_or(Code::INVALID_CONTEXT)
    }
}

fn put_resource(out: Out<Resource>, kind: c_uint, sms: c_uint) -> Result<(), Code> {
    if kind == SM { out.put(resource(sms)) } else { Err(Code::INVALID_VALUE) }
}

entry! {
    fn cuDeviceGetDevResource(device: Device, out: Out<Resource>, kind: c_uint) |driver| {
        let ordinal = driver.ordinal(device)?;
        put_resource(out, kind, driver.cards[ordinal].sms)
    }

    fn cuCtxGetDevResource(context: Handle, out: Out<Resource>, kind: c_uint) |driver| {
        put_resource(out, kind, driver.sms_of(context)?)
    }

    fn cuGreenCtxGetDevResource(green: Handle, out: Out<Resource>, kind: c_uint) |driver| {
        put_resource(out, kind, driver.sms_of(green)?)
    }

    fn cuDevSmResourceSplitByCount(
        groups: Out<Resource>, count: Out<c_uint>, input: Out<Resource>, remaining: Out<Resource>, _flags: c_uint,
        least: c_uint,
    ) |_| {
        let sms = input.get()?.sms;
        let size = least.max(1).div_ceil(GROUP) * GROUP;
        let possible = sms / size;
        let made = if groups.is_null() { possible } else { possible.min(count.get()?) };
        if made == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !groups.is_null() {
            for place in 0..made as usize {
                groups.put_at(place, resource(size))?;
            }
            remaining.put_if(resource(sms - made * size))?;
        }
        count.put(made)
    }

    fn cuDevResourceGenerateDesc(out: Out<Handle>, resources: Out<Resource>, count: c_uint) |driver| {
        out.check()?;
        let mut sms = 0;
        for place in 0..count as usize {
            sms += resources.get_at(place)?.sms;
        }
        if sms == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = driver.handle();
        driver.objects.descriptions.insert(handle, sms);
        out.put(handle)
    }

    fn cuGreenCtxCreate(out: Out<Handle>, description: Handle, device: Device, _flags: c_uint) |driver| {
        out.check()?;
        let ordinal = driver.ordinal(device)?;
        let sms = *driver.objects.descriptions.get(&description).ok_or(Code::INVALID_VALUE)?;
        driver.retain_primary(ordinal)?;
        let made = driver.create_context(ordinal, 0, true);
        let Ok(cell) = made else {
            driver.release_primary_of(ordinal)?;
            return Err(Code::OUT_OF_MEMORY);
        };
        if let Some(context) = driver.contexts.get_mut(&cell.handle) {
            context.sms = sms;
        }
        out.put(cell.handle)
    }

    fn cuGreenCtxDestroy(green: Handle) |driver| {
        let cell = driver.green_context(green)?;
        driver.destroy_context(cell.handle)?;
        driver.release_primary_of(cell.ordinal)
    }

    // One handle serves as both.
    fn cuCtxFromGreenCtx(out: Out<Handle>, green: Handle) |driver| {
        out.put(driver.green_context(green)?.handle)
    }

    fn cuGreenCtxGetId(green: Handle, id: Out<u64>) |driver| {
        id.put(driver.green_context(green)?.handle.0 as u64)
    }

    fn cuStreamGetGreenCtx(stream: Handle, out: Out<Handle>) |driver| {
        let context = driver.target(stream)?.context;
        let green = driver.contexts.get(&context).is_some_and(|c| c.green);
        out.put(if green { context } else { Handle(0) })
    }
}
