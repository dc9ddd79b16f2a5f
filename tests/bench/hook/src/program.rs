//! A running `hook-calls`.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `cuMemAlloc` and `cuMemFree` of what it gave, so many bytes.
    Pair(usize),
    /// The same, but one of the allocations that are held already is freed, picked at random.
    RandomPair(usize),
    /// `cuLaunchKernel`.
    Launch,
    /// `cuMemGetInfo`.
    Info,
    /// `cuCtxGetDevice`.
    Device,
    /// `cuInit`.
    Init,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair(bytes) => write!(f, "pair {bytes}"),
            Self::RandomPair(bytes) => write!(f, "random {bytes}"),
            Self::Launch => f.write_str("launch 0"),
            Self::Info => f.write_str("info 0"),
            Self::Device => f.write_str("device 0"),
            Self::Init => f.write_str("init 0"),
        }
    }
}

/// The program, which does as it is told. It ends when this goes.
#[derive(Debug)]
pub struct Program {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    /// Starts `command` and does not wait for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let told = format!("{command:?}");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| told.clone())?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().map(BufReader::new).context(told)?;
        Ok(Self { child, stdin, stdout })
    }

    /// Waits until it runs and has loaded the driver.
    ///
    /// # Errors
    /// When it ends instead.
    pub fn up(&mut self) -> Result<()> {
        let line = self.hear()?;
        ensure!(line == "up", "hook-calls says {line:?}");
        Ok(())
    }

    /// Tells it something, without waiting for the answer.
    ///
    /// # Errors
    /// When it is gone.
    pub fn tell(&mut self, step: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("hook-calls was told to end")?;
        writeln!(stdin, "{step}").with_context(|| format!("{step}: hook-calls is gone"))
    }

    /// Its next line.
    ///
    /// # Errors
    /// When it ended, or says that something failed.
    pub fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        if line.is_empty() {
            bail!("hook-calls ended: {:?}", self.child.wait()?);
        }
        let line = line.trim_end();
        ensure!(!line.starts_with("failed"), "{line}");
        Ok(line.to_owned())
    }

    /// Does a step; the ns that it took.
    ///
    /// # Errors
    /// When it fails.
    pub fn step(&mut self, step: &str) -> Result<u64> {
        self.tell(step)?;
        let line = self.hear().with_context(|| step.to_owned())?;
        line.parse().with_context(|| format!("{step}: {line}"))
    }

    /// `cuInit`, a context, and `live` allocations of `bytes` bytes that stay.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn ready(&mut self, live: usize, bytes: usize) -> Result<()> {
        self.up()?;
        self.step("init")?;
        self.step("context")?;
        self.step(&format!("hold {live} {bytes}"))?;
        Ok(())
    }

    /// Makes `call` `count` times; ns for all of them.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn call(&mut self, call: Call, count: u32) -> Result<Duration> {
        Ok(Duration::from_nanos(self.step(&format!("{call} {count}"))?))
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.stdin = None;
        // One that waits for its next step ends by that; any other has no further use.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `hook-calls` beside the program that runs.
///
/// # Errors
/// When it is not there.
pub fn beside() -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let path = this.parent().unwrap_or(Path::new(".")).join("hook-calls");
    ensure!(path.exists(), "no {}: `cargo build -p mullion-hook-bench`", path.display());
    Ok(path)
}
