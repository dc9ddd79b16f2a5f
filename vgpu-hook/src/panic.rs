//! What a panic would do: nothing here can unwind, so the process ends at once, where it stands, with a line on stderr.
//!
//! Nothing in the library can panic; this exists because the language asks for it. The compiler leaves it out, with its
//! line, because nothing leads to it: `tests/gates.rs` looks for the line.

#[cfg(all(feature = "preload", not(test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    crate::sys::complain(&["libvgpu.so: a panic was reached, the process ends"]);
    crate::sys::abort()
}
