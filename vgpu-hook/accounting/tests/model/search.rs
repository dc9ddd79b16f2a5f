//! All interleavings of the processes, each state once.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, Hasher};

use mullion_accounting::Tries;

use crate::machine::{Call, Fault, History, Memory, Next, Op, Outcome, PROCESSES, next, step};

/// A run of the model.
#[derive(Clone, Debug)]
pub struct Setting {
    pub processes: usize,
    pub limit: u64,
    /// What each process may ask for.
    pub sizes: &'static [u64],
    /// Blocks that one process may hold.
    pub blocks: u8,
    /// Crashes in all.
    pub crashes: u8,
    /// Tries of a claim.
    pub tries: u32,
    /// Whether the driver may refuse what was admitted.
    pub driver_fails: bool,
    /// Each process asks once and keeps what it got: then one of them must have got something.
    pub one_shot: bool,
    /// Whether pasts that differ in nothing that matters are one state.
    pub forgets: bool,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Dead,
    Idle,
    /// In a call of the crate.
    In(Call, History),
    /// Admitted, the driver's word is awaited.
    Granted(u64),
    /// Had its one answer.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    phase: Phase,
    /// Blocks held by the index of their size.
    blocks: [u8; 2],
    /// Nobody else did anything since the claim began, and nobody was in the middle of something then.
    alone: bool,
}

#[derive(Clone, Copy, Debug)]
struct State {
    memory: Memory,
    processes: [Process; PROCESSES],
    crashes: u8,
}

/// What was found wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Processes hold more than the limit.
    Over,
    /// T is less than what is held.
    TotalTooLow,
    /// Refused although there was room and nobody in the way.
    FalseRefusal,
    /// Nothing is going on, nothing ever crashed, and the words are not exactly what is held.
    NotExact,
    /// All asked, nobody got anything.
    NoWinner,
}

/// What a run saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub states: usize,
    /// What the memory and the driver can be in together.
    pub memories: HashSet<u128, AsIs>,
}

/// What a run saw, or what was wrong and the steps that led there.
pub type Answer = Result<Seen, (Wrong, Vec<String>)>;

impl State {
    fn first(setting: &Setting) -> Self {
        let process = Process { phase: Phase::Dead, blocks: [0; 2], alone: false };
        let mut state =
            Self { memory: Memory::default(), processes: [process; PROCESSES], crashes: setting.crashes };
        // Opening is concurrent too where processes come back; else they are there from the start.
        if setting.crashes == 0 {
            state.memory.mark = i16::try_from(setting.processes).expect("few");
            for (index, process) in state.processes.iter_mut().enumerate().take(setting.processes) {
                process.phase = Phase::Idle;
                state.memory.locks[index] = i16::try_from(index).expect("few") + 1;
            }
        }
        state
    }

    fn held(&self, setting: &Setting) -> u64 {
        let of = |process: &Process| -> u64 {
            setting.sizes.iter().zip(process.blocks).map(|(size, count)| size * u64::from(count)).sum()
        };
        self.processes.iter().map(of).sum()
    }

    fn check(&self, setting: &Setting) -> Result<(), Wrong> {
        let held = self.held(setting);
        if held > setting.limit {
            return Err(Wrong::Over);
        }
        if i64::from(self.memory.total) < held.cast_signed() {
            return Err(Wrong::TotalTooLow);
        }
        let all = |phase| self.processes.iter().take(setting.processes).all(|p| p.phase == phase);
        if setting.crashes == 0 && all(Phase::Idle) {
            let sum = |words: &[i16]| words.iter().map(|word| i64::from(*word)).sum::<i64>();
            let held = held.cast_signed();
            let memory = &self.memory;
            if i64::from(memory.total) != held || sum(&memory.claimed) != held || sum(&memory.settled) != held
            {
                return Err(Wrong::NotExact);
            }
        }
        if setting.one_shot && held == 0 && all(Phase::Over) {
            return Err(Wrong::NoWinner);
        }
        Ok(())
    }

    /// `who` does something: whoever is asking is not alone any more.
    fn disturb(&mut self, who: usize) {
        for (index, process) in self.processes.iter_mut().enumerate() {
            process.alone &= index == who;
        }
    }

