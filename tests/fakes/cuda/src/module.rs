//! Modules, libraries, functions and kernels.
//!
//! An image takes its own size of the card, by the rule of [`crate::space`]: an ELF file's end of section headers, a
//! fat binary's length field, else the length of a PTX text. Modules belong to their context; a library is charged on
//! the card of the context that loads it, once.
//!
//! A function's time is set by name: `busy_5ms` runs 5 ms whatever its grid, `wave_20us` 20 µs for each wave
//! of blocks (the card holds 2,048 threads per SM), units `ns`, `us`, `ms`, `s`. Other names run `FAKE_CUDA_WAVE_NS` (2,000) per wave.
//! `fake_cuda_set_duration` sets a name's time for the whole process.
#![expect(unsafe_code, reason = "exports entry points under their C names and reads images")]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::abi::{Code, DevicePtr, Handle, Opaque, Out, Text};
use crate::driver::{Driver, number};
use crate::gate::{entry, open_entry};
use crate::memory::Backing;
use crate::space::Use;

/// Threads that an SM holds at once.
const THREADS_PER_SM: u64 = 2048;

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    /// None for a library.
    pub(crate) context: Option<Handle>,
    ordinal: usize,
    address: DevicePtr,
    backing: Backing,
    by_name: HashMap<String, Handle>,
    /// Globals by name: 256 bytes each, within the image.
    globals: u64,
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: Handle,
    name: CString,
    time: Time,
}

/// How long a kernel runs, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Time {
    Fixed(u64),
    PerWave(u64),
}

static SET: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);

/// Sets the time of every function of that name.
pub(crate) fn set_duration(name: &str, ns: u64) {
    let mut set = SET.lock().unwrap_or_else(PoisonError::into_inner);
    set.get_or_insert_default().insert(name.to_owned(), ns);
}

fn time_of(name: &str) -> Time {
    for (word, make) in [("busy_", Time::Fixed as fn(u64) -> Time), ("wave_", Time::PerWave)] {
        if let Some(ns) = name.find(word).and_then(|at| duration(&name[at + word.len()..])) {
            return make(ns);
        }
    }
    Time::PerWave(number("FAKE_CUDA_WAVE_NS", 2_000))
}

/// `5ms…`.
fn duration(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (amount, unit) = (text[..digits].parse::<u64>().ok()?, &text[digits..]);
    let scales = [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let scale = scales.iter().find(|(u, _)| unit.starts_with(u))?.1;
    amount.checked_mul(scale)
}

impl Driver {
    /// ns of the whole card for a launch.
    pub(crate) fn launch_time(
        &self,
        function: Handle,
        grid: [c_uint; 3],
        block: [c_uint; 3],
    ) -> Result<u64, Code> {
        let found = self.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
        let product = |v: [c_uint; 3]| v.iter().fold(1_u64, |p, x| p.saturating_mul(u64::from(*x)));
        let (blocks, threads) = (product(grid), product(block));
        if blocks == 0 || threads == 0 || threads > 1024 {
            return Err(Code::INVALID_VALUE);
        }
        let set = SET.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ns) = set.as_ref().and_then(|s| s.get(found.name.to_str().unwrap_or_default())) {
            return Ok(*ns);
        }
        let ordinal = self.objects.modules.get(&found.module).map_or(0, |m| m.ordinal);
        let room = u64::from(self.cards[ordinal].sms) * THREADS_PER_SM;
        Ok(match found.time {
            Time::Fixed(ns) => ns,
            Time::PerWave(ns) => ns.saturating_mul(blocks.saturating_mul(threads).div_ceil(room)),
        })
    }

    fn load(&mut self, image: Opaque, library: bool) -> Result<Handle, Code> {
        let size = image_size(image)?;
        self.load_bytes(size, library)
    }

    fn load_bytes(&mut self, size: u64, library: bool) -> Result<Handle, Code> {
        // A library may be loaded before any context is current; its first user's card is the first one.
        let current = crate::context::current();
        if !library {
            current.clone()?;
        }
        let (context, ordinal) = current.map_or((None, 0), |c| (Some(self.owner(&c)), c.ordinal));
        let (address, backing) = self.obtain(ordinal, size.max(1), Use::Code)?;
        let module = Module {
            context: context.filter(|_| !library),
            ordinal,
            address,
            backing,
            by_name: HashMap::new(),
            globals: 0,
        };
        let handle = self.handle();
        self.objects.modules.insert(handle, module);
        Ok(handle)
    }

    fn load_file(&mut self, path: Text, library: bool) -> Result<Handle, Code> {
        let length = std::fs::metadata(path.read()?).map_err(|_| Code::FILE_NOT_FOUND)?.len();
        self.load_bytes(length, library)
    }

    pub(crate) fn unload(&mut self, handle: Handle) -> Result<(), Code> {
        let module = self.objects.modules.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
        self.objects.functions.retain(|_, f| f.module != handle);
        self.give_back(module.ordinal, module.address, module.backing);
        Ok(())
    }

    fn function(&mut self, module: Handle, name: Text) -> Result<Handle, Code> {
        let name = name.read()?;
        let known = self.objects.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        // The driver answers NOT_FOUND for a name that the image lacks; images are not parsed here, so one prefix
        // stands for those.
        if name.is_empty() || name.starts_with("missing") {
            return Err(Code::NOT_FOUND);
        }
        if let Some(handle) = known.by_name.get(&name) {
            return Ok(*handle);
        }
        let handle = self.handle();
        let time = time_of(&name);
        let text = CString::new(name.clone()).map_err(|_| Code::NOT_FOUND)?;
        self.objects.functions.insert(handle, Function { module, name: text, time });
        if let Some(module) = self.objects.modules.get_mut(&module) {
            module.by_name.insert(name, handle);
        }
        Ok(handle)
    }

    fn global(&mut self, module: Handle, address: Out<DevicePtr>, size: Out<usize>) -> Result<(), Code> {
        let module = self.objects.modules.get_mut(&module).ok_or(Code::INVALID_HANDLE)?;
        module.globals += 256;
        address.put_if(module.address)?;
        size.put_if(256)
    }
}

