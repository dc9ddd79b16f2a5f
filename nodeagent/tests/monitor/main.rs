//! The monitor over a real tree of folders, with files that real processes hold, change and spoil, and the simulated
//! driver library.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;
mod driver;
mod held;
mod hostile;
mod limits;
mod pace;
mod series;
mod told;

/// Not a test: what a process of a tenant does, when another test starts this one as its process.
#[test]
fn tenant_process() {
    common::tenant::run();
}