    /// Where a call ended, what follows from it.
    fn settle(&mut self, who: usize, setting: &Setting) -> Result<(), Wrong> {
        let held = self.held(setting);
        let process = &mut self.processes[who];
        let Phase::In(call, history) = process.phase else { return Ok(()) };
        let Next::Ended(outcome) = next(who, call, &history, setting.limit, setting.fault) else {
            return Ok(());
        };
        let answered = if setting.one_shot { Phase::Over } else { Phase::Idle };
        process.phase = match (call, outcome) {
            (Call::Attempt { bytes, .. }, Outcome::Admitted) => Phase::Granted(bytes),
            (Call::Attempt { bytes, .. }, Outcome::Refused) => {
                if process.alone && held + bytes <= setting.limit {
                    return Err(Wrong::FalseRefusal);
                }
                answered
            }
            (Call::Attempt { bytes, .. }, Outcome::Again(tries)) => {
                Phase::In(Call::Attempt { bytes, tries }, History::EMPTY)
            }
            (Call::Open, _) => Phase::Idle,
            _ => answered,
        };
        process.alone &= matches!(process.phase, Phase::In(..));
        Ok(())
    }

    /// Everything that may happen next.
    fn successors(
        &self,
        setting: &Setting,
        mut visit: impl FnMut(Self, Label) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        for who in 0..setting.processes {
            let process = self.processes[who];
            let with = |phase: Phase| {
                let mut state = *self;
                state.disturb(who);
                state.processes[who].phase = phase;
                state
            };
            if self.crashes > 0 && process.phase != Phase::Dead {
                let mut state = with(Phase::Dead);
                state.crashes -= 1;
                state.processes[who] = Process { phase: Phase::Dead, blocks: [0; 2], alone: false };
                for lock in
                    state.memory.locks.iter_mut().filter(|lock| usize::try_from(**lock) == Ok(who + 1))
                {
                    *lock = 0;
                }
                visit(state, Label::Crash(who))?;
            }
            match process.phase {
                Phase::Dead => {
                    if self.memory.locks[who] == 0 {
                        let mut state = with(Phase::In(Call::Open, History::EMPTY));
                        state.memory.locks[who] = i16::try_from(who).expect("few") + 1;
                        visit(state, Label::Start(who))?;
                    }
                }
                Phase::Idle => {
                    if process.blocks.iter().sum::<u8>() < setting.blocks {
                        for bytes in setting.sizes {
                            let tries = Tries::new(setting.tries);
                            let mut state =
                                with(Phase::In(Call::Attempt { bytes: *bytes, tries }, History::EMPTY));
                            state.processes[who].alone =
                                self.processes.iter().enumerate().all(|(index, p)| {
                                    index == who || matches!(p.phase, Phase::Dead | Phase::Idle | Phase::Over)
                                });
                            visit(state, Label::Ask(who, *bytes))?;
                        }
                    }
                    for (index, bytes) in setting.sizes.iter().enumerate() {
                        if process.blocks[index] > 0 {
                            let mut state = with(Phase::In(Call::Free { bytes: *bytes }, History::EMPTY));
                            state.processes[who].blocks[index] -= 1;
                            visit(state, Label::DriverFrees(who, *bytes))?;
                        }
                    }
                }
                Phase::Granted(bytes) => {
                    let index = setting.sizes.iter().position(|size| *size == bytes).expect("a size");
                    let mut state = with(Phase::In(Call::Settle { bytes }, History::EMPTY));
                    state.processes[who].blocks[index] += 1;
                    visit(state, Label::DriverGives(who, bytes))?;
                    if setting.driver_fails {
                        visit(
                            with(Phase::In(Call::Undo { bytes }, History::EMPTY)),
                            Label::DriverFails(who, bytes),
                        )?;
                    }
                }
                Phase::In(call, mut history) => {
                    let Next::Op(op) = next(who, call, &history, setting.limit, setting.fault) else {
                        unreachable!("an ended call was followed up");
                    };
                    let mut state = *self;
                    state.disturb(who);
                    step(
                        &mut state.memory,
                        who,
                        call,
                        &mut history,
                        op,
                        (setting.limit, setting.fault, setting.forgets),
                    );
                    state.processes[who].phase = Phase::In(call, history);
                    state.settle(who, setting)?;
                    visit(state, Label::Does(who, op))?;
                }
                Phase::Over => {}
            }
        }
        Ok(())
    }

    /// 128 bits that stand for what can be seen from outside of the processes.
    fn outside(&self) -> u128 {
        let mut bytes = Vec::with_capacity(64);
        self.write_outside(&mut bytes);
        fold(&bytes)
    }

    fn write_outside(&self, bytes: &mut Vec<u8>) {
        let mut number = |value: i16| bytes.extend_from_slice(&value.to_le_bytes());
        let memory = &self.memory;
        number(memory.total);
        number(memory.mark);
        number(self.crashes.into());
        for slot in 0..PROCESSES {
            number(memory.claimed[slot]);
            number(memory.settled[slot]);
            number(memory.locks[slot]);
        }
        for process in &self.processes {
            number(i16::from(process.blocks[0]) << 8 | i16::from(process.blocks[1]));
        }
    }

