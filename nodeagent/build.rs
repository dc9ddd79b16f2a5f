//! Compiles the kubelet's protocols; no `protoc` is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    for file in ["deviceplugin/v1beta1/api.proto", "podresources/v1/api.proto"] {
        let (folder, name) = file.rsplit_once('/').ok_or("a proto lies in a folder")?;
        let descriptors = protox::compile([name], [format!("proto/{folder}")])?;
        tonic_prost_build::configure().build_transport(true).compile_fds(descriptors)?;
    }
    Ok(())
}
