//! What a panic would do: nothing here can unwind, so the process ends at once, where it stands.
//!
//! Nothing in the library is meant to panic; this exists because the language asks for it.

#[cfg(all(feature = "preload", not(test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    crate::sys::abort()
}
