//! One process of the model: it runs the very code of the crate, one operation on a shared word at a time.
//!
//! What a process has done within a call is kept as the results that its operations gave. To go on, the call is run
//! again from its start with these results; the first operation beyond them is the next one. Behind it the call runs
//! to its end on made-up results, which nobody looks at.

use std::cell::{Cell, RefCell};

use mullion_accounting::{Account, Claim, Mark, Peers, Refused, Slot, Tries, Word};

/// Processes and slots.
pub const PROCESSES: usize = 3;
/// Results that one call can have.
const HISTORY: usize = 56;

/// Where a word lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Total,
    Claimed(usize),
    Settled(usize),
    Mark,
    Lock(usize),
}

/// An operation on one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Load(At),
    Store(At, u64),
    Swap(At, u64),
    Exchange(At, u64, u64),
    Add(At, u64),
    Sub(At, u64),
    Raise(u64),
    Take(usize),
    GiveBack(usize),
}

/// A fault that is put between the crate's code and the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// C is added to behind T.
    ClaimedAfterTotal,
    /// The slow path adds to T when it has summed.
    TotalAfterSum,
    /// Reaping takes C off T instead of B.
    ReapByClaimed,
    /// Reaping leaves B as it is.
    ReapKeepsSettled,
    /// Freeing takes off T before B.
    TotalBeforeSettled,
    /// T is read and written instead of subtracted from.
    TotalNotAtomic,
    /// The high-water mark stays.
    MarkStays,
    /// The lock byte of a living process can be had.
    LockIsNone,
    /// A fast claim looks at T and adds to it in two steps.
    ClaimNotAtomic,
    /// Reaping leaves C as it is.
    ReapKeepsClaimed,
}

/// The shared memory. Numbers are small; negative ones stand for what wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: i16,
    pub claimed: [i16; PROCESSES],
    pub settled: [i16; PROCESSES],
    pub mark: i16,
    /// 0, or one more than the process that holds the byte.
    pub locks: [i16; PROCESSES],
}

fn wide(value: i16) -> u64 {
    i64::from(value).cast_unsigned()
}

fn narrow(value: u64) -> i16 {
    value.cast_signed().try_into().expect("a number of the model is small")
}

impl Memory {
    fn word(&mut self, at: At) -> &mut i16 {
        match at {
            At::Total => &mut self.total,
            At::Claimed(slot) => &mut self.claimed[slot],
            At::Settled(slot) => &mut self.settled[slot],
            At::Mark => &mut self.mark,
            At::Lock(slot) => &mut self.locks[slot],
        }
    }

    fn put(&mut self, at: At, value: u64) -> u64 {
        wide(std::mem::replace(self.word(at), narrow(value)))
    }

    /// Does `op` for process `who` and gives its result.
    pub fn apply(&mut self, who: usize, op: Op, fault: Fault) -> u64 {
        let holder = who as u64 + 1;
        match op {
            Op::Load(at) => wide(*self.word(at)),
            Op::Store(at, value) | Op::Swap(at, value) => self.put(at, value),
            Op::Exchange(at, current, new) => {
                let found = wide(*self.word(at));
                if found == current { self.put(at, new) } else { found }
            }
            Op::Add(at, value) => {
                let sum = wide(*self.word(at)).wrapping_add(value);
                self.put(at, sum)
            }
            Op::Sub(at, value) => {
                let rest = wide(*self.word(at)).wrapping_sub(value);
                self.put(at, rest)
            }
            Op::Raise(value) => {
                let value = narrow(value).max(self.mark);
                self.put(At::Mark, wide(value))
            }
            Op::Take(slot) if self.locks[slot] == 0 || fault == Fault::LockIsNone => {
                self.put(At::Lock(slot), holder);
                1
            }
            Op::Take(_) => 0,
            Op::GiveBack(slot) => self.put(At::Lock(slot), 0),
        }
    }
}

/// Results of the operations of a call so far.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct History {
    results: [i16; HISTORY],
    len: u8,
}