    /// 128 bits that stand for the state.
    fn print(&self) -> u128 {
        let mut bytes = Vec::with_capacity(256);
        self.write_outside(&mut bytes);
        let mut number = |value: i16| bytes.extend_from_slice(&value.to_le_bytes());
        for process in &self.processes {
            number(i16::from(process.alone));
            match &process.phase {
                Phase::Dead => number(-1),
                Phase::Idle => number(-2),
                Phase::Over => number(-3),
                Phase::Granted(bytes) => {
                    number(-4);
                    number(i16::try_from(*bytes).expect("few"));
                }
                Phase::In(call, history) => {
                    let (kind, amount, tries) = match call {
                        Call::Open => (0, 0, Tries::new(0)),
                        Call::Attempt { bytes, tries } => (1, *bytes, *tries),
                        Call::Settle { bytes } => (2, *bytes, Tries::new(0)),
                        Call::Undo { bytes } => (3, *bytes, Tries::new(0)),
                        Call::Free { bytes } => (4, *bytes, Tries::new(0)),
                    };
                    number(kind);
                    number(i16::try_from(amount).expect("few"));
                    // Eight bits are enough for what few tries can be.
                    number(i16::from_le_bytes([small_hash(tries), 0]));
                    number(i16::try_from(history.as_slice().len()).expect("few"));
                    history.as_slice().iter().copied().for_each(&mut number);
                }
            }
        }
        fold(&bytes)
    }
}

/// Tells apart what the few tries of a run can be.
fn small_hash(tries: Tries) -> u8 {
    struct Bytes(u8);
    impl Hasher for Bytes {
        fn finish(&self) -> u64 {
            self.0.into()
        }
        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = self.0.wrapping_mul(16).wrapping_add(*byte);
            }
        }
        fn write_u32(&mut self, value: u32) {
            self.write(&[u8::try_from(value).expect("few")]);
        }
    }
    let mut bytes = Bytes(0);
    tries.hash(&mut bytes);
    bytes.0
}

fn fold(bytes: &[u8]) -> u128 {
    let mut hash = 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344_u128;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash ^= u128::from(u64::from_le_bytes(word));
        hash = hash.wrapping_mul(0xda94_2042_e4dd_58b5_2360_ed05_1fc6_5da5);
        hash ^= hash >> 61;
    }
    hash
}

/// A step, for the trace.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "printed")]
enum Label {
    Start(usize),
    Crash(usize),
    Ask(usize, u64),
    DriverGives(usize, u64),
    DriverFails(usize, u64),
    DriverFrees(usize, u64),
    Does(usize, Op),
}

/// The prints are hashes already.
#[derive(Clone, Copy, Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only u128 is hashed");
    }
    fn write_u128(&mut self, value: u128) {
        self.0 = u64::try_from(value >> 64).unwrap_or_default();
    }
}

impl BuildHasher for AsIs {
    type Hasher = Self;
    fn build_hasher(&self) -> Self {
        *self
    }
}

/// Visits every state that can be reached, nearest first.
pub fn search(setting: &Setting) -> Answer {
    let first = State::first(setting);
    let mut seen = HashSet::with_hasher(AsIs::default());
    seen.insert(first.print());
    let mut memories = HashSet::with_hasher(AsIs::default());
    // How each state was reached: the state before and the step.
    let mut steps: Vec<(u32, Label)> = vec![(0, Label::Start(0))];
    let mut frontier = vec![(first, 0_u32)];
    while !frontier.is_empty() {
        let mut ahead = Vec::new();
        for (state, number) in frontier {
            let mut last = None;
            let found = state.successors(setting, |state, label| {
                last = Some(label);
                state.check(setting)?;
                if seen.insert(state.print()) {
                    memories.insert(state.outside());
                    steps.push((number, label));
                    ahead.push((state, u32::try_from(steps.len() - 1).expect("fewer states")));
                }
                Ok(())
            });
            if let Err(wrong) = found {
                let mut trace: Vec<_> =
                    last.iter().map(|label| format!("{label:?} (or what follows)")).collect();
                let mut at = number;
                while at != 0 {
                    let (before, label) = steps[at as usize];
                    trace.push(format!("{label:?}"));
                    at = before;
                }
                trace.reverse();
                return Err((wrong, trace));
            }
        }
        frontier = ahead;
    }
    Ok(Seen { states: seen.len(), memories })
}
