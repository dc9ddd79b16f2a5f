//! The program as the lab calls it.

use std::fs::{self, File};
use std::process::Command;

#[test]
fn one_command_writes_yaml_or_json_by_the_files_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let state = fake_state::profile::node("a30", "node-b").unwrap();
    fake_state::Store::create(at("state.json"), &state).unwrap();
    fs::create_dir(at("dev")).unwrap();
    fs::create_dir(at("driver")).unwrap();
    for name in ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
        File::create(at("dev").join(name)).unwrap();
    }
    for (output, start) in [("nvidia.yaml", "cdiVersion:"), ("nvidia.json", "{")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fake-cdi"));
        command.arg("--state").arg(at("state.json")).arg("--dev-root").arg(at("dev"));
        command.arg("--driver-root").arg(at("driver")).args(["--naming", "uuid", "--output"]).arg(at(output));
        let done = command.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = fs::read_to_string(at(output)).unwrap();
        assert!(text.starts_with(start) && text.contains(&state.cards[0].uuid), "{text}");
    }
    fs::remove_file(at("dev").join("nvidia0")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fake-cdi"));
    command.arg("--state").arg(at("state.json")).arg("--dev-root").arg(at("dev"));
    command.arg("--driver-root").arg(at("driver")).arg("--output").arg(at("other.json"));
    let refused = command.output().unwrap();
    assert!(!refused.status.success() && !at("other.json").exists());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("NoDeviceNode"));
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|n| n.to_string_lossy().ends_with(".new")), "{left:?}");
}
