//! Mullion's node agent: the node's cards as the cluster sees them, and each container its own slice of them.
//!
//! - [`config`]: flags and file; [`error`]: what can fail
//! - [`nvml`]: the driver; [`health`]: whether cards can be used; [`inventory`]: the report in `GPUNode.status`
//! - [`device_plugin`]: slots for the kubelet; [`checkpoint`]: the kubelet's record of who has which;
//!   [`prepare`]: a container's devices
//! - [`api`]: watches; [`status`]: what allocations say; [`release`]: the end of one; [`events`]: Events
//! - [`world`]: what the agent knows; `restore`: what a former run left; [`state`]: what it must know after a restart; [`cgroup`]: what still runs
//! - [`monitor`]: what containers do with their cards; [`audit`]: the way to the audit log; [`agent`]: all of it together; [`metrics`]: what can be scraped

pub mod agent;
pub mod api;
pub mod audit;
pub mod cgroup;
pub mod checkpoint;
pub mod config;
pub mod device_plugin;
pub mod error;
pub mod events;
pub mod health;
pub mod inventory;
pub mod kubelet;
pub mod metrics;
pub mod monitor;
pub mod nvml;
pub mod prepare;
pub mod release;
mod restore;
pub mod state;
pub mod status;
pub mod wishes;
pub mod world;
