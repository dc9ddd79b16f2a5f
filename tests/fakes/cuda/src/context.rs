//! Contexts: primary, created, and which one a thread uses.
//!
//! A context takes `FAKE_CUDA_CONTEXT_MIB` (400) of its card for its page tables, its channels and the device runtime, and gives it back when it
//! is destroyed; limits beyond their defaults take more. What was allocated in it goes with it.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};

use crate::abi::{Code, Device, Handle, Opaque, Out};
use crate::driver::{Driver, number};
use crate::gate::{entry, open_entry};
use crate::space::{BLOCK, round_up};

/// The version that `cuCtxGetApiVersion` tells (3020: contexts of the `_v2` functions).
const API_VERSION: c_uint = 3020;

/// What threads hold of a context.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) handle: Handle,
    pub(crate) ordinal: usize,
    alive: AtomicBool,
    flags: AtomicU32,
    id: u64,
}

/// What the driver holds of it.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) cell: Arc<Cell>,
    /// Bytes of the card that it takes, limits included.
    bytes: u64,
    limits: BTreeMap<c_uint, usize>,
    /// Users besides the one that made it.
    attached: u32,
    /// A green context's.
    pub(crate) green: bool,
    /// Streams and kernels of a green context may use so many.
    pub(crate) sms: u32,
}

/// A card's primary context.
#[derive(Debug)]
pub(crate) struct Primary {
    /// The same each time that it is active.
    pub(crate) handle: Handle,
    pub(crate) users: u32,
    pub(crate) context: Option<Handle>,
    flags: c_uint,
}

impl Primary {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle, users: 0, context: None, flags: 0 }
    }
}

thread_local! {
    /// The ordinal of the top of the stack, -1 for none: what `cuCtxGetDevice` answers in the stub, which costs a few ns there as it does
    /// in the driver.
    static TOP: std::cell::Cell<Device> = const { std::cell::Cell::new(-1) };
    static STACK: RefCell<Vec<Arc<Cell>>> = const { RefCell::new(Vec::new()) };
}

fn stack<T>(work: impl FnOnce(&mut Vec<Arc<Cell>>) -> T) -> Option<T> {
    // A thread that ends while it calls has no stack any more.
    STACK
        .try_with(|s| {
            let mut stack = s.try_borrow_mut().ok()?;
            let answer = work(&mut stack);
            TOP.set(stack.last().and_then(|c| Device::try_from(c.ordinal).ok()).unwrap_or(-1));
            Some(answer)
        })
        .ok()
        .flatten()
}

/// The calling thread's context.
pub(crate) fn current() -> Result<Arc<Cell>, Code> {
    let top = stack(|s| s.last().cloned()).flatten().ok_or(Code::INVALID_CONTEXT)?;
    if top.alive.load(SeqCst) { Ok(top) } else { Err(Code::CONTEXT_IS_DESTROYED) }
}

/// The ordinal of the calling thread's context, without touching the driver.
fn current_ordinal() -> Result<usize, Code> {
    let top = STACK.try_with(|s| {
        let stack = s.try_borrow().ok()?;
        stack.last().map(|c| (c.ordinal, c.alive.load(SeqCst)))
    });
    match top.ok().flatten() {
        Some((ordinal, true)) => Ok(ordinal),
        Some(_) => Err(Code::CONTEXT_IS_DESTROYED),
        None => Err(Code::INVALID_CONTEXT),
    }
}

fn device(ordinal: usize) -> Result<Device, Code> {
    Device::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)
}

impl Driver {
    /// A context; its card may be too full for it.
    pub(crate) fn create_context(
        &mut self,
        ordinal: usize,
        flags: c_uint,
        green: bool,
    ) -> Result<Arc<Cell>, Code> {
        let handle = self.handle();
        self.create_context_as(handle, ordinal, flags, green)
    }

