//! What tests ask: exports that the real driver does not have.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::Text;
use crate::driver::Driver;
use crate::gate;
use crate::table;

fn on<T: std::default::Default>(device: c_int, ask: impl FnOnce(&mut Driver, usize) -> T) -> T {
    let mut driver = gate::driver();
    let found = driver.as_mut().and_then(|d| d.ordinal(device).ok().map(|o| (d, o)));
    found.map_or_else(T::default, |(driver, ordinal)| ask(driver, ordinal))
}

fn row(name: Text) -> Option<&'static crate::table::Row> {
    let name = name.read().ok()?;
    table::rows().find(|r| r.symbol == name)
}

/// Bytes that the card gave this process.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_given(device: c_int) -> u64 {
    on(device, |driver, ordinal| driver.live.given_here(driver.cards[ordinal].index))
}

/// Bytes that the card gave, over all processes; those of the dead count until they are released.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_given_on_card(device: c_int) -> u64 {
    on(device, |driver, ordinal| driver.live.given(driver.cards[ordinal].index))
}

/// The most bytes that the card had ever given at once, over all processes.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_peak(device: c_int) -> u64 {
    use std::sync::atomic::Ordering::SeqCst;
    on(device, |driver, ordinal| driver.live.region().cards[driver.cards[ordinal].index].peak.load(SeqCst))
}

/// Busy ns of the card so far, over all processes.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_busy_ns(device: c_int) -> u64 {
    on(device, |driver, ordinal| driver.live.busy(driver.cards[ordinal].index))
}

/// ns of work that this process handed in so far.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_submitted_ns(device: c_int) -> u64 {
    on(device, |driver, ordinal| driver.live.mark(driver.cards[ordinal].index))
}

/// Address ranges in use in this process.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_live_allocations() -> u64 {
    gate::driver().as_ref().map_or(0, |d| d.allocs.len() as u64)
}

/// Calls of an entry point, by the name of its symbol; `u64::MAX` for an unknown one.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_calls(symbol: Text) -> u64 {
    row(symbol).map_or(u64::MAX, |r| r.site.calls())
}

/// Has the next `calls` calls of a symbol answer `code`; 0 calls end it. 0, or 1 for an unknown symbol.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_fail(symbol: Text, code: c_uint, calls: c_uint) -> c_int {
    row(symbol).map_or(1, |r| {
        r.site.fail(code, calls);
        0
    })
}

/// Sets the time of every kernel of a name, ns.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_set_duration(name: Text, ns: u64) -> c_int {
    name.read().map_or(1, |name| {
        crate::module::set_duration(&name, ns);
        0
    })
}

/// Moves a simulated clock (`FAKE_CUDA_CLOCK=simulated`) on and answers it; 0 with the real clock.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_cuda_advance_clock(ns: u64) -> u64 {
    let mut driver = gate::driver();
    driver.as_mut().map_or(0, |d| fake_state::live::work::move_on(d.live.region(), ns))
}
