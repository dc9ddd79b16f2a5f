//! NVIDIA's own CUDA runtime under the library: what it asks the driver for, it gets with the right ABI and stream
//! flavour.
#![cfg(target_arch = "x86_64")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{compile, library, program, run, stub};
use tempfile::TempDir;

/// The runtimes: version, folder inside of the package, and the symbol of `cudaGetDeviceProperties`.
const RUNTIMES: [(&str, &str, &str); 2] = [
    ("12.9.79", "nvidia/cuda_runtime", "-DPROPERTIES=cudaGetDeviceProperties_v2"),
    ("13.5.37", "nvidia/cu13", "-DPROPERTIES=cudaGetDeviceProperties"),
];

fn runtime(version: &str, folder: &str) -> PathBuf {
    let root = std::env::var_os("MULLION_CUDART").expect("MULLION_CUDART is not set: run `tests/run hook`");
    let folder = PathBuf::from(root).join(version).join(folder);
    assert!(folder.join("lib/libcudart_static.a").exists(), "no runtime in {}", folder.display());
    folder
}

/// The program of `runtime.c`, with a runtime linked into it.
fn program_with(runtime: &Path, into: &Path, properties: &str) {
    let archive = runtime.join("lib/libcudart_static.a");
    let flags = [properties, archive.to_str().unwrap(), "-ldl", "-lrt", "-lpthread"];
    compile("gcc", &[&program("runtime.c")], into, &flags);
}

/// What the runtime asked the driver for: name, version, flags.
fn asked_for(runtime: &Path, folder: &Path, properties: &str) -> BTreeSet<(String, u32, u64)> {
    stub::build(folder, "gcc");
    let into = folder.join("runtime");
    program_with(runtime, &into, properties);
    let log = folder.join("asked");
    let ran = run(Command::new(&into).env_clear().env("LD_LIBRARY_PATH", folder).env("STUB_LOG", &log));
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    std::fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[0].to_owned(), words[1].parse().unwrap(), words[2].parse().unwrap())
        })
        .collect()
}

#[test]
#[ignore = "needs the built library"]
fn what_the_runtime_asks_for_has_the_right_form() {
    let forms = stub::forms();
    let hooked: Vec<&str> = vgpu::exported_names().collect();
    for (version, folder, properties) in RUNTIMES {
        let scratch = TempDir::new().unwrap();
        let asked = asked_for(&runtime(version, folder), scratch.path(), properties);
        // 419 and 481 requests were counted on these releases, a few names at two or three versions.
        let names: BTreeSet<&str> = asked.iter().map(|(name, ..)| name.as_str()).collect();
        let per_thread = asked.iter().filter(|(.., flags)| flags & 2 != 0).count();
        assert!(
            names.len() > 300 && asked.len() > 400 && per_thread > 60,
            "{version}: {} {}",
            names.len(),
            asked.len()
        );

        let mut tables = String::from(
            "struct linked { const char *name; void *address; };\nstruct triple { const char *name; int version; unsigned long flags; };\n\
             const struct linked linked[] = {{0, 0}};\nconst int linked_count = 0;\nconst struct triple triples[] = {\n",
        );
        for (name, version, flags) in &asked {
            writeln!(tables, "{{\"{name}\", {version}, {flags}}},").unwrap();
        }
        writeln!(tables, "}};\nconst int triple_count = {};", asked.len()).unwrap();
        let source = scratch.path().join("tables.c");
        std::fs::write(&source, tables).unwrap();
        let probe = scratch.path().join("probe");
        compile("gcc", &[&program("probe.c"), &source], &probe, &[]);
        let told = |preload: &str| {
            run(Command::new(&probe)
                .env_clear()
                .env("LD_LIBRARY_PATH", scratch.path())
                .env("LD_PRELOAD", preload))
            .quiet()
        };
        let (with, without) = (told(library().to_str().unwrap()), told(""));
        let mut wrapped = 0;
        for (ours, drivers) in with.lines().zip(without.lines()) {
            let (ours, drivers): (Vec<&str>, Vec<&str>) =
                (ours.split(' ').collect(), drivers.split(' ').collect());
            if ours[0] != "v2" {
                continue;
            }
            // The driver's own answer, or the wrapper of exactly that function.
            assert_eq!(ours[..5], drivers[..5], "{version}");
            let (name, asked_version, flags) = (ours[1], ours[2].parse().unwrap(), ours[3]);
            let symbol = ours[4];
            assert_eq!(
                stub::expected(&forms, name, asked_version, flags == "2").unwrap_or("nothing"),
                symbol,
                "{ours:?}"
            );
            if symbol == "nothing" {
                continue;
            }
            let image = if hooked.contains(&symbol) { "libvgpu.so" } else { "libcuda.so.1" };
            assert_eq!(ours[5], image, "{version}: {ours:?}");
            wrapped += usize::from(image == "libvgpu.so");
        }
        assert!(wrapped > 20, "{version}: {wrapped}");
    }
}

/// The fake driver, as `libcuda.so.1` of a folder.
fn fake_driver(folder: &Path) {
    let built = common::programs().join("libcuda.so");
    assert!(built.exists(), "no {}: `cargo build -p fake-cuda`", built.display());
    std::os::unix::fs::symlink(built, folder.join("libcuda.so.1")).unwrap();
}

/// The runtime, linked in or loaded, over a driver that gives memory: it sees a card of the size of the limit.
#[test]
#[ignore = "needs the built library"]
fn the_runtime_sees_its_slice() {
    for (version, folder, properties) in RUNTIMES {
        let runtime = runtime(version, folder);
        for kind in ["static", "shared"] {
            let scratch = TempDir::new().unwrap();
            fake_driver(scratch.path());
            let into = scratch.path().join("runtime");
            let libraries = runtime.join("lib");
            if kind == "static" {
                program_with(&runtime, &into, properties);
            } else {
                let name = format!("libcudart.so.{}", version.split('.').next().unwrap());
                compile(
                    "gcc",
                    &[&program("runtime.c")],
                    &into,
                    &[properties, libraries.join(name).to_str().unwrap()],
                );
            }
            let search = format!("{}:{}", scratch.path().display(), libraries.display());
            let ask = |preload: &Path| {
                run(Command::new(&into)
                    .env_clear()
                    .env("LD_LIBRARY_PATH", &search)
                    .env("LD_PRELOAD", preload)
                    .env("FAKE_CUDA_CARDS", "h100x1")
                    .env("CUDA_DEVICE_MEMORY_LIMIT", "4g")
                    .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", scratch.path().join("usage.cache")))
                .quiet()
            };
            let without = ask(Path::new(""));
            let with = ask(&library());
            let (without, with): (BTreeMap<_, _>, BTreeMap<_, _>) =
                (common::pairs(&without), common::pairs(&with));
            let limit = (4_u64 << 30).to_string();
            for key in ["count", "malloc", "info", "properties", "free"] {
                assert_eq!((without[key], with[key]), ("0", "0"), "{version} {kind} {key}");
            }
            assert_eq!(
                (with["total"], with["total-of-properties"]),
                (limit.as_str(), limit.as_str()),
                "{version} {kind}"
            );
            assert_ne!(without["total"], limit, "{version} {kind}");
            // cudaErrorMemoryAllocation
            assert_eq!(with["too-much"], "2", "{version} {kind}");
            let used: u64 = with["used"].parse().unwrap();
            let left: u64 = with["left"].parse().unwrap();
            assert_eq!(used - left, 2 << 20, "{version} {kind}: the megabyte, as the driver gives it");
        }
    }
}