    fn create_context_as(
        &mut self,
        handle: Handle,
        ordinal: usize,
        flags: c_uint,
        green: bool,
    ) -> Result<Arc<Cell>, Code> {
        let (variable, default) =
            if green { ("FAKE_CUDA_GREEN_CONTEXT_MIB", 32) } else { ("FAKE_CUDA_CONTEXT_MIB", 400) };
        let bytes = number(variable, default) << 20;
        self.charge(ordinal, bytes)?;
        let cell = Arc::new(Cell {
            handle,
            ordinal,
            alive: AtomicBool::new(true),
            flags: AtomicU32::new(flags),
            id: handle.0 as u64,
        });
        let sms = self.cards[ordinal].sms;
        let context =
            Context { cell: Arc::clone(&cell), bytes, limits: BTreeMap::new(), attached: 0, green, sms };
        self.contexts.insert(handle, context);
        self.live.count_context(self.cards[ordinal].index, true);
        Ok(cell)
    }

    pub(crate) fn destroy_context(&mut self, handle: Handle) -> Result<(), Code> {
        let context = self.contexts.remove(&handle).ok_or(Code::INVALID_CONTEXT)?;
        context.cell.alive.store(false, SeqCst);
        let ordinal = context.cell.ordinal;
        self.live.wait(self.cards[ordinal].index, self.live.mark(self.cards[ordinal].index));
        self.free_context_memory(handle);
        self.drop_context_objects(handle);
        self.uncharge(ordinal, context.bytes);
        self.live.count_context(self.cards[ordinal].index, false);
        Ok(())
    }

    fn context(&self, handle: Handle) -> Result<&Context, Code> {
        self.contexts.get(&handle).ok_or(Code::INVALID_CONTEXT)
    }

    /// The context of an argument, where 0 stands for the calling thread's.
    fn context_or_current(&self, handle: Handle) -> Result<Arc<Cell>, Code> {
        if handle == Handle(0) { current() } else { Ok(Arc::clone(&self.context(handle)?.cell)) }
    }

    fn create_and_push(&mut self, context: Out<Handle>, flags: c_uint, on: Device) -> Result<(), Code> {
        context.check()?;
        let ordinal = self.ordinal(on)?;
        let cell = self.create_context(ordinal, flags, false)?;
        let handle = cell.handle;
        stack(|s| s.push(cell));
        context.put(handle)
    }

    /// The primary context of a card, made where it is not active.
    pub(crate) fn retain_primary(&mut self, ordinal: usize) -> Result<Handle, Code> {
        let handle = if let Some(handle) = self.primaries[ordinal].context {
            handle
        } else {
            let Primary { handle, flags, .. } = self.primaries[ordinal];
            self.create_context_as(handle, ordinal, flags, false)?.handle
        };
        let primary = &mut self.primaries[ordinal];
        primary.context = Some(handle);
        primary.users += 1;
        Ok(handle)
    }

    fn release_primary(&mut self, on: Device) -> Result<(), Code> {
        let ordinal = self.ordinal(on)?;
        self.release_primary_of(ordinal)
    }

    /// Gives up one use of a card's primary context; the last one destroys it.
    pub(crate) fn release_primary_of(&mut self, ordinal: usize) -> Result<(), Code> {
        let primary = &mut self.primaries[ordinal];
        primary.users = primary.users.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        if primary.users == 0 { self.reset_primary(ordinal) } else { Ok(()) }
    }

    fn reset_primary(&mut self, ordinal: usize) -> Result<(), Code> {
        let primary = &mut self.primaries[ordinal];
        primary.users = 0;
        match primary.context.take() {
            Some(handle) => self.destroy_context(handle),
            None => Ok(()),
        }
    }

    fn set_primary_flags(&mut self, on: Device, flags: c_uint) -> Result<(), Code> {
        let ordinal = self.ordinal(on)?;
        let primary = &mut self.primaries[ordinal];
        primary.flags = flags;
        if let Some(context) = primary.context.and_then(|h| self.contexts.get(&h)) {
            context.cell.flags.store(flags, SeqCst);
        }
        Ok(())
    }
}

