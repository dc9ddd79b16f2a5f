//! The table against a map, at its ends, and from many threads.

use std::collections::HashMap;
use std::collections::hash_map::Entry::Vacant;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};

use mullion_accounting::{Entry, LEVELS, Pieces, Table, TableError, piece_len};
use proptest::collection::vec;
use proptest::prelude::*;

/// Memory for the first `levels` pieces.
#[derive(Debug)]
struct Heap {
    pieces: [OnceLock<Box<[AtomicU64]>>; LEVELS],
    levels: usize,
}

impl Heap {
    fn new(levels: usize) -> Self {
        Self { pieces: [const { OnceLock::new() }; LEVELS], levels }
    }
}

impl Pieces for Heap {
    type Word = AtomicU64;

    fn piece(&self, level: usize) -> Option<&[AtomicU64]> {
        let zeroed = || std::iter::repeat_with(AtomicU64::default).take(piece_len(level)).collect();
        (level < self.levels).then(|| &**self.pieces[level].get_or_init(zeroed))
    }

    fn existing(&self, level: usize) -> Option<&[AtomicU64]> {
        self.pieces[level].get().map(|piece| &**piece)
    }
}

fn table(levels: usize) -> Table<Heap> {
    Table::new(Heap::new(levels), AtomicU64::new(0))
}

fn entry(n: u64) -> Entry {
    Entry { size: n, card: n.to_le_bytes()[0], kind: n.to_le_bytes()[1], note: !n }
}

/// Addresses as a driver gives them: of one range, in steps of 512 bytes.
fn address(n: u64) -> u64 {
    0x7f12_3400_0000 + 512 * n
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u64, u64),
    Take(u64),
    Get(u64),
    SwapSize(u64, u64),
    Drain(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || (0..60_u64).prop_map(address);
    prop_oneof![
        4 => (key(), any::<u64>()).prop_map(|(k, v)| Step::Insert(k, v)),
        3 => key().prop_map(Step::Take),
        2 => key().prop_map(Step::Get),
        1 => (key(), any::<u64>()).prop_map(|(k, v)| Step::SwapSize(k, v)),
        1 => any::<u8>().prop_map(Step::Drain),
    ]
}

proptest! {
    #[test]
    fn a_table_is_a_map(steps in vec(step(), 0..400)) {
        let table = table(LEVELS);
        let mut map = HashMap::new();
        for step in steps {
            match step {
                Step::Insert(key, n) => {
                    // A key is in the table at most once.
                    if let Vacant(place) = map.entry(key) {
                        prop_assert_eq!(table.insert(key, &entry(n)), Ok(()));
                        place.insert(entry(n));
                    }
                }
                Step::Take(key) => prop_assert_eq!(table.take(key), map.remove(&key)),
                Step::Get(key) => prop_assert_eq!(table.get(key), map.get(&key).copied()),
                Step::SwapSize(key, size) => {
                    let old = map.get_mut(&key).map(|entry| std::mem::replace(&mut entry.size, size));
                    prop_assert_eq!(table.swap_size(key, size), old);
                }
                Step::Drain(card) => {
                    let mut out = HashMap::new();
                    table.drain(|_, e| e.card == card, |key, e| { out.insert(key, e); });
                    let want: HashMap<_, _> = map.extract_if(|_, e| e.card == card).collect();
                    prop_assert_eq!(out, want);
                }
            }
        }
        for (key, entry) in map {
            prop_assert_eq!(table.take(key), Some(entry));
        }
    }
}

#[test]
fn three_hundred_thousand_live_entries_are_all_found() {
    for (case, key) in [
        ("steps of 512 bytes", address as fn(u64) -> u64),
        ("steps of 2 MiB", |n| 0x7f00_0000_0000 + (n << 21)),
        ("handles that count", |n| n + 1),
        ("far apart", |n| (n + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)),
    ] {
        let table = table(LEVELS);
        for n in 0..300_000 {
            assert_eq!(table.insert(key(n), &entry(n)), Ok(()), "{case}, entry {n}");
        }
        let pieces = (0..LEVELS).filter(|level| table.pieces().existing(*level).is_some()).count();
        assert!(pieces <= 6, "{case}: {pieces} pieces for what 5 and a half hold");
        for n in (0..300_000).rev() {
            assert_eq!(table.take(key(n)), Some(entry(n)), "{case}, entry {n}");
        }
        let mut left = 0;
        table.drain(|_, _| true, |_, _| left += 1);
        assert_eq!(left, 0, "{case}");
    }
}

#[test]
fn keys_that_are_marks_of_the_table_are_refused() {
    let table = table(1);
    for key in [0, u64::MAX] {
        assert_eq!(table.insert(key, &entry(1)), Err(TableError::Key));
        assert_eq!((table.take(key), table.get(key), table.swap_size(key, 1)), (None, None, None));
    }
}

#[test]
fn without_memory_a_table_says_so_and_keeps_what_it_has() {
    assert_eq!(table(0).insert(1, &entry(1)), Err(TableError::Memory));
    let table = table(1);
    let full = (1..1000).take_while(|n| table.insert(address(*n), &entry(*n)).is_ok()).last().unwrap();
    assert!(full > 200, "{full} of 512 places");
    assert_eq!(table.insert(address(full + 1), &entry(1)), Err(TableError::Memory));
    for n in 1..=full {
        assert_eq!(table.take(address(n)), Some(entry(n)));
    }
    assert_eq!(table.insert(address(full + 1), &entry(1)), Ok(()), "room again");
}

