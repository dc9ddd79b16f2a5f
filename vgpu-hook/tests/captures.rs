//! Streams under capture: the launches into them are left alone, all others are paced as ever.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot be set up has failed"
)]

mod common;
mod sessions;

use common::{pairs, run};
use sessions::Place;

#[test]
#[ignore = "needs the built library"]
fn a_capture_stops_no_measurement_elsewhere_and_is_over_when_its_stream_or_context_is_gone() {
    let mut place = Place::new();
    place.set("CUDA_DEVICE_SM_LIMIT", "50");
    place.set("GPU_CORE_UTILIZATION_POLICY", "force");
    let text = run(&mut place.command("captures")).quiet();
    let told = pairs(&text);
    for (when, measured, asked) in [
        ("before", "1", "0"),
        ("beside", "1", "some"),
        ("captured", "0", "some"),
        ("destroyed", "1", "0"),
        ("context-destroyed", "1", "0"),
    ] {
        assert_eq!(told.get(format!("{when}-measured").as_str()), Some(&measured), "{when}: {text}");
        let found = told.get(format!("{when}-asked").as_str()).copied();
        assert!(if asked == "0" { found == Some("0") } else { found > Some("0") }, "{when}: {text}");
    }
}
