//! Makes the library look as NVIDIA's to the loader.

fn main() {
    // The name under which programs ask for the real one.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its own functions are its own: a preloaded library does not get in between.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Programs that end while a thread of theirs is in the driver do not lose its code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
