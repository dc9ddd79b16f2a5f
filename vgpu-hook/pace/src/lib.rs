//! Pacing of kernel launches: a bucket that refills itself and the loop that steers it.

#![no_std]
