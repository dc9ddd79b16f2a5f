//! Copies and fills.
//!
//! Device addresses are addresses of this process, so a copy is a copy. All of them happen at the call: the device runs behind
//! on kernels' time only, which no program can tell from a device that was fast.
#![expect(unsafe_code, reason = "exports entry points under their C names and copies what the program names")]

use std::ffi::{c_uint, c_void};

use crate::abi::{Code, Copy2d, DevicePtr, Handle, Out, Side2d};
use crate::driver::Driver;
use crate::gate::streamed;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
enum End {
    Host(u64),
    Device(DevicePtr),
    /// Either, as the address tells.
    Any(DevicePtr),
}

impl Driver {
    /// The address to copy at; none when there is no memory behind it.
    fn end(&mut self, end: End, length: u64) -> Result<Option<usize>, Code> {
        let address = match end {
            End::Host(address) => address,
            End::Any(address) if self.containing(address).is_none() => address,
            End::Device(address) if self.objects.host_range(address).is_some() => address,
            End::Device(address) | End::Any(address) => {
                let (start, alloc) = self.containing(address).ok_or(Code::INVALID_VALUE)?;
                let inside = address.checked_add(length).is_some_and(|e| e <= start + alloc.size);
                if !inside {
                    return Err(Code::INVALID_VALUE);
                }
                if !self.space.holds(address, length) {
                    return Ok(None);
                }
                self.space.touch(address, length);
                address
            }
        };
        if address == 0 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(usize::try_from(address).ok())
    }

    fn copy(&mut self, to: End, from: End, length: usize) -> Result<(), Code> {
        crate::context::current()?;
        if length == 0 {
            return Ok(());
        }
        let (to, from) = (self.end(to, length as u64)?, self.end(from, length as u64)?);
        if let (Some(to), Some(from)) = (to, from) {
            let target: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
            let source: *const u8 = std::ptr::with_exposed_provenance(from);
            // SAFETY: device ranges lie in live allocations; for host ranges the program vouches. They may overlap.
            unsafe { target.copy_from(source, length) };
        }
        Ok(())
    }

    fn copy_on(&mut self, to: End, from: End, length: usize, stream: Handle) -> Result<(), Code> {
        match self.target(stream)?.capture {
            Some(capture) => self.capture_copy(capture),
            None => self.copy(to, from, length),
        }
    }

    fn fill(&mut self, at: DevicePtr, value: &[u8], count: usize) -> Result<(), Code> {
        crate::context::current()?;
        if !at.is_multiple_of(value.len() as u64) {
            return Err(Code::INVALID_VALUE);
        }
        let length = count.checked_mul(value.len()).ok_or(Code::INVALID_VALUE)?;
        if length == 0 {
            return Ok(());
        }
        let Some(start) = self.end(End::Device(at), length as u64)? else { return Ok(()) };
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(start);
        for (offset, byte) in value.iter().cycle().take(length).enumerate() {
            let place = target.wrapping_add(offset);
            // SAFETY: within a live allocation, as `end` checked.
            unsafe { place.write(*byte) };
        }
        Ok(())
    }

    fn fill_rows(
        &mut self,
        at: DevicePtr,
        pitch: usize,
        value: &[u8],
        width: usize,
        height: usize,
    ) -> Result<(), Code> {
        for row in 0..height {
            self.fill(at + (row * pitch) as u64, value, width)?;
        }
        Ok(())
    }

    fn fill_on(&mut self, at: DevicePtr, value: &[u8], count: usize, stream: Handle) -> Result<(), Code> {
        match self.target(stream)?.capture {
            Some(capture) => self.capture_copy(capture),
            None => self.fill(at, value, count),
        }
    }

    fn copy_2d(&mut self, copy: &Copy2d) -> Result<(), Code> {
        crate::context::current()?;
        let end = |side: &Side2d, row: usize| {
            let offset = (side.x + (side.y + row) * side.pitch) as u64;
            // 1 host, 2 device, 3 array, 4 unified.
            match side.kind {
                1 => Ok(Some(End::Host(side.host + offset))),
                2 => Ok(Some(End::Device(side.device + offset))),
                3 => Ok(None),
                4 => Ok(Some(End::Any(side.device + offset))),
                _ => Err(Code::INVALID_VALUE),
            }
        };
        for row in 0..copy.height {
            // The content of arrays is not kept.
            if let (Some(to), Some(from)) = (end(&copy.target, row)?, end(&copy.source, row)?) {
                self.copy(to, from, copy.width)?;
            }
        }
        Ok(())
    }
}

