//! NVIDIA's CUDA runtime over the simulated driver: what it asks for is there.
//!
//! `MULLION_CUDART` names a folder with the contents of the wheels `nvidia-cuda-runtime-cu12` and `nvidia-cuda-runtime`, each in a folder
//! named by its version, as `tests/run hook` lays them out.
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]
#![cfg(target_arch = "x86_64")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names that CUDA 13.5 asks for and no header declares.
const UNKNOWN: &[&str] = &["", "cuSubgridCreate", "cuSubgridWorkerGridCreate", "cuSubgridWorksetCreate"];

/// The requests of a program linked with that runtime, as `name version flags symbol`, and what the program said.
fn requests(runtime: &Path) -> (Vec<String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let (program, log) = (folder.path().join("program"), folder.path().join("log"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/runtime.c");
    let mut gcc = Command::new("cc");
    let built =
        gcc.arg(source).arg("-o").arg(&program).arg(runtime).args(["-ldl", "-lpthread", "-lrt"]).status();
    assert!(built.unwrap().success());
    std::fs::copy(common::built(), folder.path().join("libcuda.so.1")).unwrap();
    let ran = Command::new(program)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("FAKE_CUDA_PROC_LOG", &log)
        .env("FAKE_CUDA_VERSION", "13050")
        .output()
        .unwrap();
    let text = std::fs::read_to_string(log).unwrap();
    (text.lines().map(str::to_owned).collect(), String::from_utf8(ran.stdout).unwrap())
}

/// The runtimes: version, folder inside of the package.
const RUNTIMES: [(&str, &str); 2] = [("12.9.79", "nvidia/cuda_runtime"), ("13.5.37", "nvidia/cu13")];

#[test]
#[ignore = "needs the built library and NVIDIA's runtime"]
fn the_runtime_finds_every_entry_point() {
    let root = PathBuf::from(
        std::env::var_os("MULLION_CUDART").expect("MULLION_CUDART is not set: run `tests/run hook`"),
    );
    for (version, folder) in RUNTIMES {
        let runtime = &root.join(version).join(folder).join("lib/libcudart_static.a");
        let (asked, said) = requests(runtime);
        let at = runtime.display();
        // 12.9.79 asks 419 times, 13.0.96 440, 13.5.37 481.
        assert!(asked.len() >= 400, "{at}: {} requests, {said}", asked.len());
        let mut own_stream = 0;
        let mut missing = BTreeSet::new();
        for line in &asked {
            let [name, _version, flags, symbol] = line.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{line}");
            };
            if symbol == "-" {
                missing.insert(name);
            } else {
                let stem = symbol.trim_end_matches("_ptds").trim_end_matches("_ptsz");
                let stem = stem.strip_suffix("_v2").or(stem.strip_suffix("_v3")).unwrap_or(stem);
                assert!(name.starts_with(stem) || stem.starts_with(name), "{at}: {line}");
                own_stream += i32::from(flags == "2" && stem != symbol);
            }
        }
        let unexpected: Vec<_> = missing.iter().filter(|n| !UNKNOWN.contains(n)).collect();
        assert!(unexpected.is_empty(), "{at}: {unexpected:?}");
        assert!(own_stream > 40, "{at}: {own_stream} requests for the thread's own stream");
        // It got as far as the driver's own entry points: version, init, cards.
        assert!(
            said.split(' ').next().is_some_and(|v| v.parse::<u32>().is_ok_and(|v| v >= 12_000)),
            "{at}: {said}"
        );
    }
}
