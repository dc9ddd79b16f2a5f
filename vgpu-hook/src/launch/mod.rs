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

use pacer::Pacer;

static PACER: Pacer = Pacer::new();

/// A context is about to be destroyed or reset: its events go with it. To be called before the driver is.
pub(crate) fn context_gone() {
    PACER.sampler.forget();
}