impl std::fmt::Debug for History {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

impl History {
    pub const EMPTY: Self = Self { results: [0; HISTORY], len: 0 };

    pub fn as_slice(&self) -> &[i16] {
        &self.results[..self.len.into()]
    }

    fn of(results: &[i16]) -> Self {
        let mut history = Self::EMPTY;
        history.results[..results.len()].copy_from_slice(results);
        history.len = u8::try_from(results.len()).expect("few");
        history
    }

    fn push(&mut self, result: u64) {
        self.results[usize::from(self.len)] = narrow(result);
        self.len += 1;
    }
}

/// A call of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Open,
    Attempt { bytes: u64, tries: Tries },
    Settle { bytes: u64 },
    Undo { bytes: u64 },
    Free { bytes: u64 },
}

/// What a call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Admitted,
    Refused,
    Again(Tries),
}

/// What comes next in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Op(Op),
    Ended(Outcome),
}

struct Replay<'h> {
    results: &'h [i16],
    at: Cell<usize>,
    next: Cell<Option<Op>>,
    fault: Fault,
    /// An operation that a fault holds back.
    held: Cell<Option<Op>>,
    /// The operations whose results are given, where they are asked for.
    done: Option<RefCell<Vec<Op>>>,
}

impl<'h> Replay<'h> {
    fn new(history: &'h History, fault: Fault, done: Option<RefCell<Vec<Op>>>) -> Self {
        let (at, next, held) = (Cell::new(0), Cell::new(None), Cell::new(None));
        Self { results: history.as_slice(), at, next, fault, held, done }
    }

    /// The result of `op`, or `otherwise` when it was not done yet.
    fn result(&self, op: Op, otherwise: u64) -> u64 {
        let at = self.at.get();
        if let Some(result) = self.results.get(at) {
            self.at.set(at + 1);
            if let Some(done) = &self.done {
                done.borrow_mut().push(op);
            }
            return wide(*result);
        }
        if self.next.get().is_none() {
            self.next.set(Some(op));
        }
        otherwise
    }

    fn release(&self) {
        if let Some(op) = self.held.take() {
            self.result(op, 0);
        }
    }
}

struct ModelWord<'r> {
    at: At,
    replay: &'r Replay<'r>,
}

impl Word for ModelWord<'_> {
    fn load(&self) -> u64 {
        self.replay.result(Op::Load(self.at), 0)
    }

    fn store(&self, value: u64) {
        let keeps = matches!((self.replay.fault, self.at), (Fault::ReapKeepsClaimed, At::Claimed(_)));
        if !keeps {
            self.replay.result(Op::Store(self.at, value), 0);
        }
    }

    fn swap(&self, value: u64) -> u64 {
        match self.replay.fault {
            // Whatever is compared with it is less.
            Fault::ReapByClaimed => {
                self.replay.result(Op::Swap(self.at, value), 0);
                u64::MAX
            }
            Fault::ReapKeepsSettled => self.replay.result(Op::Load(self.at), 0),
            _ => self.replay.result(Op::Swap(self.at, value), 0),
        }
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let replay = self.replay;
        if replay.fault == Fault::TotalAfterSum && new > LIMIT_OF_FAULTS {
            replay.held.set(Some(Op::Add(self.at, new - current)));
            return Ok(current);
        }
        if replay.fault == Fault::ClaimNotAtomic {
            replay.result(Op::Store(self.at, new), 0);
            return Ok(current);
        }
        let found = replay.result(Op::Exchange(self.at, current, new), current);
        if found == current {
            replay.release();
            Ok(found)
        } else {
            Err(found)
        }
    }

    fn fetch_add(&self, value: u64) -> u64 {
        if self.replay.fault == Fault::ClaimedAfterTotal && matches!(self.at, At::Claimed(_)) {
            self.replay.held.set(Some(Op::Add(self.at, value)));
            return 0;
        }
        self.replay.result(Op::Add(self.at, value), 0)
    }

    fn fetch_sub(&self, value: u64) -> u64 {
        let replay = self.replay;
        match (replay.fault, self.at) {
            // Never added, so not to be taken off.
            (Fault::TotalAfterSum, At::Total) if replay.held.take().is_some() => 0,
            (Fault::TotalBeforeSettled, At::Settled(_)) => {
                replay.held.set(Some(Op::Sub(self.at, value)));
                0
            }
            (Fault::TotalNotAtomic, At::Total) => {
                let found = replay.result(Op::Load(self.at), 0);
                replay.result(Op::Store(self.at, found.wrapping_sub(value)), 0);
                found
            }
            _ => {
                let found = replay.result(Op::Sub(self.at, value), 0);
                replay.release();
                found
            }
        }
    }
}

