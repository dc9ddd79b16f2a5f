//! Arrays and mipmapped arrays.
//!
//! An array is stored in tiles of 64 bytes by 8 rows (one-dimensional ones in lines of 512 bytes), so rows are rounded up to 64 bytes and
//! planes to 8 rows; that size takes memory by the rule of [`crate::space`]. Levels of a mipmap are halved and added up. Sparse arrays and those with
//! deferred mapping take nothing: their memory is that of the handles mapped to them. Contents are not kept.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::c_uint;

use crate::abi::{
    Array3dDescriptor, ArrayDescriptor, Code, Device, DevicePtr, Handle, MemoryRequirements, Out,
};
use crate::driver::Driver;
use crate::gate::entry;
use crate::memory::Backing;
use crate::space::{UNIT, Use, round_up};

/// `CUDA_ARRAY3D_LAYERED`, `_SPARSE`, `_DEFERRED_MAPPING`.
const LAYERED: c_uint = 0x01;
const SPARSE: c_uint = 0x40;
const DEFERRED: c_uint = 0x80;

/// An array, or a mipmapped one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array {
    shape: Array3dDescriptor,
    levels: c_uint,
    pub(crate) ordinal: usize,
    pub(crate) context: Handle,
    address: DevicePtr,
    backing: Backing,
    /// A level of a mipmap: its memory is the mipmap's.
    part: bool,
}

/// Bytes of an element's channel by `CUarray_format`.
fn channel_bytes(format: c_uint) -> Option<u64> {
    match format {
        // NV12 and the block-compressed formats: one byte per element at most.
        0x01 | 0x08 | 0x91..=0x9F | 0xB0 | 0xC0..=0xC5 => Some(1),
        0x02 | 0x09 | 0x10 | 0xC6..=0xCB => Some(2),
        0x03 | 0x0A | 0x20 => Some(4),
        _ => None,
    }
}

/// Bytes of a level as the card stores it.
fn level_bytes(shape: &Array3dDescriptor, level: c_uint) -> Result<u64, Code> {
    let channels = u64::from(shape.channels);
    if shape.width == 0 || !(1..=4).contains(&channels) {
        return Err(Code::INVALID_VALUE);
    }
    let element = channel_bytes(shape.format).ok_or(Code::INVALID_VALUE)? * channels;
    let side = |s: usize| ((s as u64) >> level).max(1);
    let planes =
        if shape.flags & LAYERED == 0 { side(shape.depth.max(1)) } else { shape.depth.max(1) as u64 };
    let row = side(shape.width).checked_mul(element).ok_or(Code::INVALID_VALUE)?;
    if shape.height == 0 {
        return Ok(round_up(row, UNIT).saturating_mul(planes));
    }
    Ok(round_up(row, 64).saturating_mul(round_up(side(shape.height), 8)).saturating_mul(planes))
}

fn all_bytes(shape: &Array3dDescriptor, levels: c_uint) -> Result<u64, Code> {
    (0..levels).map(|l| level_bytes(shape, l)).try_fold(0_u64, |sum, bytes| Ok(sum.saturating_add(bytes?)))
}

impl Driver {
    fn create_array(&mut self, shape: Array3dDescriptor, levels: c_uint) -> Result<Handle, Code> {
        let context = crate::context::current()?;
        self.refuse_during_capture()?;
        let most = shape.width.max(shape.height).max(shape.depth).max(1).ilog2() + 1;
        let levels = levels.clamp(1, most);
        let bytes = all_bytes(&shape, levels)?;
        let (address, backing) = if shape.flags & (SPARSE | DEFERRED) == 0 {
            self.obtain(context.ordinal, bytes, Use::Array)?
        } else {
            (0, Backing::Nothing)
        };
        let handle = self.handle();
        let (ordinal, context) = (context.ordinal, self.owner(&context));
        let array = Array { shape, levels, ordinal, context, address, backing, part: false };
        self.objects.arrays.insert(handle, array);
        Ok(handle)
    }

    fn destroy_array(&mut self, handle: Handle) -> Result<(), Code> {
        let array =
            self.objects.arrays.get(&handle).copied().filter(|a| !a.part).ok_or(Code::INVALID_HANDLE)?;
        self.objects.arrays.remove(&handle);
        self.give_back(array.ordinal, array.address, array.backing);
        Ok(())
    }

