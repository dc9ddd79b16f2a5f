//! NVIDIA's own CUDA runtime under the library: what it asks the driver for, it gets with the right ABI and stream
//! flavour.
//!
//! The runtime asks for all functions that it may need before its first call. Behind that it checks by private tables
//! that the driver is NVIDIA's own, so over any other driver it gets no further, with the library or without: how it then
//! allocates is for `tests/gpu` to see.
#![cfg(test)]
#![cfg(target_arch = "x86_64")]

mod common;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{compile, library, program, run, stub};
use tempfile::TempDir;

/// The runtimes: version, folder inside of the package.
const RUNTIMES: [(&str, &str); 2] = [("12.9.79", "nvidia/cuda_runtime"), ("13.5.37", "nvidia/cu13")];

fn runtime(version: &str, folder: &str) -> PathBuf {
    let root = std::env::var_os("MULLION_CUDART").expect("MULLION_CUDART is not set: run `tests/run hook`");
    let folder = PathBuf::from(root).join(version).join(folder);
    assert!(folder.join("lib/libcudart_static.a").exists(), "no runtime in {}", folder.display());
    folder
}

/// The program of `runtime.c`, with a runtime linked into it.
fn program_with(runtime: &Path, into: &Path) {
    let archive = runtime.join("lib/libcudart_static.a");
    let flags = [archive.to_str().unwrap(), "-ldl", "-lrt", "-lpthread"];
    compile("gcc", &[&program("runtime.c")], into, &flags);
}

type Asked = BTreeSet<(String, u32, u64)>;

/// What the runtime asked the driver for, and what the program said in the end; under `preload`, if there is one.
fn asked_for(program: &Path, folder: &Path, preload: &Path) -> (Asked, common::Ran) {
    let log = folder.join("asked");
    let _ = std::fs::remove_file(&log);
    let ran = run(Command::new(program)
        .env_clear()
        .env("LD_LIBRARY_PATH", folder)
        .env("LD_PRELOAD", preload)
        .env("STUB_LOG", &log));
    let asked = std::fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[0].to_owned(), words[1].parse().unwrap(), words[2].parse().unwrap())
        })
        .collect();
    (asked, ran)
}

#[test]
#[ignore = "needs the built library"]
fn what_the_runtime_asks_for_has_the_right_form() {
    let forms = stub::forms();
    let hooked: Vec<&str> = vgpu::exported_names().collect();
    for (version, folder) in RUNTIMES {
        let scratch = TempDir::new().unwrap();
        stub::build(scratch.path(), "gcc");
        let started = scratch.path().join("runtime");
        program_with(&runtime(version, folder), &started);
        let (asked, without) = asked_for(&started, scratch.path(), Path::new(""));
        let (asked_under_it, with) = asked_for(&started, scratch.path(), &library());
        assert!(asked_under_it.is_superset(&asked), "{version}");
        assert_eq!(
            (with.code, with.stdout, with.stderr),
            (without.code, without.stdout, without.stderr),
            "{version}"
        );
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