/// The limit of the runs with [`Fault::TotalAfterSum`], by which a slow addition is told from a fast one.
pub const LIMIT_OF_FAULTS: u64 = 2;

struct ModelMark<'r>(&'r Replay<'r>);

impl Mark for ModelMark<'_> {
    fn load(&self) -> u32 {
        self.0.result(Op::Load(At::Mark), 0).try_into().expect("a mark is small")
    }

    fn raise(&self, value: u32) {
        if self.0.fault != Fault::MarkStays {
            self.0.result(Op::Raise(value.into()), 0);
        }
    }
}

struct ModelPeers<'r>(&'r Replay<'r>);

impl Peers for ModelPeers<'_> {
    fn take(&mut self, slot: usize) -> bool {
        self.0.result(Op::Take(slot), 0) == 1
    }

    fn give_back(&mut self, slot: usize) {
        self.0.result(Op::GiveBack(slot), 0);
    }

    fn pause(&mut self, _: u32) {}
}

/// What comes next for process `who` in `call` after `history`.
pub fn next(who: usize, call: Call, history: &History, limit: u64, fault: Fault) -> Next {
    let replay = Replay::new(history, fault, None);
    run(who, call, limit, &replay)
}

/// The operations of `call` so far.
fn done(who: usize, call: Call, history: &History, limit: u64, fault: Fault) -> Vec<Op> {
    let replay = Replay::new(history, fault, Some(RefCell::default()));
    run(who, call, limit, &replay);
    replay.done.map(RefCell::into_inner).unwrap_or_default()
}

fn run(who: usize, call: Call, limit: u64, replay: &Replay) -> Next {
    let word = |at| ModelWord { at, replay };
    let total = word(At::Total);
    let slots: [_; PROCESSES] = std::array::from_fn(|slot| Slot {
        claimed: word(At::Claimed(slot)),
        settled: word(At::Settled(slot)),
    });
    let mark = ModelMark(replay);
    let account = Account::new(&total, &slots, &mark, who, limit).expect("the slot exists");
    let outcome = match call {
        Call::Open => {
            account.open();
            Outcome::Done
        }
        Call::Attempt { bytes, mut tries } => {
            match account.attempt(bytes, &mut tries, &mut ModelPeers(replay)) {
                Some(Ok(claim)) => {
                    assert_eq!(claim.bytes(), bytes);
                    Outcome::Admitted
                }
                Some(Err(Refused { .. })) => Outcome::Refused,
                None => Outcome::Again(tries),
            }
        }
        Call::Settle { bytes } => {
            account.settle(claim(bytes));
            Outcome::Done
        }
        Call::Undo { bytes } => {
            account.undo(claim(bytes));
            Outcome::Done
        }
        Call::Free { bytes } => {
            account.free(bytes);
            Outcome::Done
        }
    };
    replay.release();
    replay.next.get().map_or(Next::Ended(outcome), Next::Op)
}

/// A claim of `bytes`, which only an account gives out: from one of its own.
fn claim(bytes: u64) -> Claim {
    use std::sync::atomic::{AtomicU32, AtomicU64};
    let (total, mark) = (AtomicU64::new(0), AtomicU32::new(0));
    let slots = [Slot::<AtomicU64>::default()];
    let account = Account::new(&total, &slots, &mark, 0, bytes).expect("the slot exists");
    account.attempt(bytes, &mut Tries::new(1), &mut NoPeers).expect("an answer").expect("room")
}