/// Loads an image, for which other threads need not wait: before and after the card gives memory for it,
/// `FAKE_CUDA_LOAD_US` (0) pass.
fn load_slowly(load: impl FnOnce(&mut Driver) -> Result<Handle, Code>) -> Result<Handle, Code> {
    static WAIT: OnceLock<Duration> = OnceLock::new();
    let time = WAIT.get_or_init(|| Duration::from_micros(number("FAKE_CUDA_LOAD_US", 0)));
    let wait = || {
        if !time.is_zero() {
            std::thread::sleep(*time);
        }
    };
    wait();
    let loaded = crate::gate::driver().as_mut().map_or(Err(Code::NOT_INITIALIZED), load);
    wait();
    loaded
}

/// The size of an image by its own head.
fn image_size(image: Opaque) -> Result<u64, Code> {
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let word = |at: usize| -> Result<u64, Code> {
        let mut bytes = [0; 8];
        for (place, byte) in bytes.iter_mut().enumerate() {
            *byte = image.get_at(at + place)?;
        }
        Ok(u64::from_le_bytes(bytes))
    };
    let head = [image.get()?, image.get_at(1)?, image.get_at(2)?, image.get_at(3)?];
    match head {
        [0x7F, b'E', b'L', b'F'] => {
            // e_shoff at 40, e_shentsize at 58, e_shnum at 60.
            let counts = word(56)?;
            let (entry, number) = (counts >> 16 & 0xFFFF, counts >> 32 & 0xFFFF);
            Ok(word(40)?.saturating_add(entry * number))
        }
        // `fatbinary.h`: magic, version, head's size, then the payload's length.
        [0x50, 0xED, 0x55, 0xBA] => {
            let first = word(0)?;
            Ok(word(8)?.saturating_add(first >> 48))
        }
        // `__cudaFatCudaBinary`: magic, version, pointer to the fat binary.
        [0xB1 | 0xB2, 0x43, 0x62, 0x46] => {
            let inner = image.cast::<Opaque>().get_at(1)?;
            image_size(inner)
        }
        [b, ..] if b.is_ascii_graphic() || b.is_ascii_whitespace() => {
            let mut length = 0;
            while image.get_at(length)? != 0 {
                length += 1;
            }
            Ok(length as u64)
        }
        _ => Err(Code::INVALID_IMAGE),
    }
}

open_entry! {
    fn cuModuleLoad(module: Out<Handle>, path: Text) {
        module.check()?;
        module.put(load_slowly(|driver| driver.load_file(path, false))?)
    }

    fn cuModuleLoadData(module: Out<Handle>, image: Opaque) {
        module.check()?;
        module.put(load_slowly(|driver| driver.load(image, false))?)
    }

    fn cuModuleLoadDataEx(
        module: Out<Handle>, image: Opaque, _count: c_uint, _options: Opaque, _values: Opaque,
    ) {
        module.check()?;
        module.put(load_slowly(|driver| driver.load(image, false))?)
    }

    fn cuModuleLoadFatBinary(module: Out<Handle>, image: Opaque) {
        module.check()?;
        module.put(load_slowly(|driver| driver.load(image, false))?)
    }

    fn cuLibraryLoadData(
        library: Out<Handle>, code: Opaque, _jit: Opaque, _jit_values: Opaque, _jit_count: c_uint, _options: Opaque,
        _values: Opaque, _count: c_uint,
    ) {
        library.check()?;
        library.put(load_slowly(|driver| driver.load(code, true))?)
    }

    fn cuLibraryLoadFromFile(
        library: Out<Handle>, path: Text, _jit: Opaque, _jit_values: Opaque, _jit_count: c_uint, _options: Opaque,
        _values: Opaque, _count: c_uint,
    ) {
        library.check()?;
        library.put(load_slowly(|driver| driver.load_file(path, true))?)
    }
}

