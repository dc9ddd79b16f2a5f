//! Programs under the library over the fake driver, told step by step what to do (`programs/session.c`).

#![allow(dead_code, reason = "each test program uses a part")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use fake_state::{STATE_ENV, Store, profile};
use mullion_region::extension::{self, Hot};
use mullion_region::usage;
use tempfile::TempDir;

use crate::common::{compile, library, program, programs};

pub const MIB: u64 = 1 << 20;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: u64 = 2;

/// A folder with the fake drivers under their names, a node's cards, and a usage file to be.
pub struct Place {
    folder: TempDir,
    pub library: PathBuf,
    variables: Vec<(String, String)>,
}

impl Place {
    pub fn new() -> Self {
        // In memory: on an overlay file system, which may be under /tmp, a lock has to be kept by a descriptor.
        let folder = TempDir::new_in("/dev/shm").unwrap();
        for (file, name) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
            let file = programs().join(file);
            assert!(file.exists(), "no {}: `cargo build -p fake-cuda -p fake-nvml`", file.display());
            std::os::unix::fs::symlink(file, folder.path().join(name)).unwrap();
        }
        let state = profile::node("h100x2", "node-a").unwrap();
        Store::create(folder.path().join("node.json"), &state).unwrap();
        Self { folder, library: library(), variables: Vec::new() }
    }

    /// With contexts that take so much, instead of none.
    pub fn contexts_of(mut self, mib: u64) -> Self {
        self.set("FAKE_CUDA_CONTEXT_MIB", &mib.to_string());
        self
    }

    pub fn limited(mut self, bytes: u64) -> Self {
        self.set("CUDA_DEVICE_MEMORY_LIMIT", &bytes.to_string());
        self
    }

    /// With a driver that is older than a function.
    pub fn without(self, function: &str) -> Self {
        let driver = self.path("libcuda.so.1");
        let mut bytes = std::fs::read(&driver).unwrap();
        let (name, other) = (format!("\0{function}\0"), format!("\0{}\0", "_".repeat(function.len())));
        let mut found = 0;
        while let Some(at) = bytes.windows(name.len()).position(|window| window == name.as_bytes()) {
            bytes[at..at + name.len()].copy_from_slice(other.as_bytes());
            found += 1;
        }
        assert!(found > 0, "the driver has no {function}");
        std::fs::remove_file(&driver).unwrap();
        std::fs::write(&driver, bytes).unwrap();
        self
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.push((name.to_owned(), value.to_owned()));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn usage(&self) -> PathBuf {
        self.path("usage.cache")
    }

    /// A program of the tests, linked with the driver.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(built(name));
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("LD_PRELOAD", &self.library)
            .env(STATE_ENV, self.path("node.json"))
            .env("FAKE_CUDA_CONTEXT_MIB", "0")
            .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", self.usage())
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub fn session(&self) -> Session {
        Session::start(self.command("session"))
    }

    /// One with `cuInit` done and card 0's primary context current.
    pub fn ready(&self) -> Session {
        let mut session = self.session();
        session.done("init");
        session.done("primary 0");
        session
    }

    /// A process of another container, by its usage file, on the same cards; or of this one. It allocates and frees at full speed
    /// until it is told to `stop`.
    pub fn busy(&self, usage: &str) -> Session {
        let mut command = self.command("session");
        command.env("CUDA_DEVICE_MEMORY_SHARED_CACHE", self.path(usage));
        let mut session = Session::start(command);
        session.done("init");
        session.done("primary 0");
        session.done("churn 2");
        session
    }

    /// Our part of the usage file.
    pub fn hot(&self) -> Hot {
        let mut bytes = vec![0; extension::HOT_LEN];
        let file = File::open(self.usage()).unwrap();
        file.read_exact_at(&mut bytes, usage::EXTENSION_AT as u64).unwrap();
        extension::read_hot(&bytes).unwrap()
    }

    /// Bytes charged for a card, and bytes that it gave to the session.
    pub fn card(&self, session: &mut Session, card: usize) -> (u64, u64) {
        (self.hot().cards[card].total, session.ask(&format!("given {card}"))[1])
    }

    /// C and B of a slot on card 0.
    pub fn slot(&self, slot: usize) -> extension::Slot {
        let mut bytes = [0; extension::SLOT_SIZE];
        let at = extension::slot_offset(0, slot).unwrap() as u64;
        File::open(self.usage()).unwrap().read_exact_at(&mut bytes, at).unwrap();
        extension::slots(&bytes).next().unwrap()
    }
}

