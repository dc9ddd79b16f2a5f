//! The library as a program meets it: a copy of its own for each test, because one copy is one process's driver.
#![allow(dead_code, reason = "each test binary uses its part")]
#![expect(unsafe_code, reason = "calls the C interface")]
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

pub const MIB: u64 = 1 << 20;

/// What a context takes.
pub const CONTEXT: u64 = 400 * MIB;

static ENVIRONMENT: Mutex<()> = Mutex::new(());

pub struct Cuda {
    library: Library,
    _folder: Option<tempfile::TempDir>,
}

/// An argument of any entry point: integers and pointers alike go in integer registers.
pub trait Argument {
    fn word(self) -> u64;
}

macro_rules! integers {
    ($($ty:ty)*) => {$(
        impl Argument for $ty {
            #[allow(clippy::cast_lossless, clippy::cast_sign_loss, reason = "as the calling convention widens it")]
            fn word(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integers! { i32 u32 u64 usize }

impl<T> Argument for &mut T {
    fn word(self) -> u64 {
        std::ptr::from_mut(self).expose_provenance() as u64
    }
}

impl Argument for &CStr {
    fn word(self) -> u64 {
        self.as_ptr().expose_provenance() as u64
    }
}

/// `call!(cuda.cuMemAlloc_v2(&mut p, 100_u64))`.
#[macro_export]
macro_rules! call {
    ($cuda:ident . $name:ident ( $($arg:expr),* $(,)? )) => {
        $cuda.call(stringify!($name), &[$($crate::common::Argument::word($arg)),*])
    };
}

/// As `call!`, and it has to succeed.
#[macro_export]
macro_rules! ok {
    ($cuda:ident . $name:ident ( $($arg:expr),* $(,)? )) => {
        assert_eq!($cuda.call(stringify!($name), &[$($crate::common::Argument::word($arg)),*]), 0, stringify!($name))
    };
}

pub fn built() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libcuda.so")
}

impl Cuda {
    /// A copy with these environment variables, before `cuInit`.
    pub fn load(variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("libcuda.so.1");
        std::fs::copy(built(), &copy).unwrap();
        let cuda = Self { library: open(&copy), _folder: Some(folder) };
        cuda.init(variables);
        cuda
    }

    fn init(&self, variables: &[(&str, &str)]) {
        let _one_at_a_time = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, value) in variables {
            // SAFETY: the library reads the environment under the same lock.
            unsafe { std::env::set_var(name, value) };
        }
        assert_eq!(self.call("cuInit", &[0]), 0);
        // The version is read once, when it is asked for first.
        let mut version = 0_i32;
        assert_eq!(self.call("cuDriverGetVersion", &[(&mut version).word()]), 0);
        for (name, _) in variables {
            // SAFETY: as above.
            unsafe { std::env::remove_var(name) };
        }
    }

    /// A copy with a current primary context on card 0.
    pub fn ready(variables: &[(&str, &str)]) -> Self {
        let cuda = Self::load(variables);
        let mut context = 0_u64;
        assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[(&mut context).word(), 0]), 0);
        assert_eq!(cuda.call("cuCtxSetCurrent", &[context]), 0);
        cuda
    }

    /// The library in this process's environment as it is.
    pub fn here() -> Self {
        let cuda = Self { library: open(&built()), _folder: None };
        assert_eq!(cuda.call("cuInit", &[0]), 0);
        let mut context = 0_u64;
        assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[(&mut context).word(), 0]), 0);
        assert_eq!(cuda.call("cuCtxSetCurrent", &[context]), 0);
        cuda
    }

    pub fn address(&self, symbol: &str) -> u64 {
        let name = CString::new(symbol).unwrap();
        // SAFETY: only the address is used here.
        let found = unsafe { self.library.get::<unsafe extern "C" fn()>(name.as_bytes_with_nul()) };
        found.map_or(0, |f| (*f as *const ()).expose_provenance() as u64)
    }

    pub fn call(&self, symbol: &str, arguments: &[u64]) -> i32 {
        i32::from_ne_bytes(self.word(symbol, arguments).to_ne_bytes()[..4].try_into().unwrap())
    }

    /// An entry point's whole answer.
    pub fn word(&self, symbol: &str, arguments: &[u64]) -> u64 {
        type Any = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> u64;
        let mut a = [0; 12];
        a[..arguments.len()].copy_from_slice(arguments);
        let name = CString::new(symbol).unwrap();
        // SAFETY: entry points take integers and pointers only; superfluous arguments are ignored by the calling convention.
        let function = unsafe { self.library.get::<Any>(name.as_bytes_with_nul()) }.unwrap();
        // SAFETY: the tests pass what the interface asks for.
        unsafe { function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]) }
    }

    pub fn given(&self) -> u64 {
        self.word("fake_cuda_given", &[0])
    }

    pub fn given_on_card(&self) -> u64 {
        self.word("fake_cuda_given_on_card", &[0])
    }

    /// Bytes beyond the context's.
    pub fn beyond(&self) -> u64 {
        self.given() - CONTEXT
    }

    /// A kernel of that name.
    pub fn kernel(&self, name: &CStr) -> u64 {
        let (mut module, mut function) = (0_u64, 0_u64);
        assert_eq!(self.call("cuModuleLoadData", &[(&mut module).word(), c".version 8.0".word()]), 0);
        assert_eq!(self.call("cuModuleGetFunction", &[(&mut function).word(), module, name.word()]), 0);
        function
    }

    /// Launches one block of 32 threads.
    pub fn launch(&self, function: u64, stream: u64) -> i32 {
        self.call("cuLaunchKernel", &[function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0])
    }
}

fn open(path: &Path) -> Library {
    // SAFETY: the library's initialisers do nothing.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

/// Runs the test `name` of this binary in a process of its own, with its role in `FAKE_CUDA_TEST_ROLE`.
pub fn process(name: &str, role: &str, variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env("FAKE_CUDA_TEST_ROLE", role);
    command.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// The role of this process, if it was started by [`process`].
pub fn role() -> Option<String> {
    std::env::var("FAKE_CUDA_TEST_ROLE").ok()
}

/// `cuIpcOpenMemHandle_v2`, whose handle goes by value.
pub fn open_ipc(address: u64, handle: [u64; 8]) -> Result<u64, i32> {
    #[repr(C)]
    struct Handle([u64; 8]);
    type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
    let place = std::ptr::with_exposed_provenance::<()>(usize::try_from(address).unwrap());
    // SAFETY: the address of that entry point, whose signature this is.
    let function = unsafe { std::mem::transmute::<*const (), Open>(place) };
    let mut p = 0;
    // SAFETY: a place for the answer, and a handle of the interface.
    match unsafe { function(&raw mut p, Handle(handle), 1) } {
        0 => Ok(p),
        code => Err(code),
    }
}
