//! Takes what dead processes held off a container's books, in a process of its own.
//!
//! A total is shared with processes that run, so it can only be changed by atomic operations, and those need a mapping.
//! The file is its tenant's, who can cut it or punch holes into it at any time: whoever has it mapped then may be killed
//! by SIGBUS. So the agent maps none; it starts this, which maps one file, does what the container's own next process
//! would do when it finds no room, and ends. Where it is killed half way, a total stays too high, which costs
//! processes in the container a sum and nobody a byte (`mullion-accounting`).

#![expect(unsafe_code, reason = "a mapping of a file that others write, in a process that may die of it")]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mullion_accounting::{Account, Slot};
use mullion_region::usage::{EXTENSION_AT, FILE_LEN, SLOTS};
use mullion_region::{MAX_DEVICES, extension};
use nix::libc::c_void;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::monitor::files::{take_slot, yield_slot};

/// The word that makes the agent's program do this and nothing else; the file is its standard input.
pub const COMMAND: &str = "reap-dead-slots";

const LENGTH: NonZeroUsize = NonZeroUsize::new(FILE_LEN).unwrap();

/// The program behind [`COMMAND`].
#[must_use]
pub fn run() -> ExitCode {
    let file = std::io::stdin().as_fd().try_clone_to_owned().map(File::from);
    match file.and_then(|file| reap(&file)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dead slots are left to the container: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Mapping(NonNull<c_void>);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, of this length, and no reference into it outlives it.
        let _ = unsafe { munmap(self.0, FILE_LEN) };
    }
}

impl Mapping {
    fn at<T>(&self, offset: usize) -> *const T {
        self.0.as_ptr().wrapping_byte_add(offset).cast()
    }

    fn mark(&self) -> &AtomicU32 {
        // SAFETY: four bytes inside the mapping, aligned as the layout's constants assert, changed by atomics alone.
        unsafe { &*self.at(EXTENSION_AT + extension::HIGH_WATER_AT) }
    }

    fn total(&self, card: usize) -> Option<&AtomicU64> {
        let at = extension::card_offset(card)? + extension::TOTAL_AT;
        // SAFETY: eight bytes inside the mapping, aligned as the layout's constants assert, changed by atomics alone.
        Some(unsafe { &*self.at(at) })
    }

    fn slots(&self, card: usize) -> Option<&[Slot<AtomicU64>]> {
        let at = extension::card_slots_offset(card)?;
        // SAFETY: all slots of a card lie inside the mapping, aligned as the layout's constants assert; `Slot` is two
        // words in the layout's order, and both are changed by atomics alone.
        Some(unsafe { std::slice::from_raw_parts(self.at(at), SLOTS) })
    }
}

/// Reaps every slot with charges whose owner is dead; how many that were.
///
/// # Errors
/// A file that is not as long as one of ours, and the system's word.
pub fn reap(file: &File) -> io::Result<usize> {
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() < FILE_LEN as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a fresh mapping that overlaps nothing. That it may end in SIGBUS is what this process is for.
    let mapped = unsafe { mmap(None, LENGTH, protection, MapFlags::MAP_SHARED, file, 0) };
    let mapping = Mapping(mapped?);
    let mark = mapping.mark();
    let cards: Vec<_> = (0..MAX_DEVICES)
        .filter_map(|card| {
            let slots = mapping.slots(card)?;
            Some((Account::new(mapping.total(card)?, slots, mark, 0, 0)?, slots))
        })
        .collect();
    let high = usize::try_from(mark.load(Ordering::SeqCst)).unwrap_or(SLOTS).min(SLOTS);
    let mut reaped = 0;
    for slot in 0..high {
        let charged = |slot: &Slot<AtomicU64>| {
            slot.claimed.load(Ordering::SeqCst) != 0 || slot.settled.load(Ordering::SeqCst) != 0
        };
        let any = cards.iter().any(|(_, slots)| slots.get(slot).is_some_and(charged));
        if !any || !take_slot(file, slot)? {
            continue;
        }
        for (account, _) in &cards {
            account.reap(slot);
        }
        yield_slot(file, slot)?;
        reaped += 1;
    }
    Ok(reaped)
}
