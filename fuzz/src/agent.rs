//! What the node's agent reads of others: the kubelet's record, and NVIDIA's CDI spec.

use std::path::Path;

use mullion_core::request::COUNT;
use mullion_nodeagent::checkpoint;
use mullion_nodeagent::prepare::driver_files::{CardName, edits_for, parse};

/// The kubelet's device checkpoint: what was understood is understood again when it is written anew.
pub fn kubelet_checkpoint(data: &[u8]) {
    match checkpoint::parse(data, COUNT) {
        Err(error) => crate::sayable(&error.to_string()),
        Ok(owners) => {
            for owner in &owners {
                let grant = owner.grant.as_deref().unwrap_or("0123456789abcdef");
                assert!(grant.len() == 16 && grant.bytes().all(|b| b.is_ascii_hexdigit()), "{grant}");
                assert!(checkpoint::owners_of(&owners, &owner.ids).contains(owner));
            }
        }
    }
}

/// A CDI spec as the driver's tools write it.
pub fn driver_spec(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(Some(spec)) = parse(Path::new("nvidia.yaml"), &text) else { return };
    let card = |index: u32| CardName { uuid: format!("GPU-{index}"), index, minor: index };
    for cards in [vec![card(0)], vec![card(0), card(1)], vec![]] {
        if let Err(missing) = edits_for(std::slice::from_ref(&spec), &cards) {
            crate::sayable(&missing.to_string());
        }
    }
}
