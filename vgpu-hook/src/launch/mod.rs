//! Launches: each one pays for its time on the card before it goes to the driver.
//!
//! Without a limit a launch costs a few loads: it leaves the stamps by which the agent knows that the container is at
//! work, and looks at the gate of `recent_kernel`. With one, the bucket of `mullion-pace` admits it or lets it wait; it
//! sleeps on the control page's futex word, in slices, so that a new scale or an opened gate is seen at once and a dead
//! agent blocks nobody. No system call is made unless it waits.
//!
//! | what | charged |
//! | --- | --- |
//! | kernels: plain, `Ex`, cooperative, legacy | by function and size of grid |
//! | cooperative launches on several devices | on every card of the container |
//! | graphs | by executable graph; its kernels are not known one by one |
//! | launches into a stream under capture | nothing: they do not run, the graph does |
//! | `cuLaunchHostFunc` | nothing: it runs on the CPU, and to hold it back could hold back what a kernel waits for |
//! | launches by kernels, graphs launched by graphs | with the measured time of what launched them, if it waits for them |
//! | copies, memsets | nothing: copy engines are no SMs |

mod calls;
mod capture;
mod events;
mod lane;
mod pacer;
#[cfg(test)]
mod tests;

pub(crate) use calls::*;
pub(crate) use capture::*;
use lane::{Lane, Own};

use crate::container::Container;
use crate::cuda::CUresult;
use pacer::Pacer;

static PACER: Pacer = Pacer::new();

/// A context that may be ending: the events in it go with it. To be made before the driver is asked.
#[derive(Debug)]
pub(crate) struct Ending {
    container: &'static Container,
    context: usize,
    card: usize,
    gone: bool,
}

impl Ending {
    /// Of a context, 0 = an unknown one of the card at this place in the container.
    pub(crate) fn begin(container: &'static Container, context: u64, card: u8) -> Self {
        let ending = Self {
            container,
            context: usize::try_from(context).unwrap_or(0),
            card: card.into(),
            gone: false,
        };
        PACER.sampler.hold(ending.context, ending.card, &events::Driver::HERE, |ended| {
            if let Some(lane) = ending.lane(ended.card) {
                PACER.enter(&lane, &ended);
            }
        });
        ending
    }

    fn lane(&self, card: usize) -> Option<Own<'static>> {
        Own::all(self.container).find(|lane| lane.index() == card)
    }

    /// It has ended, or has not.
    pub(crate) fn over(mut self, gone: bool) {
        self.gone = gone;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.gone {
            PACER.costs.functions_gone();
        }
        if let Some(lost) = PACER.sampler.ended(self.context, self.card, self.gone)
            && let Some(lane) = self.lane(lost.card)
        {
            PACER.lost(&lane, &lost);
        }
    }
}

/// Unloads functions by `call`, after which their handles may come again: what other threads launch until then tells nothing
/// of that.
pub(crate) fn unloading(call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    PACER.costs.functions_gone();
    result
}

/// The program waited for what it had launched: what is known of that now is entered.
pub(crate) fn settle(container: &'static Container) {
    if let Some(lane) = Own::current(container) {
        PACER.poll(&lane, &events::Driver::HERE);
    }
}
