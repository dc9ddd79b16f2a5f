//! Pairs of an allocation and a free over a stub driver, for a clock or an instruction counter:
//!
//! ```text
//! pairs last-in-first-out|random|none LIVE PAIRS SLOTS
//! ```
//!
//! `LIVE` allocations are there throughout and `SLOTS` processes hold something; `none` does the same without the
//! accounting. Instructions for one pair are the difference of two runs whose `PAIRS` differ, by
//! `valgrind --tool=callgrind` or `perf stat -e instructions:u`.

use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use mullion_accounting::{Account, Entry, LEVELS, Peers, Pieces, Slot, Table, piece_len};

const SIZE: u64 = 512;

#[derive(Default)]
struct Heap([OnceLock<Box<[AtomicU64]>>; LEVELS]);

impl Pieces for Heap {
    type Word = AtomicU64;
    fn piece(&self, level: usize) -> Option<&[AtomicU64]> {
        let zeroed = || std::iter::repeat_with(AtomicU64::default).take(piece_len(level)).collect();
        self.0.get(level).map(|piece| &**piece.get_or_init(zeroed))
    }
    fn existing(&self, level: usize) -> Option<&[AtomicU64]> {
        self.0.get(level)?.get().map(|piece| &**piece)
    }
}

struct Alone;

impl Peers for Alone {
    fn take(&mut self, _: usize) -> bool {
        false
    }
    fn give_back(&mut self, _: usize) {}
    fn pause(&mut self, _: u32) {}
}

/// The stub driver: a stack of addresses.
struct Driver {
    free: Vec<u64>,
}

impl Driver {
    #[inline(never)]
    fn alloc(&mut self) -> u64 {
        black_box(self.free.pop().unwrap_or_default())
    }
    #[inline(never)]
    fn free(&mut self, address: u64) {
        self.free.push(black_box(address));
    }
}

type Card<'c> = (Account<'c, AtomicU64, AtomicU32>, &'c Table<Heap>);

#[inline(never)]
fn alloc(driver: &mut Driver, card: Option<&Card>) -> Option<u64> {
    let Some((account, table)) = card else { return Some(driver.alloc()) };
    let claim = account.claim(SIZE, &mut Alone).ok()?;
    let address = driver.alloc();
    account.settle(claim);
    table.insert(address, &Entry { size: SIZE, card: 0, kind: 1, note: 0 }).ok()?;
    Some(address)
}

#[inline(never)]
fn free(driver: &mut Driver, card: Option<&Card>, address: u64) -> Option<()> {
    let Some((account, table)) = card else {
        driver.free(address);
        return Some(());
    };
    let entry = table.take(address)?;
    driver.free(address);
    account.free(entry.size);
    Some(())
}

fn main() {
    let mut words = std::env::args().skip(1);
    let how = words.next().unwrap_or_else(|| "last-in-first-out".to_owned());
    let mut number = |default: usize| words.next().and_then(|word| word.parse().ok()).unwrap_or(default);
    let (live, pairs, processes) = (number(0), number(10_000_000), number(1).max(1));
    let (total, mark) = (AtomicU64::new(0), AtomicU32::new(u32::try_from(processes).unwrap_or(1)));
    let slots: Vec<Slot<AtomicU64>> =
        std::iter::repeat_with(Slot::default).take(1024.max(processes)).collect();
    for slot in slots.iter().take(processes).skip(1) {
        slot.claimed.store(SIZE, Ordering::SeqCst);
        slot.settled.store(SIZE, Ordering::SeqCst);
        total.fetch_add(SIZE, Ordering::SeqCst);
    }
    let table = Table::new(Heap::default(), AtomicU64::new(0));
    let card = Account::new(&total, &slots, &mark, 0, 1 << 40).map(|account| (account, &table));
    let card = card.as_ref().filter(|_| how != "none");
    let free_addresses = (0..live as u64 + 16).map(|n| 0x7f12_3400_0000 + SIZE * n).collect();
    let mut driver = Driver { free: free_addresses };
    let mut held: Vec<u64> = (0..live).filter_map(|_| alloc(&mut driver, card)).collect();
    // Which of the live ones goes next, by a generator that costs little.
    let mut seed = 1_usize;
    let mut done = 0_usize;
    let start = Instant::now();
    for _ in 0..pairs {
        let Some(address) = alloc(&mut driver, card) else { break };
        let gone = if how == "random" && !held.is_empty() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (seed >> 33) % held.len();
            std::mem::replace(&mut held[at], address)
        } else {
            address
        };
        if free(&mut driver, card, gone).is_none() {
            break;
        }
        done += 1;
    }
    let spent = start.elapsed();
    let each = spent.as_secs_f64() * 1e9 / f64::from(u32::try_from(done).unwrap_or(u32::MAX));
    println!("{how}, {live} live, {processes} processes: {done} pairs, {each:.1} ns each");
}
