//! Stream-ordered memory and its pools.
//!
//! A pool takes memory of its card in chunks of 32 MiB (the step in which `RESERVED_MEM_CURRENT` of a driver's default pool grows) and
//! gives it back, beyond its release threshold, when the program synchronises, trims or destroys it. Fragmentation is not simulated:
//! an allocation fits when used and request, in units of 512 bytes, fit in what is reserved. An allocation or free happens at
//! the call, not in stream order.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::{Bytes64, Code, Device, DevicePtr, Handle, Location, ON_DEVICE, Opaque, Out, PoolProps};
use crate::driver::Driver;
use crate::gate::{entry, streamed};
use crate::memory::{Backing, Kind};
use crate::space::{BLOCK, UNIT, round_up};

/// What a pool takes of its card at a time.
const CHUNK: u64 = 32 << 20;

/// `CU_MEMPOOL_ATTR_*`.
const RELEASE_THRESHOLD: c_uint = 4;
const RESERVED_CURRENT: c_uint = 5;
const RESERVED_HIGH: c_uint = 6;
const USED_CURRENT: c_uint = 7;
const USED_HIGH: c_uint = 8;

/// A memory pool.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// None where its memory is the host's.
    ordinal: Option<usize>,
    /// Of another process: nothing of it is charged here.
    imported: bool,
    /// Destroyed while allocations live: goes with the last of them.
    destroyed: bool,
    allocations: u64,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
    /// 0 is no limit.
    most: u64,
    reuse: [c_int; 3],
}

impl Pool {
    fn new(ordinal: Option<usize>, most: u64, imported: bool) -> Self {
        Self {
            ordinal,
            imported,
            destroyed: false,
            allocations: 0,
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            threshold: 0,
            most,
            reuse: [1; 3],
        }
    }
}

/// A card's pools.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CardPools {
    default: Option<Handle>,
    current: Option<Handle>,
}

impl Driver {
    fn default_pool(&mut self, ordinal: usize) -> Handle {
        if let Some(pool) = self.objects.card_pools.get(&ordinal).and_then(|p| p.default) {
            return pool;
        }
        let handle = self.handle();
        self.objects.pools.insert(handle, Pool::new(Some(ordinal), 0, false));
        self.objects.card_pools.entry(ordinal).or_default().default = Some(handle);
        handle
    }

    fn current_pool(&mut self, ordinal: usize) -> Handle {
        let set = self.objects.card_pools.get(&ordinal).and_then(|p| p.current);
        set.unwrap_or_else(|| self.default_pool(ordinal))
    }

    fn pool(&self, pool: Handle) -> Result<&Pool, Code> {
        self.objects.pools.get(&pool).ok_or(Code::INVALID_VALUE)
    }

    fn pool_mut(&mut self, pool: Handle) -> Result<&mut Pool, Code> {
        self.objects.pools.get_mut(&pool).ok_or(Code::INVALID_VALUE)
    }

    fn set_reserved(&mut self, handle: Handle, reserved: u64) -> Result<(), Code> {
        let pool = self.pool(handle)?.clone();
        if let Some(ordinal) = pool.ordinal.filter(|_| !pool.imported) {
            self.charge(ordinal, reserved.saturating_sub(pool.reserved))?;
            self.uncharge(ordinal, pool.reserved.saturating_sub(reserved));
        }
        let pool = self.pool_mut(handle)?;
        pool.reserved = reserved;
        pool.reserved_high = pool.reserved_high.max(reserved);
        Ok(())
    }

    fn allocate_pooled(&mut self, handle: Handle, size: u64) -> Result<DevicePtr, Code> {
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let pool = self.pool(handle)?.clone();
        if pool.destroyed || pool.imported {
            return Err(Code::INVALID_VALUE);
        }
        let used = pool.used.saturating_add(round_up(size, UNIT));
        if used > pool.reserved {
            let reserved = round_up(used, CHUNK);
            if pool.most != 0 && reserved > round_up(pool.most, CHUNK) {
                return Err(Code::OUT_OF_MEMORY);
            }
            self.set_reserved(handle, reserved)?;
        }
        let length = round_up(size, BLOCK);
        let address = self.space.take(length, BLOCK)?;
        let pool = self.pool_mut(handle)?;
        pool.used = used;
        pool.used_high = pool.used_high.max(used);
        pool.allocations += 1;
        let ordinal = pool.ordinal.unwrap_or(0);
        self.record(address, size, Backing::Addresses(length), ordinal, None, Kind::Pooled(handle));
        Ok(address)
    }

