//! When to listen and when to register, as a state machine without IO.
//!
//! Rules: register within milliseconds of the kubelet's socket appearing; never while a `ListAndWatch` stream of
//! an earlier registration is open (the kubelet, seeing that one end later, would mark all our slots unhealthy);
//! after a stream has ended, register again. A kubelet that starts empties its folder, our socket included, so
//! the listener is made anew before every registration that finds its socket gone.

use std::time::Duration;

/// Which socket file of the kubelet: one that is made anew is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incarnation(pub u64);

/// What was seen. It may be seen late: a report of a socket can come after the call that went through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The kubelet's socket is there; also when it was made anew.
    KubeletUp(Incarnation),
    /// The kubelet's socket is gone.
    KubeletDown,
    /// Our own socket is gone.
    SocketGone,
    /// Our socket is there and takes connections.
    Serving,
    /// It could not be made.
    ServeFailed,
    /// The kubelet behind that socket took the registration.
    Registered(Incarnation),
    /// It did not.
    RegisterFailed,
    /// The call was not made: so many streams are open already.
    AlreadyOpen(usize),
    /// So many `ListAndWatch` streams are open now.
    Streams(usize),
    /// The time that [`Machine::wait`] gave has passed.
    Elapsed,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make our socket and accept connections on it.
    Serve,
    /// Call the kubelet's `Register`.
    Register,
}

/// Where a registration stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is under way.
    Idle,
    /// `Serve` was asked for.
    Opening,
    /// `Register` was asked for.
    Calling,
    /// The kubelet took it; its stream has not come yet.
    Expecting,
    /// A stream is open.
    Open,
}

/// Longest wait between two attempts. The socket of a kubelet that was killed stays behind, so attempts go on.
const SLOWEST: Duration = Duration::from_secs(1);
/// First wait after a failed attempt.
const FIRST: Duration = Duration::from_millis(20);
/// How long a kubelet may take from `Register` to `ListAndWatch` before we register again.
const PATIENCE: Duration = Duration::from_secs(5);

/// The state machine.
#[derive(Clone, Debug)]
pub struct Machine {
    kubelet: Option<Incarnation>,
    /// Who took the last registration.
    took: Option<Incarnation>,
    serving: bool,
    streams: usize,
    phase: Phase,
    failures: u32,
}

impl Default for Machine {
    fn default() -> Self {
        Self { kubelet: None, took: None, serving: false, streams: 0, phase: Phase::Idle, failures: 0 }
    }
}

impl Machine {
    /// Takes in what was seen and says what to do next.
    pub fn on(&mut self, input: Input) -> Option<Action> {
        match input {
            Input::KubeletUp(now) => {
                self.kubelet = Some(now);
                self.failures = 0;
                // The one that took the registration is gone; no stream comes from it.
                if self.phase == Phase::Expecting && self.took != Some(now) {
                    self.phase = Phase::Idle;
                }
            }
            Input::KubeletDown => self.kubelet = None,
            Input::SocketGone => self.serving = false,
            Input::Serving => {
                self.serving = true;
                self.failures = 0;
                if self.phase == Phase::Opening {
                    self.phase = Phase::Idle;
                }
            }
            Input::ServeFailed | Input::RegisterFailed => {
                self.failures = self.failures.saturating_add(1);
                self.serving = self.serving && input == Input::RegisterFailed;
                self.phase = if self.streams > 0 { Phase::Open } else { Phase::Idle };
                return None;
            }
            Input::Registered(by) => {
                self.failures = 0;
                self.took = Some(by);
                self.kubelet = Some(by);
                self.phase = if self.streams > 0 { Phase::Open } else { Phase::Expecting };
            }
            Input::AlreadyOpen(open) => {
                self.streams = open;
                self.phase = if open > 0 { Phase::Open } else { Phase::Idle };
            }
            Input::Streams(open) => {
                let before = std::mem::replace(&mut self.streams, open);
                match (before, open) {
                    (_, 1..) if self.phase == Phase::Expecting => self.phase = Phase::Open,
                    (1.., 0) if self.phase == Phase::Open => self.phase = Phase::Idle,
                    _ => {}
                }
            }
            Input::Elapsed => {
                if self.phase == Phase::Expecting {
                    self.phase = Phase::Idle;
                }
            }
        }
        self.next()
    }

    fn next(&mut self) -> Option<Action> {
        if self.phase != Phase::Idle {
            return None;
        }
        if !self.serving {
            self.phase = Phase::Opening;
            return Some(Action::Serve);
        }
        if self.kubelet.is_some() && self.streams == 0 {
            self.phase = Phase::Calling;
            return Some(Action::Register);
        }
        None
    }

