//! The audit log on real files: one program, because each links SQLite.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod cli;
mod crash;
mod full_disk;
mod given;
mod history;
mod log;
mod open;
mod replay;
mod tamper;
