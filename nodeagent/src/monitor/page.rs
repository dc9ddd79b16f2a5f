//! The control page of a grant, changed in place: its inode is the agent's own and what the container has mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU32;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use mullion_region::page::{self, PageSpec};
use nix::fcntl::OFlag;

use crate::monitor::wake;

/// An open control page.
#[derive(Debug)]
pub struct Page {
    file: File,
    /// What it says.
    pub spec: PageSpec,
}

impl Page {
    /// Opens and reads the page at `path`.
    ///
    /// # Errors
    /// The system's word, also where it is no page.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let mut bytes = [0; page::LEN];
        file.read_exact_at(&mut bytes, 0)?;
        let spec =
            page::decode(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
        Ok(Self { file, spec })
    }

    /// Says that the agent looks after the page. Only [`crate::monitor::heart`] does: whoever else wrote here would write what
    /// the clock said some time ago over what it said since.
    ///
    /// # Errors
    /// The system's word.
    pub fn beat(&mut self, now_ns: u64) -> io::Result<()> {
        self.spec.heartbeat_ns = now_ns;
        self.put(page::HEARTBEAT_AT, &now_ns.to_le_bytes())
    }

    /// Changes the scale of the cards that are named, by place. Who waits is woken where that lets him go sooner. A reader
    /// sees the old scales or the new ones: the sequence is odd in between.
    ///
    /// # Errors
    /// The system's word.
    pub fn steer(&mut self, scales: &[(usize, NonZeroU32)]) -> io::Result<()> {
        let old: Vec<NonZeroU32> = self.spec.devices.iter().map(|d| d.scale).collect();
        let changed: Vec<(usize, NonZeroU32, NonZeroU32)> = scales
            .iter()
            .filter_map(|(card, new)| old.get(*card).map(|old| (*card, *old, *new)))
            .filter(|(_, old, new)| old != new)
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        let odd = self.spec.sequence | 1;
        self.put(page::SEQUENCE_AT, &odd.to_le_bytes())?;
        for (card, _, new) in &changed {
            let at = page::DEVICES_AT + page::DEVICE_SIZE * card + page::SCALE_AT;
            self.put(at, &new.get().to_le_bytes())?;
        }
        let faster = changed.iter().any(|(_, old, new)| new < old);
        if faster {
            self.spec.futex = self.spec.futex.wrapping_add(1);
            self.put(page::FUTEX_AT, &self.spec.futex.to_le_bytes())?;
        }
        self.spec.sequence = odd.wrapping_add(1);
        self.put(page::SEQUENCE_AT, &self.spec.sequence.to_le_bytes())?;
        if faster {
            wake::all(&self.file)?;
        }
        Ok(())
    }

    /// Changes the futex word and wakes who waits: something else than a scale lets them go.
    ///
    /// # Errors
    /// The system's word.
    pub fn ring(&mut self) -> io::Result<()> {
        self.spec.futex = self.spec.futex.wrapping_add(1);
        self.put(page::FUTEX_AT, &self.spec.futex.to_le_bytes())?;
        wake::all(&self.file)
    }

    /// One word at a time, which the kernel copies whole as words are aligned: a reader never sees half of one.
    fn put(&self, at: usize, word: &[u8]) -> io::Result<()> {
        self.file.write_all_at(word, at as u64)
    }
}
