//! Memory accounting of a container: exact, lock-free, crash-safe.

#![no_std]