/// Default of a limit, and the bytes that each unit beyond it takes on a card with `sms` (2,048 threads each).
fn limit_rule(limit: c_uint, sms: u32) -> Option<(usize, u64)> {
    match limit {
        0 => Some((1024, u64::from(sms) * 2048)),
        1 => Some((0x70_0000, 1)),
        2 => Some((8 << 20, 1)),
        3 => Some((2, 0)),
        4 => Some((2048, 0)),
        5 => Some((64, 0)),
        6 => Some((0, 0)),
        _ => None,
    }
}

// Without the driver's lock, as in the real driver.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetDevice(out: Out<Device>) -> c_int {
    if crate::gate::stub() && TOP.get() >= 0 {
        return out.put(TOP.get()).map_or_else(|code| code.0, |()| 0);
    }
    crate::gate::open(&crate::table::site::cuCtxGetDevice, || {
        let ordinal = current_ordinal()?;
        out.put(device(ordinal)?)
    })
}

open_entry! {
    fn cuCtxGetCurrent(context: Out<Handle>) {
        context.put(stack(|s| s.last().map_or(Handle(0), |c| c.handle)).unwrap_or(Handle(0)))
    }

    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        let top = stack(Vec::pop).flatten().ok_or(Code::INVALID_CONTEXT)?;
        context.put_if(top.handle)
    }

    fn cuCtxPopCurrent(context: Out<Handle>) {
        let top = stack(Vec::pop).flatten().ok_or(Code::INVALID_CONTEXT)?;
        context.put_if(top.handle)
    }
}

