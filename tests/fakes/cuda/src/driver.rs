//! What the driver of one process knows.

use std::collections::{BTreeMap, HashMap};

use fake_state::live::Live;

use crate::abi::{Code, Device, DevicePtr, Handle};
use crate::cards::{CardInfo, Node};
use crate::context::Context;
use crate::memory::{Alloc, Backing};
use crate::space::{BLOCK, LARGEST_PIECE, Shared, Space, Use, round_up};

/// Handles start here, 64 apart, over all kinds of objects: far from real addresses, so a mix-up is found and not followed.
const FIRST_HANDLE: usize = 0x4655_4441_0000;
const HANDLE_STEP: usize = 64;

/// How old the state file's other users may be, ns.
const REFRESH_EVERY: u64 = 10_000_000;

/// The driver of this process.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) node: Node,
    pub(crate) cards: Vec<CardInfo>,
    pub(crate) live: &'static Live,
    pub(crate) contexts: HashMap<Handle, Context>,
    /// By ordinal; none while inactive.
    pub(crate) primaries: Vec<crate::context::Primary>,
    pub(crate) space: Space,
    pub(crate) shared: Vec<Shared>,
    pub(crate) allocs: BTreeMap<DevicePtr, Alloc>,
    pub(crate) objects: crate::objects::Objects,
    next: usize,
    /// Bytes that the state file's scripted processes hold, by ordinal, and when they were read.
    scripted: Vec<u64>,
    refreshed: u64,
}

impl Driver {
    pub(crate) fn start() -> Result<Self, Code> {
        let node = Node::find()?;
        let cards = node.visible();
        if cards.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        let live = match &node.store {
            Some(store) => Live::open(store.path()).map_err(|_| Code::OPERATING_SYSTEM)?,
            None => Live::private().map_err(|_| Code::OPERATING_SYSTEM)?,
        };
        let delay = number("FAKE_CUDA_RELEASE_DELAY_MS", 0);
        live.claim(u32::try_from(delay).unwrap_or(u32::MAX)).map_err(|_| Code::OPERATING_SYSTEM)?;
        let live: &'static Live = Box::leak(Box::new(live));
        if std::env::var("FAKE_CUDA_CLOCK").is_ok_and(|v| v == "simulated") {
            fake_state::live::work::simulate(live.region());
        }
        let count = cards.len();
        let mut driver = Self {
            node,
            live,
            contexts: HashMap::new(),
            primaries: Vec::new(),
            space: Space::reserve(),
            shared: (0..count).map(|_| Shared::default()).collect(),
            allocs: BTreeMap::new(),
            objects: crate::objects::Objects::default(),
            next: FIRST_HANDLE,
            scripted: vec![0; count],
            refreshed: 0,
            cards,
        };
        for _ in 0..count {
            let handle = driver.handle();
            driver.primaries.push(crate::context::Primary::new(handle));
        }
        driver.refresh();
        Ok(driver)
    }

    /// A handle that was never given before.
    pub(crate) fn handle(&mut self) -> Handle {
        self.next += HANDLE_STEP;
        Handle(self.next)
    }

    /// The ordinal behind a `CUdevice`.
    pub(crate) fn ordinal(&self, device: Device) -> Result<usize, Code> {
        usize::try_from(device).ok().filter(|d| *d < self.cards.len()).ok_or(Code::INVALID_DEVICE)
    }

    fn refresh(&mut self) {
        let Some(store) = &self.node.store else { return };
        let now = fake_state::live::work::now(self.live.region());
        if now < self.refreshed + REFRESH_EVERY && self.refreshed != 0 {
            return;
        }
        self.refreshed = now;
        // A state file that cannot be read right now leaves the last reading.
        if let Ok(state) = store.read() {
            for (card, used) in self.cards.iter().zip(&mut self.scripted) {
                *used = state.cards.get(card.index).map_or(0, |c| c.used_mib() << 20);
            }
        }
    }

    /// Bytes that programs on the simulated driver can have of the card.
    pub(crate) fn capacity(&mut self, ordinal: usize) -> u64 {
        self.refresh();
        self.cards[ordinal].memory.saturating_sub(self.scripted[ordinal])
    }

    /// Free bytes of the card now, over all processes.
    pub(crate) fn free(&mut self, ordinal: usize) -> u64 {
        let given = self.live.given(self.cards[ordinal].index);
        self.capacity(ordinal).saturating_sub(given)
    }

    /// Takes bytes from a card.
    pub(crate) fn charge(&mut self, ordinal: usize, bytes: u64) -> Result<(), Code> {
        let capacity = self.capacity(ordinal);
        let given = bytes == 0 || self.live.give(self.cards[ordinal].index, bytes, capacity);
        if given { Ok(()) } else { Err(Code::OUT_OF_MEMORY) }
    }

    /// Gives bytes back to a card.
    pub(crate) fn uncharge(&self, ordinal: usize, bytes: u64) {
        self.live.take_back(self.cards[ordinal].index, bytes);
    }

    /// Memory of a card by the rule of [`crate::space`], with addresses.
    pub(crate) fn obtain(
        &mut self,
        ordinal: usize,
        size: u64,
        what: Use,
    ) -> Result<(DevicePtr, Backing), Code> {
        if size > LARGEST_PIECE {
            let length = round_up(size, BLOCK);
            self.charge(ordinal, length)?;
            let address = self.space.take(length, BLOCK).inspect_err(|_| self.uncharge(ordinal, length))?;
            return Ok((address, Backing::Blocks(length)));
        }
        if let Some(address) = self.shared[ordinal].of(what).take(size) {
            return Ok((address, Backing::Piece(size, what)));
        }
        self.charge(ordinal, BLOCK)?;
        let block = self.space.take(BLOCK, BLOCK).inspect_err(|_| self.uncharge(ordinal, BLOCK))?;
        let pieces = self.shared[ordinal].of(what);
        pieces.add_block(block);
        let address = pieces.take(size).ok_or(Code::OUT_OF_MEMORY)?;
        Ok((address, Backing::Piece(size, what)))
    }

    /// Gives back what [`Self::obtain`] gave.
    pub(crate) fn give_back(&mut self, ordinal: usize, address: DevicePtr, backing: Backing) {
        match backing {
            Backing::Blocks(length) => {
                self.space.give(address, length);
                self.uncharge(ordinal, length);
            }
            Backing::Piece(size, what) => {
                if let Some(block) = self.shared[ordinal].of(what).give(address, size) {
                    self.space.give(block, BLOCK);
                    self.uncharge(ordinal, BLOCK);
                }
            }
            Backing::Addresses(length) => self.space.give(address, length),
            Backing::Nothing => {}
        }
    }

    /// The allocation that an address lies in.
    pub(crate) fn containing(&self, address: DevicePtr) -> Option<(DevicePtr, &Alloc)> {
        let (start, alloc) = self.allocs.range(..=address).next_back()?;
        (address < start + alloc.size.max(1)).then_some((*start, alloc))
    }
}

/// A whole number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.trim().parse().ok()).unwrap_or(default)
}
