//! HAMi's rules for tasks that share a card: the utilisation switch, the countdown `recent_kernel`, priority.
//!
//! A *task* is a container with a slice. Its priority is `CUDA_TASK_PRIORITY`: 0 is the most urgent, 1 the default. The
//! rules are those of HAMi's monitor, so that its library and ours can share a node, with three differences:
//! * the activity of a task is known to a second from its last launch, where its usage file says so, and not only by
//!   the countdown in steps of five: a gate opens within two seconds after the more urgent task went idle;
//! * a task without an SM limit counts as active and can be gated too;
//! * the policy is read in any case of letters.

/// Length of a step of the countdown.
pub const COUNTDOWN_STEP_NS: u64 = 5_000_000_000;
/// `recent_kernel` of a task that just launched.
pub const JUST_LAUNCHED: i32 = 2;
/// `recent_kernel` of a gated task.
pub const GATED: i32 = -1;
/// The time between two looks of the agent, and so between two heartbeats on a control page: short enough for a gate to
/// open within two seconds after the last launch of the more urgent task, with [`ACTIVE_NS`].
pub const PERIOD_NS: u64 = 900_000_000;
/// A launch renews the stamp of the last launch when that is this old and the heartbeat moved. Shorter than a period: of a
/// task that goes on launching the agent sees a new stamp at every look, and not at some, by how its looks and the launches
/// fall together.
pub const STAMP_NS: u64 = 500_000_000;
/// A task is active for this long after the last launch that its usage file shows: a period, and time for the launch that
/// comes next after a heartbeat.
pub const ACTIVE_NS: u64 = 1_100_000_000;
const _: () = assert!(STAMP_NS < PERIOD_NS && PERIOD_NS < ACTIVE_NS);
/// An agent that was not heard of for this long is dead: its gates are open, its last scale stays.
pub const HEARTBEAT_DEAD_NS: u64 = 3_000_000_000;
/// How long a gate is kept that no heartbeat vouches for (a library used by hand under HAMi's monitor): two periods of
/// that monitor.
pub const UNVOUCHED_GATE_NS: u64 = 10_000_000_000;

/// `GPU_CORE_UTILIZATION_POLICY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Hold the task to its share where it shares a card with another active one.
    #[default]
    Default,
    /// Always hold it.
    Force,
    /// Never.
    Disable,
}

impl Policy {
    /// Reads the variable's value, in any case of letters. Anything else is the default, as in HAMi.
    #[must_use]
    pub fn parse(value: &[u8]) -> Self {
        let value = value.trim_ascii();
        if value.eq_ignore_ascii_case(b"force") {
            Self::Force
        } else if value.eq_ignore_ascii_case(b"disable") {
            Self::Disable
        } else {
            Self::Default
        }
    }

    /// Whether the bucket holds a task of which the switch is `switch`.
    #[must_use]
    #[inline]
    pub const fn throttles(self, switch: i32) -> bool {
        match self {
            Self::Default => switch != 0,
            Self::Force => true,
            Self::Disable => false,
        }
    }
}

/// What shows that a task is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Time since the last launch, from our usage file; `None` = it never launched.
    Launched {
        /// Age of the last launch.
        age_ns: Option<u64>,
    },
    /// Only HAMi's countdown is known: its value *after* this step (see [`count_down`]).
    Countdown(i32),
}

/// A task as the node's agent sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Priority; smaller is more urgent. Below 0 counts as 0.
    pub priority: i32,
    /// Cards that it has a slice of: bit `i` is the node's card `i`.
    pub cards: u64,
    /// Launches.
    pub activity: Activity,
    /// Whether NVML shows it at work: a long kernel runs on after its launch.
    pub busy: bool,
    /// Its policy.
    pub policy: Policy,
}

impl Task {
    /// Whether the task counts as active.
    #[must_use]
    pub fn active(&self) -> bool {
        self.busy
            || match self.activity {
                Activity::Launched { age_ns } => age_ns.is_some_and(|age| age <= ACTIVE_NS),
                Activity::Countdown(value) => value > 0,
            }
    }

    fn urgency(&self) -> i32 {
        self.priority.max(0)
    }

    fn shares_with(&self, other: &Self) -> bool {
        self.cards & other.cards != 0
    }
}

/// One step of HAMi's countdown, every [`COUNTDOWN_STEP_NS`]: 2 -> 1 -> 0. A gated task and an idle one stay.
#[must_use]
pub const fn count_down(recent_kernel: i32) -> i32 {
    match recent_kernel {
        ..=0 => recent_kernel,
        // A tenant can write anything; an active task is one that launched since.
        n if n > JUST_LAUNCHED => JUST_LAUNCHED - 1,
        n => n - 1,
    }
}

/// What the agent writes for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// `utilization_switch`: 1 = hold the task to its share.
    pub switch: i32,
    /// Whether its launches wait for a more urgent task.
    pub gated: bool,
}

/// Decides for the task at `index` among all tasks of the node; `None` where there is no such task.
///
/// The switch is on when, on some card that it shares, a more urgent task is active, or more than one task of its own
/// priority is (itself included). A task is gated when a more urgent one is active.
#[must_use]
pub fn decide(tasks: &[Task], index: usize) -> Option<Decision> {
    let task = tasks.get(index)?;
    let active = || tasks.iter().filter(|t| t.active());
    let gated = active().any(|t| t.urgency() < task.urgency() && t.shares_with(task));
    // More than one of the same priority on one and the same card.
    let mut cards = task.cards;
    let mut crowded = false;
    while cards != 0 && !crowded {
        let card = cards & cards.wrapping_neg();
        cards &= !card;
        crowded = active().filter(|t| t.urgency() == task.urgency() && t.cards & card != 0).count() > 1;
    }
    let switch = match task.policy {
        Policy::Force => 1,
        Policy::Disable => 0,
        Policy::Default => i32::from(gated || crowded),
    };
    Some(Decision { switch, gated })
}

/// The value of `recent_kernel` to write, `None` where it stays: gated -> [`GATED`]; released -> 0.
#[must_use]
pub const fn gate(recent_kernel: i32, gated: bool) -> Option<i32> {
    match (gated, recent_kernel) {
        (true, 0..) => Some(GATED),
        (false, ..=-1) => Some(0),
        _ => None,
    }
}

/// Whether a launch has to wait at the gate: `recent_kernel` says so and its agent is alive. `heartbeat_age_ns` is
/// `None` where there is no control page; then the gate holds for [`UNVOUCHED_GATE_NS`] at most.
#[must_use]
#[inline]
pub const fn gate_closed(recent_kernel: i32, heartbeat_age_ns: Option<u64>, waited_ns: u64) -> bool {
    if recent_kernel >= 0 {
        return false;
    }
    match heartbeat_age_ns {
        Some(age) => age <= HEARTBEAT_DEAD_NS,
        None => waited_ns < UNVOUCHED_GATE_NS,
    }
}
