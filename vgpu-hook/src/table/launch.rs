//! Rows of the family `launch`.

use super::table;

table! { Cuda; }
