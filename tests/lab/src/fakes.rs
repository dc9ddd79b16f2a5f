//! A node's fake cards: the driver's state file, device nodes, driver library and NVIDIA's CDI spec.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::layout::NodePlan;
use crate::supervisor::Lab;

/// What cargo calls the simulated CUDA driver.
pub const CUDA_BUILT: &str = "libcuda.so";

/// Makes the state file and the device nodes of a node.
pub fn create(lab: &Lab, node: &NodePlan) -> Result<()> {
    let state = fake_state::profile::node(&node.cards, &node.name)?;
    let dir = node.dir();
    let cards = state.cards.iter().map(|card| format!("nvidia{}", card.minor));
    for name in
        cards.chain(["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"].map(str::to_owned))
    {
        device(&dir.join("dev").join(name))?;
    }
    fake_state::Store::create(node.fake_state(), &state)?;
    for (built, name) in [("libnvidia_ml.so", "libnvidia-ml.so.1"), (CUDA_BUILT, "libcuda.so.1")] {
        let library = lab.plan.bin.join(built);
        if library.exists() {
            let to = dir.join("driver").join(name);
            fs::copy(&library, &to)
                .with_context(|| format!("cannot copy {} to {}", library.display(), to.display()))?;
        }
    }
    Ok(())
}

/// A character device that can be opened: the null device under another name, as there is no NVIDIA driver.
fn device(path: &Path) -> Result<()> {
    mknod(path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
        .with_context(|| format!("cannot make device node {}", path.display()))?;
    // As NVIDIA's driver leaves them, whatever this process's umask says.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).context("cannot open a device node to all")
}

/// Writes the node's `/etc/cdi/nvidia.yaml` as NVIDIA's toolkit would.
pub fn write_cdi(lab: &Lab, node: &NodePlan) -> Result<()> {
    let dir = node.dir();
    let mut command = Command::new(lab.plan.bin.join("fake-cdi"));
    command.arg("--state").arg(node.fake_state());
    command.arg("--dev-root").arg(dir.join("dev"));
    command.arg("--driver-root").arg(dir.join("driver"));
    command.args(["--share-state", "--naming", "index", "--output"]).arg(dir.join("etc-cdi/nvidia.yaml"));
    lab.children
        .run(&mut command)
        .map(drop)
        .with_context(|| format!("cannot write the CDI spec of {}", node.name))
}
