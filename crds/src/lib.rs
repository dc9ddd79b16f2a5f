//! Mullion's three kinds (group `mullion.io`, version `v1alpha1`) and their translation into the facts that
//! `mullion-core` folds.
//!
//! - [`gpunode`]: one node's cards: the admin's wishes in `spec`, the agent's report in `status`
//! - [`vgpuallocation`]: who has which slice of which card
//! - [`miglayout`]: wanted MIG instances
//! - [`manifest`]: their `CustomResourceDefinition`s, as they are written into this crate's folder
//! - [`object`]: a decision as a `VGPUAllocation` object
//! - [`pod`]: a Kubernetes pod as the core's view of it
//! - [`facts`]: objects to facts

pub mod facts;
pub mod gpunode;
pub mod manifest;
pub mod miglayout;
pub mod names;
pub mod object;
pub mod pod;
pub mod vgpuallocation;

pub use gpunode::{GPUNode, GPUNodeSpec, GPUNodeStatus};
pub use miglayout::{MIGLayout, MIGLayoutSpec, MIGLayoutStatus};
pub use vgpuallocation::{VGPUAllocation, VGPUAllocationSpec, VGPUAllocationStatus};
