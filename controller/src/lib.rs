//! Mullion's controller: admission webhook, scheduler extender and reconcilers.
//!
//! Every decision is a function of `mullion-core`; this crate looks, asks it, and writes.
//!
//! - [`config`][]: settings
//! - [`guard`][]: objects that may not be readable
//! - [`store`][]: what is known of the cluster, folded from watches
//! - [`webhook`][]: pods that ask for GPUs are read once, filled in or refused
//! - [`extender`][]: filter, prioritize and bind for the kube-scheduler beside us
//! - [`reconcile`][]: what ends, collides, waits or went around us
//! - [`lease`][]: which replica reconciles
//! - [`cluster`][]: calls to the API server and what became of them
//! - [`metrics`][], [`health`][]: what is counted, and whether we can answer
//! - [`app`][]: all of it as one process

pub mod app;
pub mod cluster;
pub mod config;
pub mod error;
pub mod extender;
pub mod guard;
pub mod health;
pub mod lease;
pub mod metrics;
pub mod reconcile;
pub mod store;
pub mod undo;
pub mod webhook;
pub mod weigh;

pub use error::Error;

#[cfg(test)]
mod fake_api;
#[cfg(test)]
mod fixtures;
