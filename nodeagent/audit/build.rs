//! The migrations are embedded at build time; a changed one has to rebuild the crate.

fn main() {
    println!("cargo::rerun-if-changed=../../migrations");
}
