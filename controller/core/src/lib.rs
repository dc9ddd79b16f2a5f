//! Mullion's decisions: pure functions over one ledger.
//!
//! Nothing here does IO, reads a clock or draws a random number; this crate's manifest has no tokio, kube or
//! sqlx, so the compiler keeps it that way. Controller, agent, CLI and tests all call these same functions.
//!
//! - [`units`]: numbers and names as types
//! - [`request`]: what a pod asks for, parsed once
//! - [`facts`]: what a ledger is folded from
//! - [`ledger`]: the fold, and what is free
//! - [`placement`]: which cards a pod gets on a node
//! - [`score`]: which node is better
//! - [`refusal`]: why not, as a value

mod charge;
pub mod facts;
pub mod ledger;
pub mod placement;
pub mod refusal;
pub mod request;
pub mod score;
pub mod units;