    /// Puts an allocation back into its pool.
    pub(crate) fn free_pooled(&mut self, address: DevicePtr, handle: Handle) -> Result<(), Code> {
        let alloc = self.allocs.remove(&address).ok_or(Code::INVALID_VALUE)?;
        self.give_back(alloc.ordinal, address, alloc.backing);
        let pool = self.pool_mut(handle)?;
        pool.allocations = pool.allocations.saturating_sub(1);
        if !pool.imported {
            pool.used = pool.used.saturating_sub(round_up(alloc.size, UNIT));
        }
        if pool.destroyed && pool.allocations == 0 {
            self.set_reserved(handle, 0)?;
            self.objects.pools.remove(&handle);
        }
        Ok(())
    }

    fn trim(&mut self, handle: Handle, keep: u64) -> Result<(), Code> {
        let pool = self.pool(handle)?;
        let wanted = round_up(pool.used, CHUNK).max(round_up(keep, CHUNK));
        let reserved = wanted.min(pool.reserved);
        self.set_reserved(handle, reserved)
    }

    /// What a synchronisation lets pools give back.
    pub(crate) fn synchronised(&mut self) {
        let all: Vec<(Handle, u64)> = self.objects.pools.iter().map(|(h, p)| (*h, p.threshold)).collect();
        for (pool, threshold) in all {
            // Giving back cannot fail, and the pool is in the table.
            let _ = self.trim(pool, threshold / CHUNK * CHUNK);
        }
    }

    fn pool_of(
        &mut self,
        stream: Handle,
        pool: Option<Handle>,
    ) -> Result<(Handle, Option<u64>, usize), Code> {
        let target = self.target(stream)?;
        let handle = pool.unwrap_or_else(|| self.current_pool(target.ordinal));
        self.pool(handle)?;
        Ok((handle, target.capture, target.ordinal))
    }

    fn allocate_async(
        &mut self,
        out: Out<DevicePtr>,
        size: usize,
        pool: Option<Handle>,
        stream: Handle,
    ) -> Result<(), Code> {
        out.check()?;
        let (pool, capture, ordinal) = self.pool_of(stream, pool)?;
        let address = match capture {
            Some(capture) => self.capture_alloc(capture, ordinal, size as u64)?,
            None => self.allocate_pooled(pool, size as u64)?,
        };
        out.put(address)
    }

    fn free_async(&mut self, address: DevicePtr, stream: Handle) -> Result<(), Code> {
        let target = self.target(stream)?;
        match target.capture {
            Some(capture) => self.capture_free(capture, address),
            None => self.free_address(address),
        }
    }

