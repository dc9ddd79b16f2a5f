//! CPU profiles while a queue drains, from the programs' own `/debug/pprof`.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::{Child, Command};

use super::scheduler::Scheduler;

/// How long a profile is taken, in seconds: shorter than a thousand pods take.
const SECONDS: u32 = 3;

/// Starts to take the profiles `apiserver-SIDE.pb.gz` and `scheduler-SIDE.pb.gz`.
///
/// # Errors
/// When the folder cannot be written to or kubectl does not start.
pub fn start(folder: &Path, side: &str, scheduler: &Scheduler) -> Result<Vec<Child>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = format!("/debug/pprof/profile?seconds={SECONDS}");
    let mut apiserver = Command::new("kubectl");
    apiserver.args(["get", "--raw", &path]).stdin(Stdio::null()).kill_on_drop(true);
    [("apiserver", apiserver), ("scheduler", scheduler.raw(&path))]
        .into_iter()
        .map(|(program, mut ask)| {
            let at = folder.join(format!("{program}-{side}.pb.gz"));
            let file = File::create(&at).with_context(|| format!("cannot write {}", at.display()))?;
            ask.stdout(file).spawn().context("cannot start kubectl")
        })
        .collect()
}

/// Waits until they are taken.
///
/// # Errors
/// When one could not be taken.
pub async fn end(profiles: Vec<Child>) -> Result<()> {
    for mut profile in profiles {
        let status = profile.wait().await.context("kubectl")?;
        if !status.success() {
            bail!("no profile ({status}): what kubectl printed says why");
        }
    }
    Ok(())
}
