//! The simulated node behind the fake NVIDIA driver: one JSON file that the driver library, the lab's
//! `fake` command and the CDI generator share.
//!
//! [`NodeState`] is the schema, [`Store`] the file with its lock, [`profile`] the card models,
//! [`mig`] the grids and what the driver does with them, [`verb`] the commands that disturb a node, [`live`] what
//! running programs have of the cards.

pub mod calls;
mod error;
pub mod live;
pub mod mig;
pub mod profile;
mod state;
mod store;
mod tables;
pub mod verb;

pub use error::Error;
pub use state::{
    Card, ComputeInstance, Driver, Ecc, EccCounts, Event, GpuInstance, InjectedError, Link, Mig, NODES_ENV,
    NodeState, Pci, Placement, Process,
};
pub use store::{STATE_ENV, Store};
