//! What a context takes and gives back when a limit of it is set.

use core::cmp::Ordering;
use core::ffi::{c_int, c_uint};

use super::blocks::{BLOCK, round_up};
use super::context_charge::MOST;
use super::looks::From;
use super::{Here, Kind, charge, here, key_of};
use crate::container::{Card, Container};
use crate::cuda::{CUdevice, CUresult};
use crate::driver;

/// `CU_LIMIT_STACK_SIZE`: of each thread.
const STACK: c_uint = 0;
/// `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`: sizes in bytes.
const IN_BYTES_FIRST: c_uint = 1;
const IN_BYTES_LAST: c_uint = 2;
/// `CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT`: those behind it steer caches and take nothing.
const LAST_OF_MEMORY: c_uint = 4;

/// How much more and how much less a context can take when `limit` goes from `former` to `value` on a card that runs
/// `threads` at once. What others on the card do meanwhile must not be taken for this context's.
fn believable(limit: c_uint, former: Option<usize>, value: usize, threads: Option<u64>) -> (u64, u64) {
    let step = value.abs_diff(former.unwrap_or(0)) as u64;
    let most = match limit {
        STACK => threads.map_or(MOST, |threads| round_up(step.saturating_mul(threads), BLOCK)),
        IN_BYTES_FIRST..=IN_BYTES_LAST if former.is_some() => round_up(step, BLOCK),
        _ => MOST,
    };
    match former.map(|former| value.cmp(&former)) {
        Some(Ordering::Greater) | None => (most, 0),
        Some(Ordering::Less) => (0, most),
        Some(Ordering::Equal) => (0, 0),
    }
}

/// Threads that a card has a stack for.
fn threads_of(container: &Container, card: &Card) -> Option<u64> {
    const PROCESSORS: c_uint = 16;
    const THREADS_EACH: c_uint = 39;
    let ask = driver::function!(
        cuDeviceGetAttribute: unsafe extern "C" fn(*mut c_int, c_uint, CUdevice) -> CUresult
    )?;
    let device = container.device(card)?;
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a device of this process; the driver writes one number.
        unsafe { ask(&raw mut value, which, device) }.is_ok().then(|| u64::try_from(value).ok()).flatten()
    };
    Some(attribute(PROCESSORS)? * attribute(THREADS_EACH)?)
}

/// `cuCtxSetLimit`: a larger stack, heap or buffer takes memory at once.
///
/// # Safety
/// As `cuCtxSetLimit`.
pub(crate) unsafe fn context_set_limit(
    real: unsafe extern "C" fn(c_uint, usize) -> CUresult,
    limit: c_uint,
    value: usize,
) -> CUresult {
    let Some(now) = here().ok().filter(|_| limit <= LAST_OF_MEMORY) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(limit, value) };
    };
    let ask = driver::function!(cuCtxGetLimit: unsafe extern "C" fn(*mut usize, c_uint) -> CUresult);
    let mut former = 0;
    // SAFETY: the driver writes one number.
    let former = ask.is_some_and(|ask| unsafe { ask(&raw mut former, limit) }.is_ok()).then_some(former);
    // SAFETY: the caller's own arguments, but for a value that was set before.
    let set = |value| unsafe { real(limit, value) };
    let (result, is_refused) = change(now, limit, former, value, set);
    if !is_refused {
        return result;
    }
    // What it took stays charged until it is seen to go, or the context ends: the driver may refuse this.
    if let Some(former) = former {
        let _ = change(now, limit, Some(value), former, set);
    }
    CUresult::OUT_OF_MEMORY
}

/// Sets `limit`, and charges the context what that takes or gives back; the driver's answer, and whether it took more than
/// there is room for.
fn change(
    now: Here,
    limit: c_uint,
    former: Option<usize>,
    value: usize,
    set: impl FnOnce(usize) -> CUresult,
) -> (CUresult, bool) {
    let measuring = &now.container.books.measuring;
    let measurement = measuring.begin(now.container, now.card, From::Here, true);
    let result = set(value);
    if !result.is_ok() {
        measurement.abandon();
        return (result, false);
    }
    let threads = if limit == STACK { threads_of(now.container, now.card) } else { None };
    let (most_more, most_less) = believable(limit, former, value, threads);
    let is_refused = measurement.end(|_, taken| {
        let Some(taken) = taken else { return false };
        let most = |most| if most == 0 { 0 } else { taken.believed(most, now.card.is_shared()) };
        let (more, less) = (taken.more(most(most_more)), taken.less(most(most_less)));
        let objects = &now.container.books.objects;
        let key = key_of(Kind::Context, now.context);
        let Some(entry) = objects.get(key) else { return false };
        // Where the context ends meanwhile, it takes along what its entry says.
        if more > 0 {
            let claim = charge::ask(now.container, now.card, more);
            let is_refused = claim.is_none();
            match claim {
                Some(claim) => charge::settle(now.card, claim),
                None => now.card.memory.force(more),
            }
            if objects.swap_size(key, entry.size + more).is_none() {
                now.card.memory.free(more);
            }
            return is_refused;
        }
        let freed = less.min(entry.size);
        if freed > 0 && objects.swap_size(key, entry.size - freed).is_some() {
            now.card.memory.free(freed);
        }
        false
    });
    (result, is_refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_takes_and_gives_only_what_its_change_can() {
        let threads = 132 * 2048;
        for (case, limit, former, value, want) in [
            ("a larger heap", 2, Some(8 << 20), (16 << 20) + 1, ((8 << 20) + BLOCK, 0)),
            ("a smaller heap", 2, Some(16 << 20), 8 << 20, (0, 8 << 20)),
            ("the same", 2, Some(8 << 20), 8 << 20, (0, 0)),
            ("more stack for each thread", 0, Some(1024), 65_536 + 1024, (threads * 65_536, 0)),
            ("less stack for each thread", 0, Some(65_536 + 1024), 1024, (0, threads * 65_536)),
            ("a stack from nobody knows what", 0, None, 65_536, (threads * 65_536, 0)),
            ("more launches of launches", 4, Some(2048), 4096, (MOST, 0)),
            ("from nobody knows what", 2, None, 8 << 20, (MOST, 0)),
        ] {
            assert_eq!(believable(limit, former, value, Some(threads)), want, "{case}");
        }
        assert_eq!(believable(0, Some(1024), 2048, None), (MOST, 0), "a driver that does not tell");
    }
}
