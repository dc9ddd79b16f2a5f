//! Calls the driver as it is told on its stdin, and says what came of it, a line each:
//!
//! | step | does | says |
//! | --- | --- | --- |
//! | `init` | `cuInit` | ns |
//! | `attach OFFSET` | the driver's own `cuInit`, which lies so far behind `fake_cuda_given`, then `cuInit` | ns of the second |
//! | `context` | makes the primary context of card 0 current | 0 |
//! | `hold N BYTES` | N allocations that stay | ns |
//! | `pair BYTES N`, `random BYTES N`, `launch 0 N`, `info 0 N`, `device 0 N`, `init 0 1` | calls | ns for all N |
//! | `trace CALL BYTES N` | stops for a debugger before and after N calls | 0 |

#![expect(unsafe_code, reason = "calls a library that it opens, as programs of the driver API do")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
type Device = unsafe extern "C" fn(*mut c_int) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
type Launch = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// A kernel's handle, as far as the stub looks at it: not at all.
const KERNEL: usize = 0x7000_1000;

struct Driver {
    handle: *mut c_void,
    init: Init,
    retain: Retain,
    set_current: SetCurrent,
    alloc: Alloc,
    free: Free,
    info: Info,
    device: Device,
    launch: Launch,
}

/// What `dlsym` says, through the library where it is preloaded.
fn symbol(handle: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: an open library and a name.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    ensure!(!found.is_null(), "the driver has no {}", name.to_string_lossy());
    Ok(found)
}

macro_rules! function {
    ($handle:expr, $name:literal, $type:ty) => {{
        let found = symbol($handle, $name)?;
        // SAFETY: the driver's function of this name has this type (`cuda.h`).
        unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
    }};
}

impl Driver {
    fn open() -> Result<Self> {
        // SAFETY: the driver's constructors do nothing that needs care.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        ensure!(!handle.is_null(), "no libcuda.so.1: set LD_LIBRARY_PATH");
        Ok(Self {
            handle,
            init: function!(handle, c"cuInit", Init),
            retain: function!(handle, c"cuDevicePrimaryCtxRetain", Retain),
            set_current: function!(handle, c"cuCtxSetCurrent", SetCurrent),
            alloc: function!(handle, c"cuMemAlloc_v2", Alloc),
            free: function!(handle, c"cuMemFree_v2", Free),
            info: function!(handle, c"cuMemGetInfo_v2", Info),
            device: function!(handle, c"cuCtxGetDevice", Device),
            launch: function!(handle, c"cuLaunchKernel", Launch),
        })
    }

    fn init(&self) -> Result<u64> {
        timed(|| {
            // SAFETY: the driver's function.
            ok(unsafe { (self.init)(0) })
        })
    }

    /// Only what the library adds: the driver is initialised when its turn comes.
    fn attach(&self, offset: isize) -> Result<u64> {
        // A name that the library does not know, so this is the driver's own address.
        let known = symbol(self.handle, c"fake_cuda_given")?;
        let own = known.wrapping_byte_offset(offset);
        // SAFETY: the offset is that of the driver's `cuInit`.
        let own = unsafe { std::mem::transmute::<*mut c_void, Init>(own) };
        // SAFETY: the driver's function.
        ok(unsafe { own(0) })?;
        self.init()
    }

    fn context(&self) -> Result<()> {
        let mut context = null_mut();
        // SAFETY: writes a handle.
        ok(unsafe { (self.retain)(&raw mut context, 0) })?;
        // SAFETY: the context just made.
        ok(unsafe { (self.set_current)(context) })
    }

    #[inline]
    fn alloc(&self, bytes: usize) -> Result<u64, c_int> {
        let mut address = 0;
        // SAFETY: writes an address.
        let result = unsafe { (self.alloc)(&raw mut address, bytes) };
        if result == 0 { Ok(address) } else { Err(result) }
    }

    #[inline]
    fn free(&self, address: u64) -> Result<(), c_int> {
        // SAFETY: one of the driver's addresses.
        let result = unsafe { (self.free)(address) };
        if result == 0 { Ok(()) } else { Err(result) }
    }

