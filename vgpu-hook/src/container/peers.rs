//! The other processes of the container, as a claim that found no room looks at them.

use super::Container;
use super::state::Held;
use crate::sys;

/// How often dead processes are looked for where nothing asks for it.
pub(super) const REAP_EVERY_NS: u64 = 1_000_000_000;

/// Takes and gives back the slots of dead processes.
#[derive(Debug)]
pub(crate) struct Peers<'c> {
    container: &'c Container,
    /// One thread at a time: the kernel's lock does not tell threads apart, and one that gave a slot back early would
    /// let its new owner in while another is still clearing it.
    held: Option<Held<'c>>,
}

impl<'c> Peers<'c> {
    #[inline]
    pub(super) fn new(container: &'c Container) -> Self {
        Self { container, held: None }
    }
}

impl mullion_accounting::Peers for Peers<'_> {
    fn take(&mut self, slot: usize) -> bool {
        if self.container.slot == Some(slot) {
            return false;
        }
        let held = self.container.state.reaping.lock();
        let taken = self.container.file.take(slot);
        if taken {
            self.held = Some(held);
        }
        taken
    }

    fn give_back(&mut self, slot: usize) {
        // The dead process is off this card; now off the others as well, before the slot is anybody's.
        for card in self.container.cards() {
            card.memory.reap(slot);
        }
        self.container.file.give_back(slot);
        self.held = None;
    }

    fn pause(&mut self, units: u32) {
        sys::sleep_ns(u64::from(units) * 1000);
    }
}
