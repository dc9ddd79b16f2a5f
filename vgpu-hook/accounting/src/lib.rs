//! Memory accounting of a container: exact, lock-free, crash-safe; and the table of what is allocated.
//!
//! # The interface in short
//! * [`Word`], [`Mark`], [`Cell`]: the shared words, `AtomicU64` and `AtomicU32` in production; a test puts in words
//!   that a checker steps, a fault injection words that kill.
//! * `Account::new(&total, &slots, &mark, own, limit)`: one card as one process sees it; `slots` is a `&[Slot<W>]`,
//!   which lies in the usage file as `C, B, C, B, …` (`repr(C)`, 16 bytes).
//! * `account.open()`: once, when the slot's lock byte is held; frees what its last owner left.
//! * `account.claim(bytes, &mut peers)? -> Claim`, then the driver's allocation, then `account.settle(claim)` (or
//!   `settle_at(claim, real)` where the driver took another amount), or `account.undo(claim)` on the driver's error.
//! * `account.free(bytes)` after the driver's free.
//! * `account.force(bytes)` for what the driver gave unasked; `account.adjust(old, new)` for a pool's reserve.
//! * `account.reap(slot)` with that slot's byte held; `account.used()`, `account.settled()`, `account.total()`,
//!   `account.own_used()`.
//! * [`Peers`]: `take(slot)` tries the slot's lock byte, `give_back(slot)` releases it, `pause(units)` waits.
//! * `Table::new(pieces, top)`: key -> [`Entry`] `{size, card, kind, note}`: `insert`, `take` (before the driver's
//!   free; `insert` again when that fails), `take_if`, `get`, `swap_size`, `drain`. One table for each space of keys: an address
//!   and a handle may be the same number. No lock: a killed thread or a fork leaves nothing held, and whoever misses a key
//!   beside a place at which another thread is busy looks again, but not for ever.
//! * [`Pieces`]: `piece(level)` makes or finds the zeroed memory of `piece_len(level)` words, `existing(level)` finds.
//!
//! # The algorithm
//! A card has one total T; each process has a slot with C, what it holds or asks for, and B, what of T stands for it.
//! All words are sequentially consistent.
//!
//! ```text
//! claim q:  C += q
//!           CAS T -> T + q while T + q <= L                  : admitted
//!           else T += q; sum of C over all slots <= L        : admitted
//!                else T -= q; C -= q; reap the dead; wait; again, at most 8 times; refuse
//! settle:   B += q                      free:   B -= q; T -= q; C -= q
//! undo:     T -= q; C -= q              reap (lock byte held):  b = swap(B, 0); T -= b; C = 0
//! ```
//!
//! **Never over.** Every subtraction from T matches an earlier addition, and reaping subtracts at most what the slot
//! had added, so T is never less than what is held. Suppose an admitted set were over L, and look at the member that
//! added to T last: if it came in by the CAS, T told of all the others; if by the sum, all the others had added to C
//! before. Either way it was refused. This needs only that each process's addition to T follows its addition to C and
//! that additions to T are ordered, which read-modify-writes of one word are on every processor.
//!
//! **Crashes.** A process that dies leaves T too high, never too low. T too high costs the sum, never the limit and
//! never a refusal: what is refused is refused by the sum of C, and C of a dead process is reaped.
//!
//! **Who is refused.** A try fails when the sum of C was over L: by bytes held, by claims or frees in flight of living
//! processes, or by dead ones, which are then reaped and cost the claim none of its tries. The sum is no snapshot: what one
//! process frees and another one claims while it is made may be in it twice. So:
//! * A process that claims while no other one claims or frees gets what fits, whatever T says, after any crash.
//! * Where nothing crashed and each racer would fit alone, one gets the room in every interleaving: T is exact, and the
//!   first that adds to it finds room.
//! * After a crash one of the racers gets it unless all of their eight tries meet, with waits that differ by slot and
//!   thread and double each time.
//!
//! Whoever finds in two tries running that the settled bytes alone leave no room is refused without waiting on: they are a
//! sum of the same kind, so that beside processes which free and claim without a pause, a claim may be refused although there
//! was room at each moment of it.
//!
//! **Scribbled words.** A tenant can write the file. Sums saturate, T saturates upwards and wraps only downwards to a
//! number far above any limit, where the sum decides; a request whose C would wrap is refused; reaping takes no more off T
//! than C allows. So no number turns into a grant by arithmetic. A tenant that writes a small T itself gets more: a
//! preload is cooperative, and the agent compares with NVML.
//!
//! # How this is known
//! * `tests/model`: every interleaving of three processes with one crash and of two with three, each step one operation of
//!   the code of this crate; ten faults that are put in are found. A minute at most.
//! * `tests/loom.rs`: the memory orders (`LOOM_MAX_PREEMPTIONS=5 cargo test -p mullion-accounting --test loom`).
//! * `tests/race`: threads and processes at the limit, 10^5 rounds; processes killed at any instruction.
//! * `examples/pairs.rs`: nanoseconds and instructions of an allocation and a free.

#![no_std]

mod account;
mod table;
mod word;

pub use account::{ATTEMPTS, Account, Claim, Peers, Refused, Slot, Tries};
pub use table::{Entry, LEVELS, Pieces, Table, TableError, piece_len};
pub use word::{Cell, Mark, Word};
