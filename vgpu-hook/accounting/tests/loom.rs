//! The memory orders, by loom, which tries what a weakly ordered processor may do. It takes sequentially consistent
//! operations for acquire and release only, so what holds here holds with less than the crate asks for.
//!
//! `LOOM_MAX_PREEMPTIONS=3 cargo test -p mullion-accounting --test loom`; 2 where the variable is not set.

#![expect(clippy::unwrap_used, clippy::unreachable, reason = "helpers of tests")]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;
use mullion_accounting::{Account, Cell, Entry, Mark, Peers, Pieces, Slot, Table, Tries, Word, piece_len};

#[derive(Debug)]
struct Loom(AtomicU64);

impl Word for Loom {
    fn load(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
    fn store(&self, value: u64) {
        self.0.store(value, Ordering::SeqCst);
    }
    fn swap(&self, value: u64) -> u64 {
        self.0.swap(value, Ordering::SeqCst)
    }
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }
    fn fetch_add(&self, value: u64) -> u64 {
        self.0.fetch_add(value, Ordering::SeqCst)
    }
    fn fetch_sub(&self, value: u64) -> u64 {
        self.0.fetch_sub(value, Ordering::SeqCst)
    }
}

struct High(AtomicU32);

impl Mark for High {
    fn load(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
    fn raise(&self, value: u32) {
        self.0.fetch_max(value, Ordering::SeqCst);
    }
}

struct Alive;

impl Peers for Alive {
    fn take(&mut self, _: usize) -> bool {
        false
    }
    fn give_back(&mut self, _: usize) {}
    fn pause(&mut self, _: u32) {
        thread::yield_now();
    }
}

const LIMIT: u64 = 2;

struct Card {
    total: Loom,
    slots: [Slot<Loom>; 2],
    mark: High,
    /// What the driver gave: the truth.
    given: AtomicU64,
}

impl Card {
    fn new(junk: u64) -> Self {
        let slot = || Slot { claimed: Loom(AtomicU64::new(0)), settled: Loom(AtomicU64::new(0)) };
        let (total, mark) = (Loom(AtomicU64::new(junk)), High(AtomicU32::new(2)));
        Self { total, slots: [slot(), slot()], mark, given: AtomicU64::new(0) }
    }

    fn account(&self, own: usize) -> Account<'_, Loom, High> {
        Account::new(&self.total, &self.slots, &self.mark, own, LIMIT).unwrap()
    }

    /// One try; whether it won, and then the driver's truth is within the limit.
    fn ask(&self, own: usize, bytes: u64) -> bool {
        let account = self.account(own);
        match account.attempt(bytes, &mut Tries::new(1), &mut Alive) {
            Some(Ok(claim)) => {
                let given = self.given.fetch_add(bytes, Ordering::SeqCst) + bytes;
                assert!(given <= LIMIT, "the driver gave {given}");
                account.settle(claim);
                true
            }
            _ => false,
        }
    }

