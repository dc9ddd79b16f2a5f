//! `libvgpu.so`: holds a container to its slice of a card.

#![no_std]
