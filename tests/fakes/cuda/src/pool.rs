//! Memory pools.

use crate::abi::{Code, DevicePtr, Handle};
use crate::driver::Driver;

impl Driver {
    pub(crate) fn synchronised(&mut self) {}

    pub(crate) fn free_pooled(&mut self, _address: DevicePtr, _pool: Handle) -> Result<(), Code> {
        Err(Code::INVALID_VALUE)
    }
}
