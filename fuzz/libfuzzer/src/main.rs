//! libFuzzer around the targets of `mullion-fuzz`; `MULLION_FUZZ_TARGET` names the one.

#![no_main]

use std::sync::OnceLock;

use mullion_fuzz::{Target, target};

static TARGET: OnceLock<Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let chosen = TARGET.get_or_init(|| {
        let name = std::env::var("MULLION_FUZZ_TARGET").expect("MULLION_FUZZ_TARGET names a target");
        target(&name).expect("MULLION_FUZZ_TARGET names a target of mullion-fuzz")
    });
    chosen(data);
});
