//! The other processes of the container, as a claim that found no room looks at them.

use super::Container;
use super::slots::UsageFile;
use super::state::Held;
use crate::sys::{self, Fd};

/// How often dead processes are looked for where nothing asks for it.
pub(super) const REAP_EVERY_NS: u64 = 1_000_000_000;

/// Takes and gives back the slots of dead processes.
#[derive(Debug)]
pub(crate) struct Peers<'c> {
    container: &'c Container,
    looking: Option<Looking<'c>>,
}

/// A look at the others' lock bytes.
#[derive(Debug)]
struct Looking<'c> {
    fd: Fd,
    /// One thread at a time: a description's locks do not tell threads apart, and none may give a slot back while another
    /// is still clearing it.
    _held: Held<'c>,
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.fd.close();
    }
}

impl<'c> Peers<'c> {
    #[inline]
    pub(super) fn new(container: &'c Container) -> Self {
        Self { container, looking: None }
    }

    fn look(&mut self) -> Option<&Looking<'c>> {
        if self.looking.is_none() {
            let held = self.container.state.reaping.lock();
            let fd = self.container.file.open_again().ok()?;
            self.looking = Some(Looking { fd, _held: held });
        }
        self.looking.as_ref()
    }
}

impl mullion_accounting::Peers for Peers<'_> {
    fn take(&mut self, slot: usize) -> bool {
        self.container.slot != Some(slot) && self.look().is_some_and(|look| UsageFile::take(look.fd, slot))
    }

    fn give_back(&mut self, slot: usize) {
        // The dead process is off this card; now off the others as well, before the slot is anybody's.
        for card in self.container.cards() {
            card.memory.reap(slot);
        }
        if let Some(look) = &self.looking {
            self.container.file.give_back(look.fd, slot);
        }
    }

    fn pause(&mut self, units: u32) {
        self.looking = None;
        sys::sleep_ns(u64::from(units) * 1000);
    }
}