entry! {
    fn cuModuleUnload(module: Handle) |driver| {
        driver.unload(module)
    }

    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) |driver| {
        function.check()?;
        function.put(driver.function(module, name)?)
    }

    fn cuModuleGetGlobal_v2(address: Out<DevicePtr>, size: Out<usize>, module: Handle, _name: Text) |driver| {
        driver.global(module, address, size)
    }

    // 1 eager, 2 lazy.
    fn cuModuleGetLoadingMode(mode: Out<c_uint>) |_| {
        mode.put(2)
    }

    fn cuModuleGetFunctionCount(count: Out<c_uint>, module: Handle) |driver| {
        let module = driver.objects.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        count.put(c_uint::try_from(module.by_name.len()).unwrap_or(0))
    }

    fn cuLibraryUnload(library: Handle) |driver| {
        driver.unload(library)
    }

    fn cuLibraryGetKernel(kernel: Out<Handle>, library: Handle, name: Text) |driver| {
        kernel.check()?;
        kernel.put(driver.function(library, name)?)
    }

    fn cuLibraryGetModule(module: Out<Handle>, library: Handle) |driver| {
        driver.objects.modules.get(&library).ok_or(Code::INVALID_HANDLE)?;
        module.put(library)
    }

    fn cuLibraryGetGlobal(address: Out<DevicePtr>, size: Out<usize>, library: Handle, _name: Text) |driver| {
        driver.global(library, address, size)
    }

    fn cuLibraryGetKernelCount(count: Out<c_uint>, library: Handle) |driver| {
        let library = driver.objects.modules.get(&library).ok_or(Code::INVALID_HANDLE)?;
        count.put(c_uint::try_from(library.by_name.len()).unwrap_or(0))
    }

    // Kernel and function are one thing here.
    fn cuKernelGetFunction(function: Out<Handle>, kernel: Handle) |driver| {
        driver.objects.functions.get(&kernel).ok_or(Code::INVALID_HANDLE)?;
        function.put(kernel)
    }

    fn cuKernelGetLibrary(library: Out<Handle>, kernel: Handle) |driver| {
        library.put(driver.objects.functions.get(&kernel).ok_or(Code::INVALID_HANDLE)?.module)
    }

    fn cuFuncGetModule(module: Out<Handle>, function: Handle) |driver| {
        module.put(driver.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?.module)
    }

    fn cuKernelGetName(name: Out<*const c_char>, kernel: Handle) |driver| {
        name.put(driver.objects.functions.get(&kernel).ok_or(Code::INVALID_HANDLE)?.name.as_ptr())
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: Handle) |driver| {
        name.put(driver.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?.name.as_ptr())
    }

    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: Handle) |driver| {
        driver.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
        value.put(function_attribute(attribute))
    }

    fn cuKernelGetAttribute(value: Out<c_int>, attribute: c_uint, kernel: Handle, _device: c_int) |driver| {
        driver.objects.functions.get(&kernel).ok_or(Code::INVALID_HANDLE)?;
        value.put(function_attribute(attribute))
    }

    fn cuFuncSetAttribute(function: Handle, _attribute: c_uint, _value: c_int) |driver| {
        driver.objects.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuKernelSetAttribute(_attribute: c_uint, _value: c_int, kernel: Handle, _device: c_int) |driver| {
        driver.objects.functions.get(&kernel).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuFuncSetCacheConfig(function: Handle, _config: c_uint) |driver| {
        driver.objects.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuFuncLoad(function: Handle) |driver| {
        driver.objects.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    // 1: loaded.
    fn cuFuncIsLoaded(state: Out<c_uint>, function: Handle) |driver| {
        driver.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
        state.put(1)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: Handle, size: c_int, _shared: usize) |driver| {
        blocks.put(occupancy(driver, function, size)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<c_int>, function: Handle, size: c_int, _shared: usize, _flags: c_uint,
    ) |driver| {
        blocks.put(occupancy(driver, function, size)?)
    }
}

/// Blocks of that size that an SM holds: 2,048 threads, 32 blocks.
fn occupancy(driver: &Driver, function: Handle, size: c_int) -> Result<c_int, Code> {
    driver.objects.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
    if (1..=1024).contains(&size) { Ok((2048 / size).min(32)) } else { Err(Code::INVALID_VALUE) }
}

/// 0 most threads of a block, 4 registers, 5 and 6 PTX and binary version; the rest is 0.
fn function_attribute(attribute: c_uint) -> c_int {
    match attribute {
        0 => 1024,
        4 => 32,
        5 | 6 => 90,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_times() {
        for (name, want) in [
            ("busy_5ms", Time::Fixed(5_000_000)),
            ("_Z8busy_3usPf", Time::Fixed(3_000)),
            ("wave_20us", Time::PerWave(20_000)),
            ("busy_2s", Time::Fixed(2_000_000_000)),
            ("busy_7ns_tail", Time::Fixed(7)),
            ("busy_", Time::PerWave(2_000)),
            ("busy_9", Time::PerWave(2_000)),
            ("gemm", Time::PerWave(2_000)),
        ] {
            assert_eq!(time_of(name), want, "{name}");
        }
    }
}
