//! Plain, pitched, managed and host memory, and what a program can ask about addresses.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Code, DevicePtr, Handle, Location, ON_DEVICE, Opaque, Out};
use crate::context::current;
use crate::driver::Driver;
use crate::gate::{self, entry, hot};
use crate::space::{BLOCK, LARGEST_PIECE, UNIT, Use, round_up};
use crate::stub;

/// Row alignment of pitched memory. `CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` is 32, yet the driver answers multiples of 512.
const PITCH: u64 = 512;

/// Page size of host memory.
const PAGE: u64 = 4096;

/// What an address range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`, `cuMemAllocPitch`.
    Plain,
    /// `cuMemAllocManaged`.
    Managed,
    /// Out of a memory pool.
    Pooled(Handle),
    /// Of a memory allocation node; its graph decides when there is memory behind it.
    Graph,
    /// A reserved range of the virtual memory calls.
    Reserved,
    /// Another process's memory, opened by its IPC handle.
    Opened,
    /// A buffer of imported external memory.
    External,
}

/// What the card gave for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Blocks of its own.
    Blocks(u64),
    /// A piece of a block that is shared with others of the same use.
    Piece(u64, Use),
    /// Addresses alone.
    Addresses(u64),
    /// Not even those.
    Nothing,
}

/// An address range in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alloc {
    /// As asked for.
    pub(crate) size: u64,
    pub(crate) backing: Backing,
    pub(crate) ordinal: usize,
    /// Goes with this context; none for what belongs to the process.
    pub(crate) context: Option<Handle>,
    pub(crate) kind: Kind,
    /// Grows by one per allocation (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub(crate) id: u64,
}

impl Driver {
    /// Memory in the calling thread's context.
    pub(crate) fn allocate(&mut self, size: u64, kind: Kind) -> Result<DevicePtr, Code> {
        let context = crate::context::current()?;
        self.refuse_during_capture()?;
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (address, backing) = self.obtain(context.ordinal, size, Use::Linear)?;
        self.record(address, size, backing, context.ordinal, Some(self.owner(&context)), kind);
        Ok(address)
    }

    pub(crate) fn record(
        &mut self,
        address: DevicePtr,
        size: u64,
        backing: Backing,
        ordinal: usize,
        context: Option<Handle>,
        kind: Kind,
    ) {
        let id = self.handle().0 as u64;
        self.allocs.insert(address, Alloc { size, backing, ordinal, context, kind, id });
    }

    /// `cuMemFree`: any device memory that has an address of its own; null is nothing.
    pub(crate) fn free_address(&mut self, address: DevicePtr) -> Result<(), Code> {
        if address == 0 {
            return Ok(());
        }
        let Some(alloc) = self.allocs.get(&address).copied() else { return Err(Code::INVALID_VALUE) };
        match alloc.kind {
            Kind::Plain | Kind::Managed | Kind::External => {
                self.allocs.remove(&address);
                self.give_back(alloc.ordinal, address, alloc.backing);
                Ok(())
            }
            Kind::Pooled(pool) => self.free_pooled(address, pool),
            Kind::Graph => self.free_graph_address(address),
            Kind::Reserved | Kind::Opened => Err(Code::INVALID_VALUE),
        }
    }

    /// Frees what a context leaves behind.
    pub(crate) fn free_context_memory(&mut self, context: Handle) {
        let left: Vec<(DevicePtr, Alloc)> =
            self.allocs.iter().filter(|(_, a)| a.context == Some(context)).map(|(p, a)| (*p, *a)).collect();
        for (address, alloc) in left {
            self.allocs.remove(&address);
            self.give_back(alloc.ordinal, address, alloc.backing);
        }
    }

