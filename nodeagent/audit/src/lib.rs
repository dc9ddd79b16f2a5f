//! The audit log: one append-only SQLite file per node that says who had which card when, and why.
//!
//! * [`Event`]: the facts, past tense, typed. They double as the source that a node's ledger is rebuilt from:
//!   [`replay()`] folds them into a [`NodeLedger`].
//! * [`AuditLog`]: the one writer. [`AuditLog::append`] returns when the fact is on disk, and many callers at once
//!   share one fsync. Where it fails, the caller must not go on: the agent refuses a container rather than run it
//!   unaudited.
//! * [`AuditReader`]: any number of readers, in this or other processes, on a live file as well.
//! * [`cli`]: `audit verify|list|who-had|pod`.
//!
//! # What the chain proves
//! Each row holds the SHA-256 over its own columns and the hash of the row before ([`Row::digest`]), so a row that was
//! changed, removed from the middle, added in between or reordered is found by [`AuditReader::verify`], and SQL itself
//! refuses UPDATE and DELETE. What the file alone cannot prove: that nobody who can write it recomputed every hash
//! behind a change, or cut off the tail together with SQLite's own record of the highest row. Both show against a head
//! (`SEQ:HASH`) that was noted elsewhere; `audit verify --expect` compares with one.

mod chain;
pub mod cli;
mod error;
mod event;
mod log;
mod reader;
mod replay;
mod store;

pub use chain::{CardRow, Head, Row};
pub use error::Error;
pub use event::{
    AllocationRef, CardMinute, CardSeen, CardState, ContainerKind, ContainerShares, Entry, Event, MigShare,
    PodRef, Share,
};
pub use log::{AuditLog, Failure, Health, Options, Seq};
pub use reader::{AuditReader, Filter, Finding, Problem, Verification};
pub use replay::{CardHealth, Grant, HeldAllocation, HeldContainer, Holder, NodeLedger, replay};

/// Where the log lies on a node.
pub const DEFAULT_PATH: &str = "/var/lib/mullion/audit.db";
