//! Programs of the driver API and of NVML over the fake driver: each sees its slice, and loses nothing else.
#![cfg(test)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{compile, library, library_for, pairs, program, run};
use fake_state::{STATE_ENV, Store, profile};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const CHUNK: u64 = 64 << 20;

/// A folder with the fake drivers under their names, a node's cards, and a usage file to be.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        // In memory: on an overlay file system, which may be under /tmp, a lock has to be kept by a descriptor.
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let built = common::programs();
        for (file, name) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
            let file = built.join(file);
            assert!(file.exists(), "no {}: `cargo build -p fake-cuda -p fake-nvml`", file.display());
            std::os::unix::fs::symlink(file, folder.path().join(name)).unwrap();
        }
        let state = profile::node("h100x2", "node-a").unwrap();
        Store::create(folder.path().join("node.json"), &state).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn build(&self, name: &str) -> PathBuf {
        let into = self.path(name);
        compile("gcc", &[&program(&format!("{name}.c"))], &into, &["-Wno-strict-prototypes"]);
        into
    }

    /// The program with cards, and the library with a limit in GiB.
    fn limited(&self, program: &Path, limit: Option<u64>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("LD_LIBRARY_PATH", self.folder.path()).env(STATE_ENV, self.path("node.json"));
        if let Some(limit) = limit {
            command
                .env("LD_PRELOAD", library())
                .env("CUDA_DEVICE_MEMORY_LIMIT", format!("{limit}g"))
                .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", self.path("usage.cache"));
        }
        command
    }
}

fn number(told: &BTreeMap<&str, &str>, key: &str) -> u64 {
    told.get(key)
        .unwrap_or_else(|| panic!("no {key}: {told:?}"))
        .parse()
        .unwrap_or_else(|_| panic!("{key}: {told:?}"))
}

fn filled(text: &str, limit: u64) {
    let told = pairs(text);
    for key in ["init", "device", "whole", "retain", "current", "info-empty", "info-full", "info-again"] {
        assert_eq!(told.get(key), Some(&"0"), "{key}: {text}");
    }
    for key in ["size", "total-empty", "total-full", "total-again"] {
        assert_eq!(number(&told, key), limit, "{key}: {text}");
    }
    assert!(number(&told, "chunks") > 0 && number(&told, "last") == 2, "{text}");
    let (empty, full) = (number(&told, "used-empty"), number(&told, "used-full"));
    assert_eq!(full, empty + number(&told, "chunks") * CHUNK, "{text}");
    assert!(full <= limit && full + CHUNK > limit, "{text}");
    assert_eq!(number(&told, "used-again"), empty, "{text}");
    assert!(!told.contains_key("free"), "{text}");
}

#[test]
#[ignore = "needs the built library"]
fn a_program_gets_exactly_its_slice() {
    let place = Place::new();
    let allocate = place.build("allocate");
    let run_it = |limit| run(place.limited(&allocate, limit).arg(CHUNK.to_string())).quiet();
    filled(&run_it(Some(2)), 2 * GIB);
    // Nothing is left of the first: the second gets as much.
    filled(&run_it(Some(2)), 2 * GIB);
    let whole = run_it(None);
    assert!(number(&pairs(&whole), "size") > 70 * GIB, "{whole}");
}