/// A host pointer as an address.
fn host(pointer: *const c_void) -> End {
    End::Host(pointer.expose_provenance() as u64)
}

streamed! {
    fn cuMemcpy / cuMemcpy_ptds(to: DevicePtr, from: DevicePtr, length: usize) |driver, _| {
        driver.copy(End::Any(to), End::Any(from), length)
    }

    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds(to: DevicePtr, from: *const c_void, length: usize) |driver, _| {
        driver.copy(End::Device(to), host(from), length)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds(to: *mut c_void, from: DevicePtr, length: usize) |driver, _| {
        driver.copy(host(to), End::Device(from), length)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds(to: DevicePtr, from: DevicePtr, length: usize) |driver, _| {
        driver.copy(End::Device(to), End::Device(from), length)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds(
        to: DevicePtr, _to_context: Handle, from: DevicePtr, _from_context: Handle, length: usize,
    ) |driver, _| {
        driver.copy(End::Device(to), End::Device(from), length)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz(to: DevicePtr, from: DevicePtr, length: usize, stream: Handle) |driver, _| {
        driver.copy_on(End::Any(to), End::Any(from), length, stream)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz(
        to: DevicePtr, from: *const c_void, length: usize, stream: Handle,
    ) |driver, _| {
        driver.copy_on(End::Device(to), host(from), length, stream)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz(
        to: *mut c_void, from: DevicePtr, length: usize, stream: Handle,
    ) |driver, _| {
        driver.copy_on(host(to), End::Device(from), length, stream)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz(
        to: DevicePtr, from: DevicePtr, length: usize, stream: Handle,
    ) |driver, _| {
        driver.copy_on(End::Device(to), End::Device(from), length, stream)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz(
        to: DevicePtr, _to_context: Handle, from: DevicePtr, _from_context: Handle, length: usize, stream: Handle,
    ) |driver, _| {
        driver.copy_on(End::Device(to), End::Device(from), length, stream)
    }

    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds(copy: Out<Copy2d>) |driver, _| {
        driver.copy_2d(&copy.get()?)
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds(copy: Out<Copy2d>) |driver, _| {
        driver.copy_2d(&copy.get()?)
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz(copy: Out<Copy2d>, stream: Handle) |driver, _| {
        match driver.target(stream)?.capture {
            Some(capture) => driver.capture_copy(capture),
            None => driver.copy_2d(&copy.get()?),
        }
    }

    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds(at: DevicePtr, value: u8, count: usize) |driver, _| {
        driver.fill(at, &[value], count)
    }

    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds(at: DevicePtr, value: u16, count: usize) |driver, _| {
        driver.fill(at, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds(at: DevicePtr, value: c_uint, count: usize) |driver, _| {
        driver.fill(at, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds(
        at: DevicePtr, pitch: usize, value: u8, width: usize, height: usize,
    ) |driver, _| {
        driver.fill_rows(at, pitch, &[value], width, height)
    }

    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds(
        at: DevicePtr, pitch: usize, value: u16, width: usize, height: usize,
    ) |driver, _| {
        driver.fill_rows(at, pitch, &value.to_ne_bytes(), width, height)
    }

    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds(
        at: DevicePtr, pitch: usize, value: c_uint, width: usize, height: usize,
    ) |driver, _| {
        driver.fill_rows(at, pitch, &value.to_ne_bytes(), width, height)
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz(at: DevicePtr, value: u8, count: usize, stream: Handle) |driver, _| {
        driver.fill_on(at, &[value], count, stream)
    }

    fn cuMemsetD16Async / cuMemsetD16Async_ptsz(at: DevicePtr, value: u16, count: usize, stream: Handle) |driver, _| {
        driver.fill_on(at, &value.to_ne_bytes(), count, stream)
    }

    fn cuMemsetD32Async / cuMemsetD32Async_ptsz(at: DevicePtr, value: c_uint, count: usize, stream: Handle) |driver, _| {
        driver.fill_on(at, &value.to_ne_bytes(), count, stream)
    }
}
