//! Graphs and stream capture.

use crate::abi::{Code, DevicePtr, Handle};
use crate::driver::Driver;

impl Driver {
    pub(crate) fn refuse_during_capture(&self) -> Result<(), Code> {
        Ok(())
    }

    pub(crate) fn refuse_on(&self, capture: Option<u64>) -> Result<(), Code> {
        if capture.is_some() { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    pub(crate) fn join_capture(&mut self, stream: Handle, capture: u64) {
        if let Some(stream) = self.objects.streams.get_mut(&stream) {
            stream.capture = Some(capture);
        }
    }

    pub(crate) fn capture_kernel(&mut self, _capture: u64, _ns: u64) -> Result<(), Code> {
        Ok(())
    }

    pub(crate) fn capture_copy(&mut self, _capture: u64) -> Result<(), Code> {
        Ok(())
    }

    pub(crate) fn capture_host(&mut self, _capture: u64) -> Result<(), Code> {
        Ok(())
    }

    pub(crate) fn free_graph_address(&mut self, _address: DevicePtr) -> Result<(), Code> {
        Err(Code::INVALID_VALUE)
    }
}