    fn create_pool(&mut self, out: Out<Handle>, props: Out<PoolProps>) -> Result<(), Code> {
        out.check()?;
        let props = props.get()?;
        // 1 pinned, 2 managed (13.0).
        if !matches!(props.kind, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        let ordinal = self.located(props.location)?;
        let handle = self.handle();
        self.objects.pools.insert(handle, Pool::new(ordinal, props.max_size as u64, false));
        out.put(handle)
    }

    fn destroy_pool(&mut self, handle: Handle) -> Result<(), Code> {
        if self.objects.card_pools.values().any(|p| p.default == Some(handle)) {
            return Err(Code::INVALID_VALUE);
        }
        self.pool(handle)?;
        for pools in self.objects.card_pools.values_mut() {
            pools.current = pools.current.filter(|c| *c != handle);
        }
        self.trim(handle, 0)?;
        let pool = self.pool_mut(handle)?;
        pool.destroyed = true;
        if pool.allocations == 0 {
            self.set_reserved(handle, 0)?;
            self.objects.pools.remove(&handle);
        }
        Ok(())
    }

    /// The card of a location; none for the host's kinds.
    pub(crate) fn located(&self, location: Location) -> Result<Option<usize>, Code> {
        match location.kind {
            ON_DEVICE => self.ordinal(location.id).map(Some),
            2..=4 => Ok(None),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn set_current(&mut self, ordinal: usize, pool: Handle) -> Result<(), Code> {
        let owner = self.pool(pool)?.ordinal;
        if owner != Some(ordinal) {
            return Err(Code::INVALID_VALUE);
        }
        self.objects.card_pools.entry(ordinal).or_default().current = Some(pool);
        Ok(())
    }

    fn pool_at(&mut self, location: Out<Location>, current: bool) -> Result<Handle, Code> {
        let ordinal = self.located(location.get()?)?.ok_or(Code::NOT_SUPPORTED)?;
        Ok(if current { self.current_pool(ordinal) } else { self.default_pool(ordinal) })
    }
}

streamed! {
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz(out: Out<DevicePtr>, size: usize, stream: Handle) |driver, _| {
        driver.allocate_async(out, size, None, stream)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz(
        out: Out<DevicePtr>, size: usize, pool: Handle, stream: Handle,
    ) |driver, _| {
        driver.allocate_async(out, size, Some(pool), stream)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz(address: DevicePtr, stream: Handle) |driver, _| {
        driver.free_async(address, stream)
    }
}

entry! {
    fn cuMemPoolCreate(out: Out<Handle>, props: Out<PoolProps>) |driver| {
        driver.create_pool(out, props)
    }

    fn cuMemPoolDestroy(pool: Handle) |driver| {
        driver.destroy_pool(pool)
    }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) |driver| {
        driver.trim(pool, keep as u64)
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_uint, value: Opaque) |driver| {
        let pool = driver.pool(pool)?;
        match attribute {
            1..=3 => value.cast().put(pool.reuse[attribute as usize - 1]),
            RELEASE_THRESHOLD => value.cast().put(pool.threshold),
            RESERVED_CURRENT => value.cast().put(pool.reserved),
            RESERVED_HIGH => value.cast().put(pool.reserved_high),
            USED_CURRENT => value.cast().put(pool.used),
            USED_HIGH => value.cast().put(pool.used_high),
            // 9 to 11 (13.0): allocation type, export handle types, location's kind.
            9 | 10 => value.cast().put(1_i32),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_uint, value: Opaque) |driver| {
        let pool = driver.pool_mut(pool)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = value.cast().get()?,
            RELEASE_THRESHOLD => pool.threshold = value.cast().get()?,
            // The marks can be reset to the present.
            RESERVED_HIGH if value.cast::<u64>().get()? == 0 => pool.reserved_high = pool.reserved,
            USED_HIGH if value.cast::<u64>().get()? == 0 => pool.used_high = pool.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolSetAccess(pool: Handle, _map: Opaque, _count: usize) |driver| {
        driver.pool(pool).map(|_| ())
    }

    fn cuMemPoolGetAccess(flags: Out<c_uint>, pool: Handle, _location: Opaque) |driver| {
        driver.pool(pool)?;
        flags.put(3)
    }

    fn cuDeviceGetDefaultMemPool(out: Out<Handle>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        out.put(driver.default_pool(ordinal))
    }

    fn cuDeviceGetMemPool(out: Out<Handle>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        out.put(driver.current_pool(ordinal))
    }

    fn cuDeviceSetMemPool(device: Device, pool: Handle) |driver| {
        let ordinal = driver.ordinal(device)?;
        driver.set_current(ordinal, pool)
    }

    fn cuMemGetDefaultMemPool(out: Out<Handle>, location: Out<Location>, _kind: c_uint) |driver| {
        out.put(driver.pool_at(location, false)?)
    }

    fn cuMemGetMemPool(out: Out<Handle>, location: Out<Location>, _kind: c_uint) |driver| {
        out.put(driver.pool_at(location, true)?)
    }

    fn cuMemSetMemPool(location: Out<Location>, _kind: c_uint, pool: Handle) |driver| {
        let ordinal = driver.located(location.get()?)?.ok_or(Code::NOT_SUPPORTED)?;
        driver.set_current(ordinal, pool)
    }

    fn cuMemPoolExportToShareableHandle(out: Opaque, pool: Handle, kind: c_uint, _flags: u64) |driver| {
        let ordinal = driver.pool(pool)?.ordinal;
        crate::share::export(out, kind, ordinal, 0)
    }

    fn cuMemPoolImportFromShareableHandle(out: Out<Handle>, handle: Opaque, kind: c_uint, _flags: u64) |driver| {
        out.check()?;
        let shared = crate::share::import(handle, kind)?;
        let handle = driver.handle();
        driver.objects.pools.insert(handle, Pool::new(shared.card, 0, true));
        out.put(handle)
    }

    fn cuMemPoolExportPointer(data: Out<Bytes64>, address: DevicePtr) |driver| {
        let alloc = driver.allocs.get(&address).ok_or(Code::INVALID_VALUE)?;
        match alloc.kind {
            Kind::Pooled(_) => data.put(crate::share::words(&[address, alloc.size])),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuMemPoolImportPointer(out: Out<DevicePtr>, pool: Handle, data: Out<Bytes64>) |driver| {
        out.check()?;
        let [_, size] = crate::share::read_words(&data.get()?);
        let known = driver.pool_mut(pool)?;
        if !known.imported || size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        known.allocations += 1;
        let ordinal = known.ordinal.unwrap_or(0);
        let length = round_up(size, BLOCK);
        let address = driver.space.take(length, BLOCK)?;
        driver.record(address, size, Backing::Addresses(length), ordinal, None, Kind::Pooled(pool));
        out.put(address)
    }
}