/// Compiles a test program once per test run.
fn built(name: &str) -> PathBuf {
    static BUILT: OnceLock<TempDir> = OnceLock::new();
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let folder = BUILT.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        std::os::unix::fs::symlink(programs().join("libcuda.so"), folder.path().join("libcuda.so.1"))
            .unwrap();
        folder
    });
    let into = folder.path().join(name);
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !into.exists() {
        let driver = format!("-L{}", folder.path().display());
        let source = program(&format!("{name}.c"));
        compile("gcc", &[&source], &into, &[&driver, "-l:libcuda.so.1", "-Wl,-z,lazy"]);
    }
    into
}

/// A running program that does as it is told.
pub struct Session {
    pub child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Session {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub fn tell(&mut self, step: &str) {
        writeln!(self.stdin, "{step}").unwrap();
    }

    /// The numbers of the next answer; `None` when the program is gone.
    pub fn hear(&mut self) -> Option<Vec<u64>> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        if line.is_empty() {
            return None;
        }
        Some(line.split_whitespace().map(|word| word.parse().unwrap_or_else(|_| panic!("{line}"))).collect())
    }

    /// Does one step: the driver's result first.
    pub fn ask(&mut self, step: &str) -> Vec<u64> {
        self.tell(step);
        self.hear().unwrap_or_else(|| panic!("{step}: the program is gone: {:?}", self.child.wait()))
    }

    /// Does steps that must succeed.
    pub fn done(&mut self, step: &str) {
        assert_eq!(self.ask(step)[0], 0, "{step}");
    }

    /// Does a step that the limit refuses: with the right code and without touching its result.
    pub fn refused(&mut self, step: &str) {
        let answer = self.ask(step);
        assert_eq!(answer[0], OUT_OF_MEMORY, "{step}");
        assert_eq!(answer.get(1).copied().unwrap_or(0), 0, "{step}: the result was touched");
    }

    /// Bytes in use as the program sees them.
    pub fn used(&mut self) -> u64 {
        let info = self.ask("info");
        assert_eq!(info[0], 0, "{info:?}");
        info[2] - info[1]
    }

    /// Bytes that card 0 really gave to this process.
    pub fn given(&mut self) -> u64 {
        self.ask("given 0")[1]
    }

    /// What is charged is what was given.
    pub fn agree(&mut self, after: &str) -> u64 {
        let (used, given) = (self.used(), self.given());
        assert_eq!(used, given, "after {after}: charged {used}, given {given}");
        used
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it in order; its exit status must be 0.
    pub fn end(mut self) {
        drop(self.stdin);
        assert!(self.child.wait().unwrap().success());
    }
}

/// What `cuInit` answers, and what is said on stderr.
pub fn start(mut command: Command) -> (u64, String) {
    command.stderr(Stdio::piped());
    let mut session = Session::start(command);
    let result = session.ask("init")[0];
    // Fail closed: a program that does not look at the result gets no memory either.
    if result != 0 {
        session.ask("primary 0");
        assert_ne!(session.ask("alloc a 512")[0], 0);
    }
    (result, end(session))
}

/// Ends a program; what it said on stderr.
pub fn end(session: Session) -> String {
    let mut child = session.child;
    drop(child.stdin.take());
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stderr).unwrap()
}

/// A refusal is told in one line that begins with its code.
pub fn one_line(text: &str, code: &str) {
    assert!(text.starts_with(&format!("mullion: {code}: ")), "{text:?}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Before the program starts, `prepare` with system calls alone.
pub fn prepared(command: &mut Command, prepare: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static) {
    // SAFETY: the child is single-threaded and only makes system calls before it calls exec.
    #[expect(unsafe_code, reason = "prepares the child")]
    unsafe {
        command.pre_exec(prepare)
    };
}

/// Runs a command in a mount namespace of its own in which `/usr/local/vgpu` holds the files of `folder`, the control page
/// among them read-only.
pub fn in_container(command: &mut Command, folder: &Path) {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    let folder = folder.to_owned();
    let prepare = move || {
        let none = None::<&str>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("none"), "/usr/local", Some("tmpfs"), MsFlags::empty(), none)?;
        std::fs::create_dir("/usr/local/vgpu")?;
        for name in ["control.page", "usage.cache"] {
            let from = folder.join(name);
            if from.exists() {
                let to = Path::new("/usr/local/vgpu").join(name);
                File::create(&to)?;
                mount(Some(&from), &to, none, MsFlags::MS_BIND, none)?;
            }
        }
        let page = "/usr/local/vgpu/control.page";
        if Path::new(page).exists() {
            mount(none, page, none, MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, none)?;
        }
        Ok(())
    };
    prepared(command, prepare);
}

/// Writes into a file as its tenant can.
pub fn write_at(path: &Path, bytes: &[u8], offset: usize) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset as u64).unwrap();
}
