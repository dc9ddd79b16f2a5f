//! The tables of everything that has a handle.

use std::collections::{BTreeMap, HashMap};

use crate::abi::{DevicePtr, Handle};
use crate::driver::Driver;
use crate::module::{Function, Module};
use crate::stream::{Event, Stream};

/// Objects by handle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    /// Host memory by address: bytes, and whether it was allocated here.
    pub(crate) pinned: BTreeMap<DevicePtr, (u64, bool)>,
}

impl Driver {
    /// Drops what lived in a context.
    pub(crate) fn drop_context_objects(&mut self, context: Handle) {
        let gone: Vec<Handle> = self
            .objects
            .modules
            .iter()
            .filter(|(_, m)| m.context == Some(context))
            .map(|(h, _)| *h)
            .collect();
        for module in gone {
            // It was in the table a moment ago.
            let _ = self.unload(module);
        }
        self.objects.streams.retain(|_, s| s.context != context);
        self.objects.events.retain(|_, e| e.context != context);
    }
}