entry! {
    fn cuCtxGetDevice_v2(out: Out<Device>, context: Handle) |driver| {
        out.put(device(driver.context_or_current(context)?.ordinal)?)
    }

    fn cuCtxCreate_v2(context: Out<Handle>, flags: c_uint, on: Device) |driver| {
        driver.create_and_push(context, flags, on)
    }

    fn cuCtxCreate(context: Out<Handle>, flags: c_uint, on: Device) |driver| {
        driver.create_and_push(context, flags, on)
    }

    fn cuCtxCreate_v3(context: Out<Handle>, _affinity: Opaque, _count: c_int, flags: c_uint, on: Device) |driver| {
        driver.create_and_push(context, flags, on)
    }

    fn cuCtxCreate_v4(context: Out<Handle>, _params: Opaque, flags: c_uint, on: Device) |driver| {
        driver.create_and_push(context, flags, on)
    }

    fn cuCtxDestroy_v2(context: Handle) |driver| {
        destroy_created(driver, context)
    }

    fn cuCtxDestroy(context: Handle) |driver| {
        destroy_created(driver, context)
    }

    fn cuCtxAttach(context: Out<Handle>, _flags: c_uint) |driver| {
        let handle = current()?.handle;
        context.put(handle)?;
        driver.contexts.get_mut(&handle).ok_or(Code::INVALID_CONTEXT)?.attached += 1;
        Ok(())
    }

    fn cuCtxDetach(context: Handle) |driver| {
        let users = &mut driver.contexts.get_mut(&context).ok_or(Code::INVALID_CONTEXT)?.attached;
        if *users > 0 {
            *users -= 1;
            return Ok(());
        }
        destroy_created(driver, context)
    }

    fn cuCtxPushCurrent_v2(context: Handle) |driver| {
        push(driver, context)
    }

    fn cuCtxPushCurrent(context: Handle) |driver| {
        push(driver, context)
    }

    fn cuCtxSetCurrent(context: Handle) |driver| {
        let cell = if context == Handle(0) { None } else { Some(Arc::clone(&driver.context(context)?.cell)) };
        stack(|s| {
            s.pop();
            s.extend(cell);
        });
        Ok(())
    }

    fn cuCtxGetFlags(flags: Out<c_uint>) |_| {
        flags.put(current()?.flags.load(SeqCst))
    }

    fn cuCtxSetFlags(flags: c_uint) |_| {
        current()?.flags.store(flags, SeqCst);
        Ok(())
    }

    fn cuCtxGetId(context: Handle, id: Out<u64>) |driver| {
        id.put(driver.context_or_current(context)?.id)
    }

    fn cuCtxGetApiVersion(context: Handle, version: Out<c_uint>) |driver| {
        driver.context_or_current(context)?;
        version.put(API_VERSION)
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) |driver| {
        let cell = current()?;
        let ordinal = cell.ordinal;
        let (default, unit) = limit_rule(limit, driver.cards[ordinal].sms).ok_or(Code::NOT_SUPPORTED)?;
        let owner = driver.owner(&cell);
        let context = driver.contexts.get(&owner).ok_or(Code::INVALID_CONTEXT)?;
        let bytes = |v: usize| round_up(unit.saturating_mul(v.saturating_sub(default) as u64), BLOCK);
        let before = bytes(context.limits.get(&limit).copied().unwrap_or(default));
        let after = bytes(value);
        driver.charge(ordinal, after.saturating_sub(before))?;
        driver.uncharge(ordinal, before.saturating_sub(after));
        if let Some(context) = driver.contexts.get_mut(&owner) {
            context.bytes = context.bytes + after - before;
            context.limits.insert(limit, value);
        }
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) |driver| {
        let cell = current()?;
        let (default, _) = limit_rule(limit, driver.cards[cell.ordinal].sms).ok_or(Code::NOT_SUPPORTED)?;
        let set = driver.context(driver.owner(&cell))?.limits.get(&limit).copied();
        value.put(set.unwrap_or(default))
    }

    fn cuCtxGetCacheConfig(config: Out<c_uint>) |_| {
        current()?;
        config.put(0)
    }

    fn cuCtxSetCacheConfig(_config: c_uint) |_| {
        current().map(|_| ())
    }

    fn cuCtxGetSharedMemConfig(config: Out<c_uint>) |_| {
        current()?;
        config.put(1)
    }

    fn cuCtxSetSharedMemConfig(_config: c_uint) |_| {
        current().map(|_| ())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) |_| {
        current()?;
        least.put_if(0)?;
        greatest.put_if(-5)
    }

    fn cuCtxResetPersistingL2Cache() |_| {
        current().map(|_| ())
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, on: Device) |driver| {
        context.check()?;
        let ordinal = driver.ordinal(on)?;
        context.put(driver.retain_primary(ordinal)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(on: Device) |driver| {
        driver.release_primary(on)
    }

    fn cuDevicePrimaryCtxRelease(on: Device) |driver| {
        driver.release_primary(on)
    }

    fn cuDevicePrimaryCtxReset_v2(on: Device) |driver| {
        let ordinal = driver.ordinal(on)?;
        driver.reset_primary(ordinal)
    }

    fn cuDevicePrimaryCtxReset(on: Device) |driver| {
        let ordinal = driver.ordinal(on)?;
        driver.reset_primary(ordinal)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(on: Device, flags: c_uint) |driver| {
        driver.set_primary_flags(on, flags)
    }

    // The first version refuses while the context is active.
    fn cuDevicePrimaryCtxSetFlags(on: Device, flags: c_uint) |driver| {
        let ordinal = driver.ordinal(on)?;
        if driver.primaries[ordinal].context.is_some() {
            return Err(Code::PRIMARY_CONTEXT_ACTIVE);
        }
        driver.set_primary_flags(on, flags)
    }

    fn cuDevicePrimaryCtxGetState(on: Device, flags: Out<c_uint>, active: Out<c_int>) |driver| {
        let ordinal = driver.ordinal(on)?;
        flags.put_if(driver.primaries[ordinal].flags)?;
        active.put_if(driver.primaries[ordinal].context.is_some().into())
    }
}

fn push(driver: &Driver, context: Handle) -> Result<(), Code> {
    let cell = Arc::clone(&driver.context(context)?.cell);
    stack(|s| s.push(cell));
    Ok(())
}

/// Primary contexts are not destroyed this way.
fn destroy_created(driver: &mut Driver, context: Handle) -> Result<(), Code> {
    if driver.primaries.iter().any(|p| p.context == Some(context)) {
        return Err(Code::INVALID_CONTEXT);
    }
    driver.destroy_context(context)?;
    // A context that is current to the caller is popped as well.
    stack(|s| s.pop_if(|top| top.handle == context));
    Ok(())
}
