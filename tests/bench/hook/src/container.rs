//! A container for the measured programs: the fake driver, cards, limits.

use std::fs::File;
use std::num::{NonZeroU32, NonZeroU64};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fake_state::profile;
use mullion_region::extension::{self, Hot};
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use object::{Object, ObjectSymbol};
use tempfile::TempDir;

/// How a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Over the driver alone.
    Bare,
    /// With the library preloaded.
    Hooked,
}

/// Limits of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Cards, all alike.
    pub cards: u32,
    /// Share of the SMs in percent; 100 is no limit.
    pub core: u8,
    /// What the stub's addresses are apart: allocations that share a block of the driver's lie close together.
    pub step: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self { cards: 1, core: 100, step: 2 << 20 }
    }
}

/// Memory limit: what no measurement comes near to.
const LIMIT: NonZeroU64 = NonZeroU64::new(1 << 50).unwrap();
/// The smallest scale of a launch's cost: the stub's launches come faster than any card could run them, and are to pay
/// but not to wait.
const SCALE: NonZeroU32 = NonZeroU32::MIN;
/// Where the library looks for its two files.
const FOLDER: &str = "/usr/local/vgpu";

/// The container.
#[derive(Debug)]
pub struct Container {
    calls: PathBuf,
    library: PathBuf,
    driver: PathBuf,
    folder: TempDir,
    setup: Setup,
    /// Whether the limits are in the environment, and not on a control page.
    by_hand: bool,
}

/// A mount namespace of this process's own, in which the library's folder can be filled. To be called before there is a
/// second thread.
///
/// # Errors
/// Without the right to do so.
pub fn enter_namespace() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace: run as root")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    mount(Some("vgpu"), "/usr/local", Some("tmpfs"), MsFlags::empty(), none)?;
    std::fs::create_dir(FOLDER).context(FOLDER)
}

impl Container {
    /// Limits on a control page, as the agent gives them: [`enter_namespace`] must have been called. Of several the
    /// last one counts.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn new(calls: &Path, library: &Path, driver: &Path, setup: Setup) -> Result<Self> {
        let this = Self::of(calls, library, driver, setup, false)?;
        this.write_files()?;
        Ok(this)
    }

    /// Limits in the environment, for whoever has no right to mount anything.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn by_hand(calls: &Path, library: &Path, driver: &Path, setup: Setup) -> Result<Self> {
        Self::of(calls, library, driver, setup, true)
    }

    fn of(calls: &Path, library: &Path, driver: &Path, setup: Setup, by_hand: bool) -> Result<Self> {
        for file in [calls, library, driver] {
            ensure!(file.exists(), "there is no {}", file.display());
        }
        // In memory: on an overlay file system, which may be under /tmp, a lock has to be kept by a descriptor.
        let folder = TempDir::new_in("/dev/shm")?;
        symlink(std::path::absolute(driver)?, folder.path().join("libcuda.so.1"))?;
        Ok(Self {
            calls: std::path::absolute(calls)?,
            library: std::path::absolute(library)?,
            driver: driver.to_owned(),
            folder,
            setup,
            by_hand,
        })
    }

    fn cards(&self) -> String {
        format!("h100x{}", self.setup.cards)
    }

    fn usage(&self) -> PathBuf {
        if self.by_hand {
            self.folder.path().join("usage.cache")
        } else {
            Path::new(FOLDER).join("usage.cache")
        }
    }

    /// A page and a usage file as the agent makes them.
    fn write_files(&self) -> Result<()> {
        let core = CorePercent::new(self.setup.core)?;
        let (mut page, mut usage) = (Devices::new(), Devices::new());
        // The fake driver's cards where it is given no state file.
        for card in &profile::node(&self.cards(), "built-in")?.cards {
            let uuid = CardUuid::new(&card.uuid)?;
            page.push(PageDevice { scale: SCALE, ..PageDevice::new(uuid, LIMIT, core) })?;
            usage.push(UsageDevice { uuid, memory_limit: LIMIT, core })?;
        }
        let page = PageSpec {
            sequence: 0,
            heartbeat_ns: 0,
            futex: 0,
            enforcement: Enforcement::Required,
            grant: 0,
            devices: page,
        };
        let path = Path::new(FOLDER).join("control.page");
        // A new file each time: who has the old one mapped keeps it.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, page::encode(&page)).context("control.page")?;
        let path = self.usage();
        let _ = std::fs::remove_file(&path);
        let file = File::create_new(&path).context("usage.cache")?;
        file.set_len(usage::FILE_LEN as u64)?;
        for (offset, bytes) in
            usage::image(&UsageSpec { devices: usage, priority: usage::DEFAULT_PRIORITY }).writes()
        {
            file.write_all_at(bytes, offset)?;
        }
        Ok(())
    }

    /// The program, with cards.
    #[must_use]
    pub fn command(&self, kind: Kind) -> Command {
        let mut command = Command::new(&self.calls);
        command
            .env_clear()
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("FAKE_CUDA_STUB", "1")
            .env("FAKE_CUDA_STUB_STEP", self.setup.step.to_string())
            .env("FAKE_CUDA_CARDS", self.cards());
        if kind == Kind::Hooked {
            command.env("LD_PRELOAD", &self.library);
            if self.by_hand {
                command
                    .env("CUDA_DEVICE_MEMORY_LIMIT", LIMIT.to_string())
                    .env("CUDA_DEVICE_SM_LIMIT", self.setup.core.to_string())
                    .env("GPU_CORE_UTILIZATION_POLICY", "force")
                    .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", self.usage());
            }
        }
        command
    }

    /// The library's part of the usage file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn hot(&self) -> Result<Hot> {
        let mut bytes = vec![0; extension::HOT_LEN];
        File::open(self.usage())?.read_exact_at(&mut bytes, usage::EXTENSION_AT as u64)?;
        Ok(extension::read_hot(&bytes)?)
    }

    /// Lets card 0 forget what launches have spent, so that as many as the burst admits go without waiting. Where the
    /// limits are given by hand there is no scale to do that with.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn refill(&self) -> Result<()> {
        let at = extension::card_offset(0).context("no card")? + extension::TAT_AT;
        let file = File::options().write(true).open(self.usage())?;
        Ok(file.write_all_at(&[0; 8], at as u64)?)
    }

    /// How far the driver's `cuInit` lies behind its `fake_cuda_given`, which the library does not know.
    ///
    /// # Errors
    /// When the driver is no ELF file with both.
    pub fn offset_of_init(&self) -> Result<i64> {
        let bytes = std::fs::read(&self.driver)?;
        let elf = object::File::parse(bytes.as_slice())?;
        let address = |name: &str| {
            let mut symbols = elf.dynamic_symbols();
            symbols
                .find(|symbol| symbol.name() == Ok(name))
                .map(|symbol| symbol.address())
                .context(name.to_owned())
        };
        Ok(address("cuInit")?.cast_signed() - address("fake_cuda_given")?.cast_signed())
    }
}
