//! The driver's own functions: found in the loaded `libcuda` and `libnvidia-ml` by an ELF look-up of our own, never
//! through `dlsym` or the search order, in which this library stands first.

#![expect(unsafe_code, reason = "calls functions by addresses found in ELF images")]

pub(crate) mod elf;

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};

use elf::Image;

/// A library of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// `libcuda.so.1`.
    Cuda,
    /// `libnvidia-ml.so.1`.
    Nvml,
}

/// Where a library is loaded: an image, once found, stays (it is pinned).
static CUDA: AtomicUsize = AtomicUsize::new(0);
static NVML: AtomicUsize = AtomicUsize::new(0);

impl Library {
    const fn place(self) -> &'static AtomicUsize {
        match self {
            Self::Cuda => &CUDA,
            Self::Nvml => &NVML,
        }
    }

    /// Beginning of the file's name; what follows is a version.
    const fn name(self) -> &'static [u8] {
        match self {
            Self::Cuda => b"libcuda.so",
            Self::Nvml => b"libnvidia-ml.so",
        }
    }

    /// Whether the program has loaded this library.
    pub(crate) fn is_loaded(self) -> bool {
        self.place().load(Acquire) != 0 || self.find_image().is_some()
    }

    fn find_image(self) -> Option<Image> {
        let image = elf::find(|image| image.is_called(self.name()))?;
        if self.place().load(Acquire) != image.base {
            // Waits until the thread that is loading it is done.
            crate::loading::pin(image.path);
            self.place().store(image.base, Release);
        }
        Some(image)
    }

    /// The address of `name` in this library; `None` when it is not loaded or lacks the function.
    pub(crate) fn function(self, name: &CStr) -> Option<usize> {
        self.find_image()?.function(name.to_bytes())
    }
}

/// One function of the driver, looked up at first use.
#[derive(Debug)]
pub(crate) struct Function {
    library: Library,
    name: &'static CStr,
    address: AtomicUsize,
}

/// Why there is no function to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// The library is not loaded.
    Library,
    /// The library lacks it: a driver older than the function.
    Function,
}

impl Function {
    pub(crate) const fn new(library: Library, name: &'static CStr) -> Self {
        Self { library, name, address: AtomicUsize::new(0) }
    }

    /// The address, found by one load when it is known.
    #[inline]
    pub(crate) fn address(&self) -> Result<usize, Missing> {
        match self.address.load(Acquire) {
            0 => self.find(),
            known => Ok(known),
        }
    }

    #[cold]
    fn find(&self) -> Result<usize, Missing> {
        let found = self.library.function(self.name);
        if let Some(address) = found {
            self.address.store(address, Release);
        }
        found.ok_or(if self.library.is_loaded() { Missing::Function } else { Missing::Library })
    }

    /// Fills in an address that the driver itself gave, where it exports none under the name.
    pub(crate) fn learn(&self, address: usize) {
        let _ = self.address.compare_exchange(0, address, Release, Acquire);
    }

    /// For tests: the function is this one.
    #[cfg(test)]
    pub(crate) fn pretend(&self, address: usize) {
        self.address.store(address, Release);
    }
}

/// A function of `libcuda` for this library's own use: `function!(cuCtxGetDevice: unsafe extern "C" fn(*mut CUdevice) ->
/// CUresult)` is an `Option` of that type, `None` when the driver is not loaded or lacks the function.
#[allow(unused_macros, reason = "used by the families")]
macro_rules! function {
    ($name:ident: $type:ty) => {{
        static FUNCTION: $crate::driver::Function = $crate::driver::Function::new(
            $crate::driver::Library::Cuda,
            match ::core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            },
        );
        FUNCTION.address().ok().map(|address| {
            // SAFETY: the driver's function of this name has this type (`cuda.h`).
            unsafe { ::core::mem::transmute::<usize, $type>(address) }
        })
    }};
}
#[allow(unused_imports, reason = "used by the families")]
pub(crate) use function;
