//! Virtual memory calls: reserved addresses, physical handles, mappings; multicast objects.
//!
//! A handle takes its size of the card of its location, in multiples of 2 MiB, and gives it back when it is released and
//! nowhere mapped any more. Imported handles and multicast objects take nothing.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::{AllocationProp, Code, Device, DevicePtr, Handle, Location, MulticastProp, Opaque, Out};
use crate::driver::Driver;
use crate::gate::{entry, streamed};
use crate::memory::{Backing, Kind};
use crate::space::BLOCK;

/// Recommended granularity of multicast objects (`CU_MULTICAST_RECOMMENDED_GRANULARITY` on Hopper).
const MULTICAST_STEP: usize = 512 << 20;

/// Physical memory behind a handle.
#[derive(Clone, Debug)]
pub(crate) struct Physical {
    size: u64,
    prop: Option<AllocationProp>,
    /// None for the host's memory, somebody else's, and multicast objects.
    charged: Option<usize>,
    ordinal: usize,
    /// Creations, retains and imports that were not released.
    users: u32,
    mapped: u32,
    multicast: bool,
}

/// A mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    size: u64,
    handle: Handle,
}

impl Driver {
    fn physical(&mut self, handle: Handle) -> Result<&mut Physical, Code> {
        self.objects.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)
    }

    fn add_physical(&mut self, physical: Physical) -> Handle {
        let handle = self.handle();
        self.objects.physical.insert(handle, physical);
        handle
    }

    fn create_physical(&mut self, size: u64, prop: AllocationProp) -> Result<Handle, Code> {
        if prop.kind != 1 || size == 0 || !size.is_multiple_of(BLOCK) {
            return Err(Code::INVALID_VALUE);
        }
        let charged = self.located(prop.location)?;
        if let Some(ordinal) = charged {
            self.charge(ordinal, size)?;
        }
        let ordinal = charged.unwrap_or(0);
        Ok(self.add_physical(Physical {
            size,
            prop: Some(prop),
            charged,
            ordinal,
            users: 1,
            mapped: 0,
            multicast: false,
        }))
    }

    /// Lets a handle go when nothing holds it any more.
    fn settle(&mut self, handle: Handle) -> Result<(), Code> {
        let physical = self.physical(handle)?.clone();
        if physical.users == 0 && physical.mapped == 0 {
            self.objects.physical.remove(&handle);
            if let Some(ordinal) = physical.charged {
                self.uncharge(ordinal, physical.size);
            }
        }
        Ok(())
    }

    /// The reserved range around an address.
    fn reserved(&self, address: DevicePtr, size: u64) -> Option<DevicePtr> {
        let (start, alloc) = self.objects.reserved.range(..=address).next_back()?;
        (address + size <= start + alloc).then_some(*start)
    }

    fn map_physical(
        &mut self,
        address: DevicePtr,
        size: u64,
        offset: u64,
        handle: Handle,
    ) -> Result<(), Code> {
        let whole = address.is_multiple_of(BLOCK) && size.is_multiple_of(BLOCK) && size > 0;
        if !whole || self.reserved(address, size).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        let taken = self
            .objects
            .mappings
            .range(..address + size)
            .next_back()
            .is_some_and(|(s, m)| s + m.size > address);
        let physical = self.physical(handle)?;
        if taken || offset != 0 || size > physical.size {
            return Err(Code::INVALID_VALUE);
        }
        physical.mapped += 1;
        let ordinal = physical.ordinal;
        self.objects.mappings.insert(address, Mapping { size, handle });
        self.record(address, size, Backing::Nothing, ordinal, None, Kind::Reserved);
        Ok(())
    }

    /// Unmaps every mapping in the range, which has to consist of whole ones.
    fn unmap_physical(&mut self, address: DevicePtr, size: u64) -> Result<(), Code> {
        let inside: Vec<(DevicePtr, Mapping)> = self
            .objects
            .mappings
            .range(address..address.saturating_add(size))
            .map(|(a, m)| (*a, *m))
            .collect();
        let covered: u64 = inside.iter().map(|(_, m)| m.size).sum();
        if inside.is_empty() || covered != size {
            return Err(Code::INVALID_VALUE);
        }
        for (start, mapping) in inside {
            self.objects.mappings.remove(&start);
            self.allocs.remove(&start);
            if let Ok(physical) = self.physical(mapping.handle) {
                physical.mapped = physical.mapped.saturating_sub(1);
                self.settle(mapping.handle)?;
            }
        }
        Ok(())
    }

    fn multicast(&mut self, handle: Handle) -> Result<(), Code> {
        if self.physical(handle)?.multicast { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn bind(&mut self, multicast: Handle, memory: Option<Handle>) -> Result<(), Code> {
        self.multicast(multicast)?;
        memory.map_or(Ok(()), |m| self.physical(m).map(|_| ()))
    }
}

entry! {
    fn cuMemAddressReserve(
        out: Out<DevicePtr>, size: usize, alignment: usize, _wanted: DevicePtr, _flags: u64,
    ) |driver| {
        out.check()?;
        let size = size as u64;
        if size == 0 || !size.is_multiple_of(BLOCK) || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(Code::INVALID_VALUE);
        }
        let address = driver.space.take(size, (alignment as u64).max(BLOCK))?;
        driver.objects.reserved.insert(address, size);
        out.put(address)
    }

    fn cuMemAddressFree(address: DevicePtr, size: usize) |driver| {
        let mapped = driver.objects.mappings.range(address..address.saturating_add(size as u64)).next().is_some();
        if mapped || driver.objects.reserved.get(&address) != Some(&(size as u64)) {
            return Err(Code::INVALID_VALUE);
        }
        driver.objects.reserved.remove(&address);
        driver.space.give(address, size as u64);
        Ok(())
    }

    fn cuMemCreate(out: Out<Handle>, size: usize, prop: Out<AllocationProp>, flags: u64) |driver| {
        out.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let prop = prop.get()?;
        out.put(driver.create_physical(size as u64, prop)?)
    }

    fn cuMemRelease(handle: Handle) |driver| {
        let physical = driver.physical(handle)?;
        physical.users = physical.users.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        driver.settle(handle)
    }

    fn cuMemMap(address: DevicePtr, size: usize, offset: usize, handle: Handle, flags: u64) |driver| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        driver.map_physical(address, size as u64, offset as u64, handle)
    }

    fn cuMemUnmap(address: DevicePtr, size: usize) |driver| {
        driver.unmap_physical(address, size as u64)
    }

    fn cuMemSetAccess(address: DevicePtr, size: usize, _access: Opaque, _count: usize) |driver| {
        let known = driver.reserved(address, size as u64).is_some() || driver.containing(address).is_some();
        if known { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuMemGetAccess(flags: Out<u64>, _location: Out<Location>, address: DevicePtr) |driver| {
        driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        flags.put(3)
    }

    fn cuMemGetAllocationGranularity(granularity: Out<usize>, prop: Out<AllocationProp>, _option: c_uint) |driver| {
        let prop = prop.get()?;
        driver.located(prop.location)?;
        granularity.put(usize::try_from(BLOCK).unwrap_or(usize::MAX))
    }

    fn cuMemGetAllocationPropertiesFromHandle(out: Out<AllocationProp>, handle: Handle) |driver| {
        let prop = driver.physical(handle)?.prop.ok_or(Code::INVALID_VALUE)?;
        out.put(prop)
    }

    fn cuMemRetainAllocationHandle(out: Out<Handle>, address: DevicePtr) |driver| {
        out.check()?;
        let (start, mapping) = driver.objects.mappings.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        let (inside, handle) = (address < start + mapping.size, mapping.handle);
        if !inside {
            return Err(Code::INVALID_VALUE);
        }
        driver.physical(handle)?.users += 1;
        out.put(handle)
    }

    fn cuMemExportToShareableHandle(out: Opaque, handle: Handle, kind: c_uint, _flags: u64) |driver| {
        let physical = driver.physical(handle)?;
        let card = if physical.prop.is_some_and(|p| p.location.kind != 1) { None } else { Some(physical.ordinal) };
        crate::share::export(out, kind, card, physical.size)
    }

    fn cuMemImportFromShareableHandle(out: Out<Handle>, handle: Opaque, kind: c_uint) |driver| {
        out.check()?;
        let shared = crate::share::import(handle, kind)?;
        let ordinal = shared.card.unwrap_or(0).min(driver.cards.len() - 1);
        out.put(driver.add_physical(Physical {
            size: shared.size,
            prop: None,
            charged: None,
            ordinal,
            users: 1,
            mapped: 0,
            multicast: false,
        }))
    }

    fn cuMulticastCreate(out: Out<Handle>, prop: Out<MulticastProp>) |driver| {
        out.check()?;
        let prop = prop.get()?;
        let devices = usize::try_from(prop.devices).unwrap_or(0);
        if devices == 0 || devices > driver.cards.len() || !(prop.size as u64).is_multiple_of(BLOCK) {
            return Err(Code::INVALID_VALUE);
        }
        out.put(driver.add_physical(Physical {
            size: prop.size as u64,
            prop: None,
            charged: None,
            ordinal: 0,
            users: 1,
            mapped: 0,
            multicast: true,
        }))
    }

    fn cuMulticastAddDevice(multicast: Handle, device: Device) |driver| {
        driver.ordinal(device)?;
        driver.multicast(multicast)
    }

    fn cuMulticastBindMem(
        multicast: Handle, _offset: usize, memory: Handle, _memory_offset: usize, _size: usize, _flags: u64,
    ) |driver| {
        driver.bind(multicast, Some(memory))
    }

    fn cuMulticastBindMem_v2(
        multicast: Handle, _device: Device, _offset: usize, memory: Handle, _memory_offset: usize, _size: usize,
        _flags: u64,
    ) |driver| {
        driver.bind(multicast, Some(memory))
    }

    fn cuMulticastBindAddr(multicast: Handle, _offset: usize, address: DevicePtr, _size: usize, _flags: u64) |driver| {
        driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        driver.bind(multicast, None)
    }

    fn cuMulticastBindAddr_v2(
        multicast: Handle, _device: Device, _offset: usize, address: DevicePtr, _size: usize, _flags: u64,
    ) |driver| {
        driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        driver.bind(multicast, None)
    }

    fn cuMulticastUnbind(multicast: Handle, _device: Device, _offset: usize, _size: usize) |driver| {
        driver.multicast(multicast)
    }

    fn cuMulticastGetGranularity(granularity: Out<usize>, _prop: Out<MulticastProp>, option: c_uint) |_| {
        let least = usize::try_from(BLOCK).unwrap_or(usize::MAX);
        granularity.put(if option == 0 { least } else { MULTICAST_STEP })
    }
}

streamed! {
    // Tiles of sparse arrays: their memory is the handles'.
    fn cuMemMapArrayAsync / cuMemMapArrayAsync_ptsz(_list: Opaque, _count: c_uint, stream: Handle) |driver, _| {
        driver.target(stream).map(|_| ())
    }

    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz(
        address: DevicePtr, size: usize, device: c_int, stream: Handle,
    ) |driver, _| {
        driver.target(stream)?;
        let to = Location { kind: if device < 0 { 2 } else { 1 }, id: device };
        crate::memory::managed(driver, address, size, to)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz(
        address: DevicePtr, size: usize, to: Location, _flags: c_uint, stream: Handle,
    ) |driver, _| {
        driver.target(stream)?;
        crate::memory::managed(driver, address, size, to)
    }
}