    #[inline(never)]
    fn pairs(&self, bytes: usize, count: u32) -> Result<(), c_int> {
        for _ in 0..count {
            let address = self.alloc(bytes)?;
            self.free(address)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn random_pairs(
        &self,
        held: &mut [u64],
        bytes: usize,
        count: u32,
        seed: &mut usize,
    ) -> Result<(), c_int> {
        let places = held.len().max(1);
        for _ in 0..count {
            // Knuth's generator: two instructions.
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let Some(place) = held.get_mut((*seed >> 33) % places) else { break };
            let gone = std::mem::replace(place, self.alloc(bytes)?);
            self.free(gone)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn launches(&self, count: u32) -> Result<(), c_int> {
        let kernel = std::ptr::without_provenance_mut(KERNEL);
        for _ in 0..count {
            // SAFETY: the stub looks at none of this.
            let result =
                unsafe { (self.launch)(kernel, 64, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()) };
            if result != 0 {
                return Err(result);
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn infos(&self, count: u32) -> Result<(), c_int> {
        let (mut free, mut total) = (0, 0);
        for _ in 0..count {
            // SAFETY: writes two numbers.
            let result = unsafe { (self.info)(&raw mut free, &raw mut total) };
            if result != 0 {
                return Err(result);
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn devices(&self, count: u32) -> Result<(), c_int> {
        let mut device = 0;
        for _ in 0..count {
            // SAFETY: writes a number.
            let result = unsafe { (self.device)(&raw mut device) };
            if result != 0 {
                return Err(result);
            }
        }
        Ok(())
    }
}

fn ok(result: c_int) -> Result<()> {
    ensure!(result == 0, "the driver answers {result}");
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let start = Instant::now();
    work()?;
    Ok(u64::try_from(start.elapsed().as_nanos())?)
}

/// Stops for whoever traces this process.
fn stop() {
    // SAFETY: a breakpoint; the tracer lets the process go on.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("int3", options(nomem, nostack));
    }
}

struct State {
    driver: Driver,
    held: Vec<u64>,
    seed: usize,
}

impl State {
    fn call(&mut self, call: &str, bytes: usize, count: u32) -> Result<()> {
        let result = match call {
            "pair" => self.driver.pairs(bytes, count),
            "random" => self.driver.random_pairs(&mut self.held, bytes, count, &mut self.seed),
            "launch" => self.driver.launches(count),
            "info" => self.driver.infos(count),
            "device" => self.driver.devices(count),
            "init" => return self.driver.init().map(|_| ()),
            other => bail!("no call {other}"),
        };
        result.map_err(|code| anyhow::anyhow!("the driver answers {code}"))
    }

    fn hold(&mut self, count: usize, bytes: usize) -> Result<()> {
        for _ in 0..count {
            let address =
                self.driver.alloc(bytes).map_err(|code| anyhow::anyhow!("the driver answers {code}"))?;
            self.held.push(address);
        }
        Ok(())
    }

    fn step(&mut self, words: &[&str]) -> Result<u64> {
        Ok(match *words {
            ["init"] => self.driver.init()?,
            ["attach", offset] => self.driver.attach(offset.parse()?)?,
            ["context"] => timed(|| self.driver.context())?,
            ["hold", count, bytes] => {
                let (count, bytes) = (count.parse()?, bytes.parse()?);
                timed(|| self.hold(count, bytes))?
            }
            ["trace", call, bytes, count] => {
                let (bytes, count) = (bytes.parse()?, count.parse()?);
                nix::sys::ptrace::traceme().context("being traced")?;
                stop();
                let result = self.call(call, bytes, count);
                stop();
                result?;
                0
            }
            [call, bytes, count] => {
                let (bytes, count) = (bytes.parse()?, count.parse()?);
                timed(|| self.call(call, bytes, count))?
            }
            _ => bail!("no such step"),
        })
    }
}

fn run() -> Result<()> {
    let mut state = State { driver: Driver::open()?, held: Vec::new(), seed: 1 };
    let mut out = std::io::stdout().lock();
    writeln!(out, "up")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match state.step(&words) {
            Ok(ns) => writeln!(out, "{ns}")?,
            Err(error) => writeln!(out, "failed: {line}: {error:#}")?,
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}