struct NoPeers;

impl Peers for NoPeers {
    fn take(&mut self, _: usize) -> bool {
        false
    }
    fn give_back(&mut self, _: usize) {}
    fn pause(&mut self, _: u32) {}
}

/// Does the next operation of `call` and adds its result to `history`.
pub fn step(
    memory: &mut Memory,
    who: usize,
    call: Call,
    history: &mut History,
    op: Op,
    (limit, fault, forgets): (u64, Fault, bool),
) {
    let result = memory.apply(who, op, fault);
    history.push(result);
    let mut ops = done(who, call, history, limit, fault);
    assert_eq!((ops.len(), ops.last()), (history.as_slice().len(), Some(&op)), "a call repeats itself");
    let ahead = next(who, call, history, limit, fault);
    let mut results = history.as_slice().to_vec();
    while forget(&mut ops, &mut results, ahead, limit, forgets) {}
    let shorter = History::of(&results);
    assert_eq!(
        next(who, call, &shorter, limit, fault),
        ahead,
        "what was forgotten mattered: {history:?} {ops:?}"
    );
    *history = shorter;
}

/// Forgets one thing of a call's past that the code does not look at any more, so that pasts which differ in nothing
/// else are one; whether there was one. Without `all` that is only a failed exchange: a process that others forestall for
/// ever had endlessly many pasts with it.
fn forget(ops: &mut Vec<Op>, results: &mut Vec<i16>, ahead: Next, limit: u64, all: bool) -> bool {
    let before = results.clone();
    let count = results.len();
    match ops.as_slice() {
        [.., Op::Load(at) | Op::Exchange(at, ..), Op::Exchange(same, current, _)]
            if at == same && wide(results[count - 1]) != *current =>
        {
            // The code goes on as if it had read this number in the first place.
            results.remove(count - 2);
            ops.pop();
        }
        _ if !all => {}
        // Only whether it wrapped is looked at, and nothing does that here.
        [.., Op::Add(..) | Op::Sub(..) | Op::Store(..) | Op::Raise(..) | Op::GiveBack(..)]
            if results[count - 1] != 0 =>
        {
            results[count - 1] = 0;
        }
        // Done: from which number does not matter.
        [.., Op::Load(at) | Op::Exchange(at, ..), Op::Exchange(same, ..)] if at == same => {
            let at = *at;
            results[count - 2..].fill(0);
            ops[count - 1] = Op::Exchange(at, 0, 0);
        }
        // T was too high for the fast way; how high does not matter.
        [.., Op::Load(At::Total)] if ahead == Next::Op(Op::Load(At::Total)) => {
            results[count - 1] = narrow(limit);
        }
        // Sums: what was found is added to what follows.
        [
            ..,
            Op::Load(At::Claimed(a)),
            Op::Load(At::Settled(b)),
            Op::Load(At::Claimed(c)),
            Op::Load(At::Settled(d)),
        ] if a == b && c == d => {
            results[count - 2] += std::mem::take(&mut results[count - 4]);
            results[count - 1] += std::mem::take(&mut results[count - 3]);
        }
        // A slot whose owner lives.
        [.., Op::Load(At::Settled(_)), Op::Take(_)] if results[count - 1] == 0 => {
            results.remove(count - 2);
            ops.remove(count - 2);
        }
        [.., Op::Load(At::Claimed(_)), Op::Take(_)] if results[count - 1] == 0 => {
            results[count - 2] = 1;
        }
        // A slot that was reaped.
        [.., Op::Take(_), Op::Swap(..), Op::Load(_), Op::Sub(..), Op::Store(..), Op::GiveBack(_)] => {
            results[count - 5] = 0;
            results[count - 4] = 0;
            let settled = count.checked_sub(7).filter(|at| matches!(ops[*at], Op::Load(At::Settled(_))));
            if let Some(at) = settled {
                results.remove(at);
                ops.remove(at);
            }
            let count = results.len();
            results[count - 7] = 1;
        }
        _ => {}
    }
    before != *results
}