/// A thread that dies between taking a place and writing its key, or a child forked at that moment, leaves the place
/// taken; nobody waits for it.
#[test]
fn a_place_that_nobody_finishes_is_lost_and_blocks_nobody() {
    let table = table(2);
    table.insert(7, &entry(7)).unwrap();
    let piece = table.pieces().existing(0).unwrap();
    let at = piece.iter().position(|word| word.load(Ordering::SeqCst) == 7).unwrap();
    piece[at].store(u64::MAX, Ordering::SeqCst);
    assert_eq!(table.take(7), None);
    for round in 0..1000 {
        table.insert(7, &entry(round)).unwrap();
        assert_eq!(table.take(7), Some(entry(round)));
    }
    let mut out = 0;
    table.drain(|_, _| true, |_, _| out += 1);
    assert_eq!(out, 0);
}

#[test]
fn of_two_entries_of_a_key_the_wanted_one_is_taken() {
    let table = table(1);
    for n in [1, 2] {
        table.insert(7, &entry(n)).unwrap();
    }
    assert_eq!(table.take_if(7, |e| *e == entry(3)), None);
    assert_eq!(table.take_if(8, |_| true), None);
    assert_eq!(table.take_if(7, |e| *e == entry(2)), Some(entry(2)));
    assert_eq!(table.take_if(7, |e| *e == entry(2)), None);
    assert_eq!(table.take(7), Some(entry(1)));
}

/// Between the look at an entry and its end another thread frees the key and enters it anew, for something that stays.
#[test]
fn what_was_entered_anew_meanwhile_is_not_drained() {
    let table = table(1);
    table.insert(7, &entry(1)).unwrap();
    let mut looks = 0;
    let is_gone = |key: u64, found: &Entry| {
        looks += 1;
        if looks == 1 {
            assert_eq!(table.take(key), Some(entry(1)));
            table.insert(key, &entry(2)).unwrap();
        }
        *found == entry(1)
    };
    table.drain(is_gone, |_, taken| panic!("{taken:?}"));
    assert_eq!(table.take(7), Some(entry(2)));
}

/// While one thread changes sizes, others take the entries out, one by one or all: none is missed, and the last change is
/// known to whoever made it.
#[test]
fn an_entry_whose_size_changes_is_taken_out_once() {
    const ROUNDS: u64 = 3000;
    let table = table(1);
    let barrier = Barrier::new(3);
    let [taken, changed] = [AtomicUsize::new(0), AtomicUsize::new(0)];
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (table, barrier, taken, changed) = (&table, &barrier, &taken, &changed);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let key = address(round);
                    if thread == 0 {
                        table.insert(key, &entry(0)).unwrap();
                    }
                    barrier.wait();
                    let out = |e: Entry| {
                        taken.fetch_add(2 + usize::try_from(e.size).unwrap(), Ordering::SeqCst);
                    };
                    match thread {
                        0 if round % 2 == 0 => table.take(key).map_or((), out),
                        0 => table.drain(|_, _| true, |_, e| out(e)),
                        _ => {
                            let is_first = table.swap_size(key, 1) == Some(0);
                            changed.fetch_add(usize::from(is_first), Ordering::SeqCst);
                        }
                    }
                    barrier.wait();
                }
            });
        }
    });
    let changed = changed.into_inner() as u64;
    assert_eq!(taken.into_inner() as u64, 2 * ROUNDS + changed, "{changed} changed");
}

#[test]
fn of_threads_that_take_the_same_key_one_gets_it() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 3000;
    let table = table(LEVELS);
    let barrier = Barrier::new(THREADS);
    let winners = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (table, barrier, winners) = (&table, &barrier, &winners);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    if thread == 0 {
                        table.insert(address(round), &entry(round)).unwrap();
                    }
                    barrier.wait();
                    if let Some(taken) = table.take(address(round)) {
                        assert_eq!(taken, entry(round));
                        winners.fetch_add(1, Ordering::SeqCst);
                    }
                    barrier.wait();
                }
            });
        }
    });
    assert_eq!(winners.into_inner() as u64, ROUNDS);
}

/// Each thread with keys of its own, and keys handed from one to the next.
#[test]
fn threads_do_not_lose_one_anothers_entries() {
    const THREADS: u64 = 6;
    const EACH: u64 = 4000;
    let table = table(LEVELS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let table = &table;
            let (sender, receiver) = std::sync::mpsc::channel();
            scope.spawn(move || {
                for n in 0..EACH {
                    let key = address(n * THREADS + thread);
                    table.insert(key, &entry(key)).unwrap();
                    assert_eq!(table.get(key), Some(entry(key)));
                    if n % 3 == 0 {
                        assert_eq!(table.take(key), Some(entry(key)));
                    } else {
                        sender.send(key).unwrap();
                    }
                }
            });
            scope.spawn(move || {
                for key in receiver {
                    assert_eq!(table.swap_size(key, 5), Some(key));
                    assert_eq!(table.take(key).map(|e| (e.size, e.note)), Some((5, !key)));
                }
            });
        }
    });
    let mut left = 0;
    table.drain(|_, _| true, |_, _| left += 1);
    assert_eq!(left, 0);
}
