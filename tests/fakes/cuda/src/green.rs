//! Green contexts.

use std::sync::Arc;

use crate::abi::{Code, Handle};
use crate::context::Cell;
use crate::driver::Driver;

impl Driver {
    pub(crate) fn green_context(&self, green: Handle) -> Result<Arc<Cell>, Code> {
        let context = self.contexts.get(&green).filter(|c| c.green);
        context.map(|c| Arc::clone(&c.cell)).ok_or(Code::INVALID_HANDLE)
    }
}
