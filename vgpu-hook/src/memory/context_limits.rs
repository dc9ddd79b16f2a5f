//! What a context takes and gives back when a limit of it is set.

use core::ffi::c_uint;

use super::blocks::{BLOCK, round_up};
use super::contexts::MOST;
use super::looks::From;
use super::{Kind, charge, here, key_of};
use crate::cuda::CUresult;
use crate::driver;

/// `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`: sizes in bytes. The limit before them, the stack's, is
/// one per thread.
const IN_BYTES: core::ops::RangeInclusive<c_uint> = 1..=2;
/// `CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT`: those behind it steer caches and take nothing.
const LAST_OF_MEMORY: c_uint = 4;

/// How much more and how much less a context can take when `limit` goes from `former` to `value`. What others on the
/// card do meanwhile must not be taken for this context's.
fn believable(limit: c_uint, former: Option<usize>, value: usize) -> (u64, u64) {
    let Some(former) = former else { return (MOST, 0) };
    let step = value.abs_diff(former) as u64;
    let most = if IN_BYTES.contains(&limit) { round_up(step, BLOCK) } else { MOST };
    match value.cmp(&former) {
        core::cmp::Ordering::Greater => (most, 0),
        core::cmp::Ordering::Less => (0, most),
        core::cmp::Ordering::Equal => (0, 0),
    }
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
    let measuring = &now.container.books.measuring;
    let measurement = measuring.begin(now.container, now.card, From::Here, true);
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(limit, value) };
    if !result.is_ok() {
        measurement.abandon();
        return result;
    }
    let (most_more, most_less) = believable(limit, former, value);
    let refused = measurement.end(|_, taken| {
        let taken = taken?;
        let (more, less) = (taken.more(most_more), taken.less(most_less));
        let objects = &now.container.books.objects;
        let key = key_of(Kind::Context, now.context);
        let entry = objects.get(key)?;
        // Where the context ends meanwhile, it takes along what its entry says.
        if more > 0 {
            let Some(claim) = charge::ask(now.container, now.card, more) else {
                return Some(measuring.hidden_many(Some(now.card)));
            };
            charge::settle(now.card, claim);
            if objects.swap_size(key, entry.size + more).is_none() {
                now.card.memory.free(more);
            }
        } else if less > 0 {
            let freed = less.min(entry.size);
            if objects.swap_size(key, entry.size - freed).is_some() {
                now.card.memory.free(freed);
            }
        }
        None
    });
    let Some(_hidden) = refused else { return result };
    if let Some(former) = former {
        // SAFETY: what it was before.
        let _ = unsafe { real(limit, former) };
    }
    CUresult::OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_takes_and_gives_only_what_its_change_can() {
        for (case, limit, former, value, want) in [
            ("a larger heap", 2, Some(8 << 20), (16 << 20) + 1, ((8 << 20) + BLOCK, 0)),
            ("a smaller heap", 2, Some(16 << 20), 8 << 20, (0, 8 << 20)),
            ("the same", 2, Some(8 << 20), 8 << 20, (0, 0)),
            ("more stack for each thread", 0, Some(1024), 2048, (MOST, 0)),
            ("less stack for each thread", 0, Some(2048), 1024, (0, MOST)),
            ("from nobody knows what", 2, None, 8 << 20, (MOST, 0)),
        ] {
            assert_eq!(believable(limit, former, value), want, "{case}");
        }
    }
}
