//! Return codes.

use std::ffi::CStr;

use fake_state::mig::Refusal;

/// An `nvmlReturn_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

impl Code {
    pub(crate) const UNINITIALIZED: Self = Self(1);
    pub(crate) const INVALID_ARGUMENT: Self = Self(2);
    pub(crate) const NOT_SUPPORTED: Self = Self(3);
    pub(crate) const NOT_FOUND: Self = Self(6);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(7);
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(9);
    pub(crate) const TIMEOUT: Self = Self(10);
    pub(crate) const GPU_IS_LOST: Self = Self(15);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub(crate) const UNKNOWN: Self = Self(999);
}

impl From<Refusal> for Code {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.code())
    }
}

/// The state file went away or broke under a running program; the driver has no better word for that.
impl From<fake_state::Error> for Code {
    fn from(_: fake_state::Error) -> Self {
        Self::UNKNOWN
    }
}

/// The library's texts.
const TEXTS: &[(u32, &CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (5, c"Already Initialized"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (14, c"Corrupted infoROM"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (17, c"GPU access blocked by the operating system"),
    (18, c"Driver/library version mismatch"),
    (19, c"In use by another client"),
    (20, c"Insufficient Memory"),
    (21, c"No data"),
    (22, c"The requested vgpu operation is not available on target device, because ECC is enabled"),
    (23, c"Insufficient Resources"),
    (24, c"Frequency Not Supported"),
    (25, c"Argument version mismatch"),
    (26, c"This functionality is deprecated"),
    (27, c"System is not in ready state"),
    (28, c"No GPUs found"),
    (29, c"Invalid State"),
    (30, c"Reset type is not supported"),
];

/// The text of a code.
pub(crate) fn text(code: u32) -> &'static CStr {
    TEXTS.iter().find(|(c, _)| *c == code).map_or(c"Unknown Error", |(_, text)| text)
}