    fn pointer_attribute(&self, attribute: c_uint, address: DevicePtr) -> Result<Attribute, Code> {
        if let Some((start, alloc)) = self.containing(address) {
            let managed = alloc.kind == Kind::Managed;
            return Ok(match attribute {
                1 => Attribute::Word(alloc.context.map_or(0, |c| c.0 as u64)),
                2 => Attribute::Int(2),
                3 => Attribute::Word(address),
                4 if managed => Attribute::Word(address),
                6 | 21 => Attribute::Int(0),
                7 | 20 => Attribute::Word(alloc.id),
                8 => Attribute::Int(managed.into()),
                9 => Attribute::Int(c_int::try_from(alloc.ordinal).unwrap_or(0)),
                10 => Attribute::Int((alloc.kind == Kind::Plain).into()),
                11 | 19 => Attribute::Word(start),
                12 | 18 => Attribute::Word(alloc.size),
                13 | 15 => Attribute::Int(1),
                14 => Attribute::Word(0),
                16 => Attribute::Int(3),
                17 => Attribute::Word(if let Kind::Pooled(pool) = alloc.kind { pool.0 as u64 } else { 0 }),
                _ => return Err(Code::INVALID_VALUE),
            });
        }
        let (start, size) = self.objects.host_range(address).ok_or(Code::INVALID_VALUE)?;
        Ok(match attribute {
            1 => Attribute::Word(0),
            2 | 13 => Attribute::Int(1),
            3 | 4 => Attribute::Word(address),
            11 => Attribute::Word(start),
            12 => Attribute::Word(size),
            6 | 8..=10 | 15 => Attribute::Int(0),
            16 => Attribute::Int(3),
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

/// A pointer attribute of either width.
#[derive(Clone, Copy, Debug)]
enum Attribute {
    Int(c_int),
    Word(u64),
}

impl Attribute {
    fn put(self, out: Opaque) -> Result<(), Code> {
        match self {
            Self::Int(value) => out.cast().put(value),
            Self::Word(value) => out.cast().put(value),
        }
    }

    /// What `cuPointerGetAttributes` writes for an address it does not know.
    fn nothing(attribute: c_uint) -> Self {
        if matches!(attribute, 2 | 6 | 8 | 10 | 13 | 15 | 16) {
            Self::Int(0)
        } else if attribute == 9 {
            Self::Int(-2)
        } else {
            Self::Word(0)
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: DevicePtr) -> c_int {
    if gate::stub()
        && let Some(code) = stub::free(address)
    {
        return code;
    }
    gate::open(&crate::table::site::cuMemFree_v2, || {
        wait_for_users(address);
        gate::driver().as_mut().map_or(Err(Code::NOT_INITIALIZED), |driver| driver.free_address(address))
    })
}

/// Freeing waits for the kernels that may still use it; other threads can call meanwhile.
fn wait_for_users(address: DevicePtr) {
    let found = gate::driver().as_ref().and_then(|driver| {
        let alloc = driver.allocs.get(&address)?;
        let card = driver.cards[alloc.ordinal].index;
        Some((driver.live, card, driver.live.mark(card)))
    });
    if let Some((live, card, mark)) = found {
        live.wait(card, mark);
    }
}

hot! {
    fn cuMemAlloc_v2(address: Out<DevicePtr>, size: usize) quick {
        Some(stub::allocate(address, size))
    } |driver| {
        address.check()?;
        address.put(driver.allocate(size as u64, Kind::Plain)?)
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) quick {
        Some(stub::info(free, total))
    } |driver| {
        let ordinal = current()?.ordinal;
        // Either may be left out: OptiX asks for one alone.
        free.put_if(usize::try_from(driver.free(ordinal)).unwrap_or(usize::MAX))?;
        total.put_if(usize::try_from(driver.cards[ordinal].memory).unwrap_or(usize::MAX))
    }
}

entry! {
    fn cuMemAllocPitch_v2(
        address: Out<DevicePtr>, pitch: Out<usize>, width: usize, height: usize, element: c_uint,
    ) |driver| {
        address.check()?;
        pitch.check()?;
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Code::INVALID_VALUE);
        }
        let row = round_up(width as u64, PITCH);
        let size = row.checked_mul(height as u64).ok_or(Code::OUT_OF_MEMORY)?;
        let given = driver.allocate(size, Kind::Plain)?;
        pitch.put(usize::try_from(row).map_err(|_| Code::INVALID_VALUE)?)?;
        address.put(given)
    }

    // 1 global, 2 host, 4 single: how memory is attached.
    fn cuMemAllocManaged(address: Out<DevicePtr>, size: usize, flags: c_uint) |driver| {
        address.check()?;
        if !matches!(flags, 1 | 2 | 4) {
            return Err(Code::INVALID_VALUE);
        }
        address.put(driver.allocate(size as u64, Kind::Managed)?)
    }

    fn cuMemGetAddressRange_v2(base: Out<DevicePtr>, size: Out<usize>, address: DevicePtr) |driver| {
        let (start, alloc) = driver.containing(address).ok_or(Code::NOT_FOUND)?;
        base.put_if(start)?;
        size.put_if(usize::try_from(alloc.size).unwrap_or(usize::MAX))
    }

    fn cuMemAllocHost_v2(address: Out<*mut c_void>, size: usize) |driver| {
        crate::context::current()?;
        driver.objects.pin_new(address, size)
    }

    fn cuMemHostAlloc(address: Out<*mut c_void>, size: usize, _flags: c_uint) |driver| {
        crate::context::current()?;
        driver.objects.pin_new(address, size)
    }

    fn cuMemFreeHost(address: DevicePtr) |driver| {
        driver.objects.unpin(address)
    }

    fn cuMemHostRegister_v2(address: DevicePtr, size: usize, _flags: c_uint) |driver| {
        crate::context::current()?;
        driver.objects.register(address, size)
    }

    fn cuMemHostUnregister(address: DevicePtr) |driver| {
        driver.objects.unregister(address)
    }

    fn cuMemHostGetDevicePointer_v2(out: Out<DevicePtr>, address: DevicePtr, _flags: c_uint) |driver| {
        driver.objects.host_range(address).ok_or(Code::INVALID_VALUE)?;
        out.put(address)
    }

    fn cuMemHostGetFlags(flags: Out<c_uint>, address: DevicePtr) |driver| {
        driver.objects.host_range(address).ok_or(Code::INVALID_VALUE)?;
        flags.put(2)
    }

    fn cuPointerGetAttribute(out: Opaque, attribute: c_uint, address: DevicePtr) |driver| {
        driver.pointer_attribute(attribute, address)?.put(out)
    }

    fn cuPointerGetAttributes(
        count: c_uint, attributes: Out<c_uint>, out: Out<Opaque>, address: DevicePtr,
    ) |driver| {
        for place in 0..count as usize {
            let attribute = attributes.get_at(place)?;
            let value = driver.pointer_attribute(attribute, address);
            value.unwrap_or(Attribute::nothing(attribute)).put(out.get_at(place)?)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: Opaque, attribute: c_uint, address: DevicePtr) |driver| {
        driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        if attribute == 6 { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuMemAdvise(address: DevicePtr, size: usize, _advice: c_uint, device: c_int) |driver| {
        managed(driver, address, size, Location { kind: if device < 0 { 2 } else { ON_DEVICE }, id: device })
    }

    fn cuMemAdvise_v2(address: DevicePtr, size: usize, _advice: c_uint, location: Location) |driver| {
        managed(driver, address, size, location)
    }

    fn cuMemRangeGetAttribute(data: Opaque, size: usize, attribute: c_uint, address: DevicePtr, _count: usize) |driver| {
        driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        if size != 4 || attribute == 0 {
            return Err(Code::INVALID_VALUE);
        }
        data.cast().put(0_i32)
    }
}

/// Checks a range of managed memory and where it shall go; `-1` is the host.
pub(crate) fn managed(driver: &Driver, address: DevicePtr, size: usize, to: Location) -> Result<(), Code> {
    let (start, alloc) = driver.containing(address).ok_or(Code::INVALID_VALUE)?;
    let inside = address + size as u64 <= start + alloc.size;
    if size == 0 || !inside || alloc.kind != Kind::Managed {
        return Err(Code::INVALID_VALUE);
    }
    if to.kind == ON_DEVICE { driver.ordinal(to.id).map(|_| ()) } else { Ok(()) }
}

impl crate::objects::Objects {
    fn pin_new(&mut self, address: Out<*mut c_void>, size: usize) -> Result<(), Code> {
        address.check()?;
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let length = usize::try_from(round_up(size as u64, PAGE)).map_err(|_| Code::OUT_OF_MEMORY)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at a place of the system's choice.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.pinned.insert(start.expose_provenance() as u64, (size as u64, true));
        address.put(start)
    }

    fn unpin(&mut self, address: DevicePtr) -> Result<(), Code> {
        let Some((size, true)) = self.pinned.get(&address).copied() else { return Err(Code::INVALID_VALUE) };
        self.pinned.remove(&address);
        let length = usize::try_from(round_up(size, PAGE)).unwrap_or(0);
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the mapping that `pin_new` made, which the program has just given up.
        unsafe { libc::munmap(start, length) };
        Ok(())
    }

    fn register(&mut self, address: DevicePtr, size: usize) -> Result<(), Code> {
        if address == 0 || size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.host_range(address).is_some() {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.pinned.insert(address, (size as u64, false));
        Ok(())
    }

    fn unregister(&mut self, address: DevicePtr) -> Result<(), Code> {
        match self.pinned.get(&address) {
            Some((_, false)) => {
                self.pinned.remove(&address);
                Ok(())
            }
            _ => Err(Code::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// The pinned or registered host range around an address.
    pub(crate) fn host_range(&self, address: DevicePtr) -> Option<(DevicePtr, u64)> {
        let (start, (size, _)) = self.pinned.range(..=address).next_back()?;
        (address < start + size).then_some((*start, *size))
    }
}

const _: () = assert!(BLOCK.is_multiple_of(LARGEST_PIECE) && LARGEST_PIECE.is_multiple_of(UNIT));
