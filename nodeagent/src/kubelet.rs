//! The kubelet's protocols, generated from the files in `proto/`.

/// `deviceplugin/v1beta1`: how the kubelet is offered slots and asks for them.
#[allow(missing_docs, clippy::pedantic, reason = "generated from the kubelet's proto file")]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// `podresources/v1`: what the kubelet says containers hold. A cross-check only: it knows no pod UID and no
/// ordinary init containers.
#[allow(missing_docs, clippy::pedantic, reason = "generated from the kubelet's proto file")]
pub mod podresources {
    tonic::include_proto!("v1");
}

/// Version of the device plugin protocol that we speak (`Version` in the kubelet's constants.go).
pub const API_VERSION: &str = "v1beta1";
/// `health` of a usable slot (`Healthy` in the kubelet's constants.go).
pub const HEALTHY: &str = "Healthy";