#[test]
#[ignore = "needs the built library"]
fn the_process_is_left_as_it_is_under_a_limit() {
    let place = Place::new();
    let hygiene = place.build("hygiene");
    let text = run(&mut place.limited(&hygiene, Some(2))).quiet();
    let state = |when: &str| text.lines().find_map(|line| line.strip_prefix(when)).unwrap().to_owned();
    // The fake driver may open files and set errno itself, so what it does without the library is the measure.
    let without = run(&mut place.limited(&hygiene, None)).quiet();
    let without_after = without.lines().find_map(|line| line.strip_prefix("after ")).unwrap();
    let words = |line: &str| {
        let ours = |word: &&str| !word.starts_with("variables=") && !word.starts_with("high-files=");
        line.split(' ').filter(ours).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(words(&state("after ")), words(without_after), "{text}");
    // At most one descriptor, far from those that programs count on: the lock that tells the host who the process is.
    assert!(
        [" high-files=0 ", " high-files=1 "].iter().any(|files| state("after ").contains(files)),
        "{text}"
    );
    let variables =
        |line: &str| line.split(' ').find(|word| word.starts_with("variables=")).unwrap().to_owned();
    assert_eq!(variables(&state("before ")), variables(&state("after ")));
    let last = |text: &str| {
        text.lines().skip_while(|line| !line.starts_with("errno ")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(last(&text), last(&without), "{text}");
}

/// What is loaded into another namespace cannot be held to the limit: the usage file says that it happened.
#[test]
#[ignore = "needs the built library"]
fn other_namespaces_are_counted() {
    // `mullion_region::extension`: the hot part, and in it the escapes.
    const ESCAPES_AT: usize = 2_011_136 + 40;
    let place = Place::new();
    let escape = place.build("escape");
    let run_it = |limit| run(&mut place.limited(&escape, limit)).quiet();
    assert_eq!(run_it(None), "other same init 0\n");
    assert_eq!(run_it(Some(2)), "other same init 0\n");
    let file = std::fs::read(place.path("usage.cache")).unwrap();
    assert_eq!(file[ESCAPES_AT..ESCAPES_AT + 8], 1_u64.to_le_bytes());
}

// HK-07
#[test]
#[ignore = "needs the built library"]
fn nvml_and_the_driver_agree() {
    let place = Place::new();
    let (allocate, nvml) = (place.build("allocate"), place.build("nvml"));
    // A neighbour on the same card, in no container of ours.
    let mut neighbour = holding(place.limited(&allocate, None).arg((8 * GIB).to_string()).arg("hold"));
    let mut first = holding(place.limited(&allocate, Some(2)).arg(CHUNK.to_string()).arg("hold"));
    let used = number(&pairs(&first.text), "used-full");

    let text = run(&mut place.limited(&nvml, Some(2))).quiet();
    let told = pairs(&text);
    for key in ["init", "handle", "memory", "memory-v2", "list", "graphics"] {
        assert_eq!(told.get(key), Some(&"0"), "{key}: {text}");
    }
    for (key, want) in [
        ("total", 2 * GIB),
        ("used", used),
        ("free", 2 * GIB - used),
        ("total-v2", 2 * GIB),
        ("used-v2", used),
        ("free-v2", 2 * GIB - used),
        ("reserved-v2", 0),
        // NVML's own: version mismatch, an argument that is not valid, a size that does not suffice.
        ("wrong-version", 25),
        ("no-memory", 2),
        ("ask", 7),
        ("count", 1),
        ("no-count", 2),
        ("graphics-count", 0),
    ] {
        assert_eq!(number(&told, key), want, "{key}: {text}");
    }
    assert_eq!(number(&told, &format!("process-{}", first.id())), used, "{text}");

    first.end();
    let text = run(&mut place.limited(&nvml, Some(2))).quiet();
    let told = pairs(&text);
    assert_eq!((number(&told, "count"), number(&told, "used"), number(&told, "ask")), (0, 0, 0), "{text}");
    neighbour.end();
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_above_the_cards_size_makes_it_no_larger() {
    let place = Place::new();
    let (allocate, nvml) = (place.build("allocate"), place.build("nvml"));
    let mut first = holding(place.limited(&allocate, Some(200)).arg(CHUNK.to_string()).arg("hold"));
    let size = number(&pairs(&first.text), "size");
    let text = run(&mut place.limited(&nvml, Some(200))).quiet();
    let told = pairs(&text);
    for key in ["total", "total-v2"] {
        // NVML counts what the driver keeps for itself, the driver does not.
        assert!((size..size + GIB).contains(&number(&told, key)), "{key}: {text}");
    }
    assert!(size < 100 * GIB && number(&told, "used") <= size, "{text}");
    first.end();
}

/// A program that holds memory until it is told to end.
struct Holding {
    child: std::process::Child,
    text: String,
}

impl Holding {
    fn id(&self) -> u32 {
        self.child.id()
    }

    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn holding(command: &mut Command) -> Holding {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut text = String::new();
    loop {
        let Some(line) = lines.next() else { panic!("it ended: {text}") };
        let line = line.unwrap();
        if line == "holding" {
            break;
        }
        text += &line;
        text.push('\n');
    }
    // The rest is read so that the program does not end by a closed pipe.
    std::thread::spawn(move || for _line in lines {});
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"\n").unwrap();
    child.stdin = Some(stdin);
    Holding { child, text }
}

/// aarch64 under emulation.
#[test]
#[ignore = "needs the built library"]
fn aarch64_gets_exactly_its_slice() {
    if std::env::var_os("MULLION_HOOK_WITHOUT_AARCH64").is_some() {
        eprintln!("the library for aarch64 was not built: not tested");
        return;
    }
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let file = |name: &str| folder.path().join(name);
    let gcc = "aarch64-linux-gnu-gcc";
    compile(
        gcc,
        &[&program("tiny_driver.c")],
        &file("libcuda.so.1"),
        &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"],
    );
    compile(gcc, &[&program("allocate.c")], &file("allocate"), &["-Wno-strict-prototypes"]);
    let ask = |limited: bool| {
        let mut command = Command::new("qemu-aarch64");
        command.env_clear().args(["-L", "/usr/aarch64-linux-gnu"]);
        command.args(["-E", &format!("LD_LIBRARY_PATH={}", folder.path().display())]);
        if limited {
            command.args(["-E", &format!("LD_PRELOAD={}", library_for("aarch64").display())]);
            command.args(["-E", "CUDA_DEVICE_MEMORY_LIMIT=2g"]);
            command
                .args(["-E", &format!("CUDA_DEVICE_MEMORY_SHARED_CACHE={}", file("usage.cache").display())]);
        }
        run(command.arg(file("allocate")).arg(CHUNK.to_string())).quiet()
    };
    filled(&ask(false), 80 * GIB);
    filled(&ask(true), 2 * GIB);
    // Nothing is left of the one before.
    filled(&ask(true), 2 * GIB);
}

#[test]
#[ignore = "needs the built library"]
fn every_version_of_every_function_is_the_one_that_the_driver_means() {
    let place = Place::new();
    let versions = place.build("versions");
    let mut forms = BTreeSet::new();
    for line in include_str!("driver-functions.txt").lines().filter(|line| line.starts_with("cu")) {
        let mut words = line.split(' ');
        let symbol = words.next().unwrap();
        let since: u32 = words.next().unwrap().parse().unwrap();
        let plain = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        let name = plain.rsplit_once("_v").filter(|(_, v)| v.parse::<u8>().is_ok()).map_or(plain, |(n, _)| n);
        for version in [since, since.saturating_sub(1), 11030, 11040, 12000, 12080, 13000, 13050] {
            for flags in 0..3 {
                forms.insert(format!("{name} {version} {flags}"));
            }
        }
    }
    assert!(forms.len() > 5_000, "{}", forms.len());
    let asked = forms.into_iter().collect::<Vec<_>>().join("\n");
    std::fs::write(place.path("asked"), asked).unwrap();
    let told = |limit| {
        let mut command = place.limited(&versions, limit);
        run(command.env("FAKE_CUDA_VERSION", "13050").arg(place.path("asked"))).quiet()
    };
    // Wrappers have the names of what they wrap, so the library changes no answer by name.
    let (without, with) = (told(None), told(Some(2)));
    let differ: Vec<_> = without.lines().zip(with.lines()).filter(|(a, b)| a != b).collect();
    assert!(differ.is_empty(), "{} differ: {:#?}", differ.len(), &differ[..differ.len().min(20)]);
    assert_eq!(without.lines().count(), with.lines().count());
    let meant = "cuGraphInstantiate 12000 0: 0 0 cuGraphInstantiateWithFlags";
    assert!(with.lines().any(|line| line == meant), "no {meant}");
}
