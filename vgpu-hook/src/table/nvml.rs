//! Rows of NVML.

use super::table;

table! { Nvml; }
