//! `libcuda.so.1` of simulated cards.