    fn free(&self, own: usize, bytes: u64) {
        self.given.fetch_sub(bytes, Ordering::SeqCst);
        self.account(own).free(bytes);
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(body);
}

#[test]
fn one_of_two_wins() {
    model(|| {
        let card = Arc::new(Card::new(0));
        let other = Arc::clone(&card);
        let thread = thread::spawn(move || other.ask(1, 2));
        let won = card.ask(0, 2);
        assert_ne!(won, thread.join().unwrap());
    });
}

#[test]
fn never_two_win_when_a_crash_left_the_total_too_high() {
    model(|| {
        let card = Arc::new(Card::new(LIMIT));
        let other = Arc::clone(&card);
        let thread = thread::spawn(move || other.ask(1, 2));
        let won = card.ask(0, 2);
        assert!(!(won && thread.join().unwrap()));
    });
}

#[test]
fn what_is_freed_is_given_once() {
    for junk in [0, LIMIT] {
        model(move || {
            let card = Arc::new(Card::new(junk));
            assert!(card.ask(0, 2));
            let other = Arc::clone(&card);
            let thread = thread::spawn(move || other.ask(1, 1));
            card.free(0, 2);
            card.ask(0, 2);
            thread.join().unwrap();
        });
    }
}

/// A word of a table; loom looks only after those that the test's key can come to.
#[derive(Debug)]
enum Place {
    Far,
    Near(AtomicU64),
}

impl Place {
    fn near(&self) -> &AtomicU64 {
        match self {
            Self::Near(word) => word,
            Self::Far => unreachable!("a word that the key cannot come to"),
        }
    }
}

impl Cell for Place {
    fn peek(&self) -> u64 {
        self.near().load(Ordering::Relaxed)
    }
    fn read(&self) -> u64 {
        self.near().load(Ordering::Acquire)
    }
    fn put(&self, value: u64) {
        self.near().store(value, Ordering::Relaxed);
    }
    fn publish(&self, value: u64) {
        self.near().store(value, Ordering::Release);
    }
    fn grab(&self, current: u64, new: u64) -> bool {
        self.near().compare_exchange(current, new, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
    fn pause() {
        thread::yield_now();
    }
}

struct Smallest<W>(Vec<W>);

impl<W: Cell> Pieces for Smallest<W> {
    type Word = W;
    fn piece(&self, level: usize) -> Option<&[W]> {
        (level == 0).then_some(&self.0)
    }
    fn existing(&self, level: usize) -> Option<&[W]> {
        self.piece(level)
    }
}

const KEY: u64 = 0x7f00_0000_0200;

/// Where in the smallest piece `KEY` comes first.
fn place_of_key() -> usize {
    use std::sync::atomic::AtomicU64;
    let words = std::iter::repeat_with(AtomicU64::default).take(piece_len(0)).collect();
    let table = Table::new(Smallest(words), AtomicU64::new(0));
    table.insert(KEY, &entry(1)).unwrap();
    table.pieces().0.iter().position(|word| word.load(std::sync::atomic::Ordering::SeqCst) == KEY).unwrap()
}

fn entry(n: u64) -> Entry {
    Entry { size: n, card: 1, kind: 2, note: n + 1 }
}

fn table(place: usize) -> Arc<Table<Smallest<Place>>> {
    // The first place of the first bucket; its neighbour follows or comes before.
    let words = (0..piece_len(0))
        .map(|at| if at / 32 == place / 32 { Place::Near(AtomicU64::new(0)) } else { Place::Far })
        .collect();
    Arc::new(Table::new(Smallest(words), Place::Near(AtomicU64::new(0))))
}

/// An address goes from thread to thread by whatever the program synchronises with.
#[test]
fn an_entry_is_seen_by_whoever_learns_its_key() {
    let place = place_of_key();
    model(move || {
        let table = table(place);
        let hand = Arc::new(AtomicU64::new(0));
        let (other, taken) = (Arc::clone(&table), Arc::clone(&hand));
        let thread = thread::spawn(move || match taken.load(Ordering::Acquire) {
            0 => false,
            key => {
                assert_eq!(other.get(key), Some(entry(7)));
                assert_eq!(other.take(key), Some(entry(7)));
                true
            }
        });
        table.insert(KEY, &entry(7)).unwrap();
        hand.store(KEY, Ordering::Release);
        let gone = thread.join().unwrap();
        assert_eq!(table.take(KEY).is_none(), gone);
    });
}

/// The driver may give the address of one thread's free to another thread at once.
#[test]
fn an_address_that_is_given_again_at_once_is_not_mixed_up() {
    let place = place_of_key();
    model(move || {
        let table = table(place);
        table.insert(KEY, &entry(7)).unwrap();
        // The driver: whether the address is free.
        let driver = Arc::new(AtomicU64::new(0));
        let (other, address) = (Arc::clone(&table), Arc::clone(&driver));
        let thread = thread::spawn(move || {
            if address.load(Ordering::Acquire) == 1 {
                other.insert(KEY, &entry(9)).unwrap();
                assert_eq!(other.take(KEY), Some(entry(9)));
            }
        });
        assert_eq!(table.take(KEY), Some(entry(7)));
        driver.store(1, Ordering::Release);
        thread.join().unwrap();
        assert_eq!(table.take(KEY), None);
    });
}

#[test]
fn of_two_who_take_one_key_one_gets_it() {
    let place = place_of_key();
    model(move || {
        let table = table(place);
        table.insert(KEY, &entry(7)).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || other.take(KEY).is_some());
        let won = table.take(KEY).is_some();
        assert_ne!(won, thread.join().unwrap());
    });
}

/// Whoever takes it out gets the one size or the other, and whoever changes it knows which.
#[test]
fn an_entry_whose_size_changes_is_not_missed() {
    let place = place_of_key();
    model(move || {
        let table = table(place);
        table.insert(KEY, &entry(7)).unwrap();
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || other.swap_size(KEY, 9));
        let taken = table.take(KEY).map(|entry| entry.size);
        let changed = thread.join().unwrap();
        assert!([(Some(7), None), (Some(9), Some(7))].contains(&(taken, changed)), "{taken:?}, {changed:?}");
    });
}

/// Nothing but the key's own word tells of the entry.
#[test]
fn an_entry_is_seen_whole() {
    let place = place_of_key();
    model(move || {
        let table = table(place);
        let other = Arc::clone(&table);
        // loom forgets a thread's first look at a word when another looks at it before writing: so the writer is first.
        let thread = thread::spawn(move || other.get(KEY));
        table.insert(KEY, &entry(7)).unwrap();
        let found = thread.join().unwrap();
        assert!(found.is_none_or(|found| found == entry(7)), "{found:?}");
    });
}
