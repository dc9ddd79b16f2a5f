//! What the tests of the built library share: where it is, a driver that exports every function there is, compiling and
//! running programs.

#![allow(dead_code, reason = "each test program uses a part")]

pub mod stub;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Every function of the driver API: symbol, CUDA version, what is done with it (`tests/driver-functions.txt`).
pub fn driver_functions() -> Vec<(&'static str, u32, &'static str)> {
    include_str!("../driver-functions.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let mut words = line.split(' ');
            let mut next = || words.next().unwrap_or_else(|| panic!("not three words: {line}"));
            (next(), next().parse().unwrap(), next())
        })
        .collect()
}

/// The folder that `vgpu-hook/build` was given.
pub fn built() -> PathBuf {
    let folder = std::env::var_os("MULLION_HOOK_BUILT")
        .expect("MULLION_HOOK_BUILT is not set: run `tests/run hook`, or give it the folder of `vgpu-hook/build FOLDER`");
    PathBuf::from(folder)
}

/// Where cargo leaves libraries and programs of the workspace.
pub fn programs() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    this.ancestors().nth(2).unwrap().to_owned()
}

/// The library for a target, e.g. `x86_64`.
pub fn library_for(architecture: &str) -> PathBuf {
    built().join(format!("{architecture}-unknown-linux-gnu/libvgpu.so"))
}

/// The library for this machine.
pub fn library() -> PathBuf {
    let library = library_for(std::env::consts::ARCH);
    assert!(
        library.exists(),
        "no {}: build it with `vgpu-hook/build {}`",
        library.display(),
        built().display()
    );
    library
}

/// The library that can be killed at named points (feature `fault-points`), for this machine.
pub fn library_with_faults() -> PathBuf {
    let library =
        built().join(format!("fault-points/{}-unknown-linux-gnu/libvgpu.so", std::env::consts::ARCH));
    assert!(
        library.exists(),
        "no {}: `MULLION_HOOK_FEATURES=fault-points vgpu-hook/build …`",
        library.display()
    );
    library
}

/// Compiles C with `compiler`.
pub fn compile(compiler: &str, sources: &[&Path], into: &Path, flags: &[&str]) {
    let output = Command::new(compiler)
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(into)
        .args(sources)
        .args(flags)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}: `tests/run setup` installs it"));
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The source of a test program.
pub fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

/// Runs a program to its end, which must come within 20 seconds.
pub fn run(command: &mut Command) -> Ran {
    run_within(command, 20)
}

/// Runs a program to its end, which must come within so many seconds.
pub fn run_within(command: &mut Command, seconds: u64) -> Ran {
    let program = format!("{command:?}");
    let mut child = command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let id = child.id();
    let (done, watch) = std::sync::mpsc::channel();
    let watchdog = std::thread::spawn(move || {
        if watch.recv_timeout(std::time::Duration::from_secs(seconds)).is_err() {
            let _ = Command::new("kill").args(["-KILL", &id.to_string()]).status();
        }
    });
    let mut stdout = child.stdout.take().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
        text
    });
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
    let status = child.wait().unwrap();
    let _ = done.send(());
    watchdog.join().unwrap();
    Ran { program, code: status.code(), stdout: text, stderr: errors.join().unwrap() }
}

/// What a program did.
#[derive(Debug, PartialEq, Eq)]
pub struct Ran {
    pub program: String,
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Its output, when it ended well and said nothing on stderr.
    pub fn quiet(self) -> String {
        assert!(self.code == Some(0) && self.stderr.is_empty(), "{self:#?}");
        self.stdout
    }
}

/// As [`Command::output`], for helpers.
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Lines of `key value`, by key.
pub fn pairs(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(' ')).collect()
}