    fn array(&self, handle: Handle) -> Result<&Array, Code> {
        self.objects.arrays.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    fn requirements(&self, out: Out<MemoryRequirements>, array: Handle) -> Result<(), Code> {
        let array = self.array(array)?;
        let bytes = all_bytes(&array.shape, array.levels)?;
        let size = usize::try_from(round_up(bytes, 64 << 10)).unwrap_or(usize::MAX);
        out.put(MemoryRequirements { size, alignment: 64 << 10, reserved: [0; 4] })
    }

    /// Gives back the arrays of a context.
    pub(crate) fn free_context_arrays(&mut self, context: Handle) {
        let left: Vec<(Handle, Array)> =
            self.objects.arrays.iter().filter(|(_, a)| a.context == context).map(|(h, a)| (*h, *a)).collect();
        for (handle, array) in left {
            self.objects.arrays.remove(&handle);
            if !array.part {
                self.give_back(array.ordinal, array.address, array.backing);
            }
        }
    }
}

fn flat(shape: &ArrayDescriptor) -> Array3dDescriptor {
    let ArrayDescriptor { width, height, format, channels } = *shape;
    Array3dDescriptor { width, height, depth: 0, format, channels, flags: 0 }
}

entry! {
    fn cuArrayCreate_v2(out: Out<Handle>, shape: Out<ArrayDescriptor>) |driver| {
        out.check()?;
        out.put(driver.create_array(flat(&shape.get()?), 1)?)
    }

    fn cuArray3DCreate_v2(out: Out<Handle>, shape: Out<Array3dDescriptor>) |driver| {
        out.check()?;
        out.put(driver.create_array(shape.get()?, 1)?)
    }

    fn cuArrayDestroy(array: Handle) |driver| {
        driver.destroy_array(array)
    }

    fn cuArrayGetDescriptor_v2(out: Out<ArrayDescriptor>, array: Handle) |driver| {
        let Array3dDescriptor { width, height, format, channels, .. } = driver.array(array)?.shape;
        out.put(ArrayDescriptor { width, height, format, channels })
    }

    fn cuArray3DGetDescriptor_v2(out: Out<Array3dDescriptor>, array: Handle) |driver| {
        out.put(driver.array(array)?.shape)
    }

    fn cuArrayGetMemoryRequirements(out: Out<MemoryRequirements>, array: Handle, _device: Device) |driver| {
        driver.requirements(out, array)
    }

    fn cuMipmappedArrayGetMemoryRequirements(out: Out<MemoryRequirements>, array: Handle, _device: Device) |driver| {
        driver.requirements(out, array)
    }

    fn cuMipmappedArrayCreate(out: Out<Handle>, shape: Out<Array3dDescriptor>, levels: c_uint) |driver| {
        out.check()?;
        out.put(driver.create_array(shape.get()?, levels)?)
    }

    fn cuMipmappedArrayGetLevel(out: Out<Handle>, mipmap: Handle, level: c_uint) |driver| {
        out.check()?;
        let mipmap = *driver.array(mipmap)?;
        if level >= mipmap.levels {
            return Err(Code::INVALID_VALUE);
        }
        let side = |s: usize| if s == 0 { 0 } else { (s >> level).max(1) };
        let Array3dDescriptor { width, height, depth, .. } = mipmap.shape;
        let shape = Array3dDescriptor { width: side(width), height: side(height), depth: side(depth), ..mipmap.shape };
        let handle = driver.handle();
        driver.objects.arrays.insert(handle, Array { shape, levels: 1, part: true, ..mipmap });
        out.put(handle)
    }

    fn cuMipmappedArrayDestroy(mipmap: Handle) |driver| {
        driver.destroy_array(mipmap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_as_large_as_their_tiles() {
        let shape = |width, height, depth, format, channels, flags| Array3dDescriptor {
            width,
            height,
            depth,
            format,
            channels,
            flags,
        };
        for (case, shape, levels, want) in [
            ("one line", shape(1, 0, 0, 0x20, 1, 0), 1, 512),
            ("whole tiles", shape(2048, 2048, 0, 0x03, 2, 0), 1, 2048 * 8 * 2048),
            ("odd sides", shape(17, 9, 0, 0x20, 1, 0), 1, 128 * 16),
            ("three planes", shape(16, 8, 3, 0x20, 1, 0), 1, 64 * 8 * 3),
            ("levels are halved", shape(16, 16, 0, 0x20, 1, 0), 2, 64 * 16 + 64 * 8),
            ("layers are not", shape(16, 8, 4, 0x20, 1, LAYERED), 2, 64 * 8 * 4 * 2),
        ] {
            assert_eq!(all_bytes(&shape, levels), Ok(want), "{case}");
        }
        assert_eq!(all_bytes(&shape(4, 4, 0, 0x77, 1, 0), 1), Err(Code::INVALID_VALUE), "unknown format");
        assert_eq!(all_bytes(&shape(4, 4, 0, 0x20, 7, 0), 1), Err(Code::INVALID_VALUE), "seven channels");
    }
}