    /// How long to wait for the next input before [`Input::Elapsed`]; `None` to wait for ever.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        match self.phase {
            Phase::Expecting => Some(PATIENCE),
            Phase::Idle if self.failures > 0 => {
                Some(FIRST.saturating_mul(1 << self.failures.min(6).saturating_sub(1)).min(SLOWEST))
            }
            _ => None,
        }
    }

    /// Whether the kubelet watches our slots.
    #[must_use]
    pub const fn registered(&self) -> bool {
        self.streams > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(inputs: &[Input]) -> Vec<Option<Action>> {
        let mut machine = Machine::default();
        inputs.iter().map(|i| machine.on(*i)).collect()
    }

    // DP-10
    #[test]
    #[expect(clippy::too_many_lines, reason = "one row per story")]
    fn every_order_of_start_and_restart_ends_in_one_registration() {
        use Input::{
            AlreadyOpen, Elapsed, KubeletDown, KubeletUp, RegisterFailed, Registered, ServeFailed, Serving,
            SocketGone, Streams,
        };
        let (up, again) = (KubeletUp(Incarnation(1)), KubeletUp(Incarnation(2)));
        let (taken, retaken) = (Registered(Incarnation(1)), Registered(Incarnation(2)));
        let (serve, register) = (Some(Action::Serve), Some(Action::Register));
        for (case, steps) in [
            (
                "the kubelet is up first",
                vec![(up, serve), (Serving, register), (taken, None), (Streams(1), None)],
            ),
            (
                "the plugin is up first",
                vec![(Elapsed, serve), (Serving, None), (up, register), (taken, None)],
            ),
            (
                "the stream comes before the answer",
                vec![(up, serve), (Serving, register), (Streams(1), None), (taken, None)],
            ),
            (
                "the kubelet restarts: stream ends, folder emptied, socket anew",
                vec![
                    (up, serve),
                    (Serving, register),
                    (taken, None),
                    (Streams(1), None),
                    (KubeletDown, None),
                    (Streams(0), None),
                    (SocketGone, serve),
                    (Serving, None),
                    (again, register),
                ],
            ),
            (
                "a new socket while the old stream is open waits for its end",
                vec![
                    (up, serve),
                    (Serving, register),
                    (taken, None),
                    (Streams(1), None),
                    (again, None),
                    (Streams(0), register),
                ],
            ),
            (
                "the stream ends, the kubelet's socket stays",
                vec![
                    (up, serve),
                    (Serving, register),
                    (taken, None),
                    (Streams(1), None),
                    (Streams(0), register),
                    (RegisterFailed, None),
                    (Elapsed, register),
                ],
            ),
            (
                "registered, but no stream comes",
                vec![(up, serve), (Serving, register), (taken, None), (Elapsed, register)],
            ),
            (
                "our folder is not there yet",
                vec![(up, serve), (ServeFailed, None), (Elapsed, serve), (Serving, register)],
            ),
            (
                "the socket is reported after the call that went through it",
                vec![
                    (up, serve),
                    (Serving, register),
                    (taken, None),
                    (Streams(1), None),
                    (Streams(0), register),
                    (RegisterFailed, None),
                    (Elapsed, register),
                    (retaken, None),
                    (KubeletDown, None),
                    (SocketGone, None),
                    (again, None),
                    (Streams(1), None),
                ],
            ),
            (
                "it went through, and a third kubelet came",
                vec![(up, serve), (Serving, register), (taken, None), (again, register)],
            ),
            (
                "a stream is open that was not reported yet",
                vec![
                    (up, serve),
                    (Serving, register),
                    (taken, None),
                    (Elapsed, register),
                    (AlreadyOpen(1), None),
                    (Streams(0), register),
                ],
            ),
            (
                "the kubelet restarts during the call",
                vec![
                    (up, serve),
                    (Serving, register),
                    (KubeletDown, None),
                    (again, None),
                    (RegisterFailed, None),
                    (Elapsed, register),
                ],
            ),
        ] {
            let inputs: Vec<_> = steps.iter().map(|s| s.0).collect();
            let want: Vec<_> = steps.iter().map(|s| s.1).collect();
            assert_eq!(run(&inputs), want, "{case}");
        }
    }

    #[test]
    fn attempts_slow_down_to_one_a_second() {
        let mut machine = Machine::default();
        machine.on(Input::KubeletUp(Incarnation(1)));
        machine.on(Input::Serving);
        let mut waits = Vec::new();
        for _ in 0..8 {
            machine.on(Input::RegisterFailed);
            waits.push(machine.wait().unwrap().as_millis());
            machine.on(Input::Elapsed);
        }
        assert_eq!(waits, [20, 40, 80, 160, 320, 640, 640, 640]);
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            (0_u64..4).prop_map(|n| Input::KubeletUp(Incarnation(n))),
            Just(Input::KubeletDown),
            Just(Input::SocketGone),
            Just(Input::Serving),
            Just(Input::ServeFailed),
            (0_u64..4).prop_map(|n| Input::Registered(Incarnation(n))),
            Just(Input::RegisterFailed),
            (0_usize..3).prop_map(Input::Streams),
            Just(Input::Elapsed),
        ]
    }

    proptest! {
        // DP-10: whatever happened before, once both sides are up and answer, it registers, and never beside a
        // stream that is open.
        #[test]
        fn it_always_gets_there_and_never_doubles(inputs in proptest::collection::vec(input(), 0..40)) {
            let mut machine = Machine::default();
            let mut open = 0;
            for input in inputs {
                if let Input::Streams(n) = input {
                    open = n;
                }
                let action = machine.on(input);
                prop_assert!(action != Some(Action::Register) || open == 0, "registered beside an open stream");
            }
            let mut inputs = vec![Input::Streams(0), Input::KubeletUp(Incarnation(9))];
            let mut registered = false;
            for _ in 0..12 {
                let input = if inputs.is_empty() { Input::Elapsed } else { inputs.remove(0) };
                match machine.on(input) {
                    Some(Action::Serve) => inputs.push(Input::Serving),
                    Some(Action::Register) => {
                        registered = true;
                        inputs.push(Input::Registered(Incarnation(9)));
                        inputs.push(Input::Streams(1));
                    }
                    // What was under way before ends somehow.
                    None if machine.phase == Phase::Opening => inputs.push(Input::ServeFailed),
                    None if machine.phase == Phase::Calling => inputs.push(Input::RegisterFailed),
                    None => {}
                }
            }
            prop_assert!(registered && machine.registered());
        }
    }
}
