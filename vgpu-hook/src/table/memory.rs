//! Rows of the family `memory`.

use super::table;

table! { Cuda; }
