//! Flags, the configuration file and their sum.
//!
//! A flag (or its environment variable) wins over the file, the file over the default.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use mullion_core::units::NodeName;
use mullion_region::page;
use serde::Deserialize;

use crate::error::Error;

/// `apiVersion` of the configuration file.
pub const API_VERSION: &str = "config.mullion.io/v1alpha1";
/// `kind` of the configuration file.
pub const KIND: &str = "NodeAgentConfig";

/// XIDs that an application causes and that say nothing about the card: the list of NVIDIA's device plugin.
pub const IGNORED_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// Flags of `mullion-nodeagent run`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Configuration file; none by default.
    #[arg(long, env = "MULLION_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of the node that this agent runs on; there is no default.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// NVML to load; by default the loader finds `libnvidia-ml.so.1`.
    #[arg(long, env = "MULLION_NVML_LIBRARY", value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// The kubelet's folder of device plugin sockets, with its checkpoint [default: /var/lib/kubelet/device-plugins].
    #[arg(long, env = "MULLION_DEVICE_PLUGIN_DIR", value_name = "DIR")]
    pub device_plugin_dir: Option<PathBuf>,
    /// The kubelet's configuration file, read for its topology policy only [default: /var/lib/kubelet/config.yaml].
    #[arg(long, env = "MULLION_KUBELET_CONFIG", value_name = "FILE")]
    pub kubelet_config: Option<PathBuf>,
    /// Folder for the CDI specs of grants; the runtime must watch it [default: /var/run/cdi].
    #[arg(long, env = "MULLION_CDI_DIR", value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
    /// Folders with NVIDIA's own CDI spec, separated by commas; the last one wins [default: /etc/cdi,/var/run/cdi].
    #[arg(long, env = "MULLION_DRIVER_CDI_DIRS", value_name = "DIRS", value_delimiter = ',')]
    pub driver_cdi_dirs: Option<Vec<PathBuf>>,
    /// Folder for the agent's databases and control pages [default: /var/lib/mullion].
    #[arg(long, env = "MULLION_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Folder of the library and of the containers' usage files [default: /usr/local/vgpu].
    #[arg(long, env = "MULLION_HOOK_DIR", value_name = "DIR")]
    pub hook_dir: Option<PathBuf>,
    /// The library that applies limits, as it came to the node; copied to a folder named after its content before a
    /// container gets it [default: libvgpu.so in the folder of --hook-dir].
    #[arg(long, env = "MULLION_HOOK_LIBRARY", value_name = "FILE")]
    pub hook_library: Option<PathBuf>,
    /// Where the cgroup hierarchies are mounted [default: /sys/fs/cgroup].
    #[arg(long, env = "MULLION_CGROUP_MOUNT", value_name = "DIR")]
    pub cgroup_mount: Option<PathBuf>,
    /// Below which cgroup the kubelet's are looked for, e.g. its `cgroupRoot` where one machine has several kubelets
    /// [default: /].
    #[arg(long, env = "MULLION_CGROUP_ROOT", value_name = "PATH")]
    pub cgroup_root: Option<String>,
    /// Address for metrics and health [default: 0.0.0.0:9394].
    #[arg(long, env = "MULLION_LISTEN", value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// What happens to a container whose limits cannot be applied [default: required].
    #[arg(long, env = "MULLION_ENFORCEMENT", value_enum)]
    pub enforcement: Option<Enforcement>,
}

/// What happens to a container whose limits cannot be applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Enforcement {
    /// It does not start.
    #[default]
    Required,
    /// It starts, with `Enforced=False`.
    Report,
}

impl From<Enforcement> for page::Enforcement {
    fn from(value: Enforcement) -> Self {
        match value {
            Enforcement::Required => Self::Required,
            Enforcement::Report => Self::Report,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    node_name: Option<String>,
    nvml_library: Option<PathBuf>,
    device_plugin_dir: Option<PathBuf>,
    kubelet_config: Option<PathBuf>,
    cdi_dir: Option<PathBuf>,
    driver_cdi_dirs: Option<Vec<PathBuf>>,
    state_dir: Option<PathBuf>,
    hook_dir: Option<PathBuf>,
    hook_library: Option<PathBuf>,
    cgroup_mount: Option<PathBuf>,
    cgroup_root: Option<String>,
    listen: Option<SocketAddr>,
    enforcement: Option<Enforcement>,
    #[serde(default)]
    health: HealthFile,
    #[serde(default)]
    container: ContainerFile,
    #[serde(default)]
    metrics: MetricsFile,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MetricsFile {
    legacy_names: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HealthFile {
    ignored_xids: Option<Vec<u64>>,
    poll_seconds: Option<u32>,
    recovery_checks: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ContainerFile {
    libcuda_log_level: Option<u8>,
    #[serde(default)]
    disable_core_limit: bool,
}

/// How faults of cards are judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthSettings {
    /// XIDs that do not make a card unhealthy.
    pub ignored_xids: Vec<u64>,
    /// Time between two looks at the driver.
    pub poll: Duration,
    /// So many good looks in a row make an unhealthy card healthy again.
    pub recovery_checks: u32,
}

/// What goes into every container's environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerSettings {
    /// `LIBCUDA_LOG_LEVEL`: 0 error, 1 warn, 3 info, 4 debug.
    pub libcuda_log_level: Option<u8>,
    /// `GPU_CORE_UTILIZATION_POLICY=disable`.
    pub disable_core_limit: bool,
}

/// Everything the agent needs to know before it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The node.
    pub node: NodeName,
    /// NVML to load; `None` leaves it to the loader.
    pub nvml_library: Option<PathBuf>,
    /// The kubelet's folder of device plugin sockets.
    pub device_plugin_dir: PathBuf,
    /// The kubelet's configuration file.
    pub kubelet_config: PathBuf,
    /// Where grants' CDI specs go.
    pub cdi_dir: PathBuf,
    /// Where NVIDIA's CDI spec is looked for; later ones win.
    pub driver_cdi_dirs: Vec<PathBuf>,
    /// Databases and control pages.
    pub state_dir: PathBuf,
    /// Library and usage files.
    pub hook_dir: PathBuf,
    /// The library, as it came to the node.
    pub hook_library: PathBuf,
    /// Where the cgroup hierarchies are mounted.
    pub cgroup_mount: PathBuf,
    /// Below which cgroup the kubelet's are looked for.
    pub cgroup_root: String,
    /// Metrics and health.
    pub listen: SocketAddr,
    /// Where no limit can be applied.
    pub enforcement: Enforcement,
    /// Faults.
    pub health: HealthSettings,
    /// Environment of containers.
    pub container: ContainerSettings,
    /// `/metrics` shows HAMi's names from before its v2.10 as well.
    pub legacy_metrics: bool,
}

impl Settings {
    /// Puts flags, file and defaults together.
    ///
    /// # Errors
    /// [`Error::ConfigRead`] and [`Error::Config`] for the file, [`Error::NoNodeName`] when nothing names the node.
    pub fn load(args: Args) -> Result<Self, Error> {
        let file = match &args.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let path = |flag: Option<PathBuf>, file: Option<PathBuf>, default: &str| {
            flag.or(file).unwrap_or_else(|| PathBuf::from(default))
        };
        let hook_dir = path(args.hook_dir, file.hook_dir, "/usr/local/vgpu");
        let hook_library = args.hook_library.or(file.hook_library).filter(|p| !p.as_os_str().is_empty());
        let node = args.node_name.or(file.node_name).filter(|n| !n.is_empty()).ok_or(Error::NoNodeName)?;
        Ok(Self {
            node: NodeName(node),
            nvml_library: args.nvml_library.or(file.nvml_library).filter(|p| !p.as_os_str().is_empty()),
            device_plugin_dir: path(
                args.device_plugin_dir,
                file.device_plugin_dir,
                "/var/lib/kubelet/device-plugins",
            ),
            kubelet_config: path(args.kubelet_config, file.kubelet_config, "/var/lib/kubelet/config.yaml"),
            cdi_dir: path(args.cdi_dir, file.cdi_dir, "/var/run/cdi"),
            driver_cdi_dirs: args
                .driver_cdi_dirs
                .or(file.driver_cdi_dirs)
                .unwrap_or_else(|| vec!["/etc/cdi".into(), "/var/run/cdi".into()]),
            state_dir: path(args.state_dir, file.state_dir, "/var/lib/mullion"),
            hook_library: hook_library.unwrap_or_else(|| hook_dir.join("libvgpu.so")),
            hook_dir,
            cgroup_mount: path(args.cgroup_mount, file.cgroup_mount, "/sys/fs/cgroup"),
            cgroup_root: args.cgroup_root.or(file.cgroup_root).unwrap_or_else(|| "/".to_owned()),
            listen: args.listen.or(file.listen).unwrap_or(SocketAddr::from(([0, 0, 0, 0], 9394))),
            enforcement: args.enforcement.or(file.enforcement).unwrap_or_default(),
            health: HealthSettings {
                ignored_xids: file.health.ignored_xids.unwrap_or_else(|| IGNORED_XIDS.to_vec()),
                poll: Duration::from_secs(u64::from(file.health.poll_seconds.unwrap_or(5).max(1))),
                recovery_checks: file.health.recovery_checks.unwrap_or(3).max(1),
            },
            container: ContainerSettings {
                libcuda_log_level: file.container.libcuda_log_level,
                disable_core_limit: file.container.disable_core_limit,
            },
            legacy_metrics: file.metrics.legacy_names.unwrap_or(true),
        })
    }

    /// Folder of the control pages.
    #[must_use]
    pub fn pages_dir(&self) -> PathBuf {
        self.state_dir.join("pages")
    }

    /// Folder of the usage files' folders, where HAMi's monitor looks.
    #[must_use]
    pub fn containers_dir(&self) -> PathBuf {
        self.hook_dir.join("containers")
    }

    /// Folder of the library's versions, each in a folder named after its content.
    #[must_use]
    pub fn libraries_dir(&self) -> PathBuf {
        self.hook_dir.join("lib")
    }

    /// The file that is mounted as a container's `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self) -> PathBuf {
        self.hook_dir.join("ld.so.preload")
    }

    /// The kubelet's device checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugin_dir.join("kubelet_internal_checkpoint")
    }
}

fn read(path: &Path) -> Result<File, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::ConfigRead { path: path.to_owned(), source })?;
    parse(&text).map_err(|problem| Error::Config { path: path.to_owned(), problem })
}

fn parse(text: &str) -> Result<File, String> {
    let file: File = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
    if file.api_version != API_VERSION {
        return Err(format!("apiVersion is {:?}: write {API_VERSION}", file.api_version));
    }
    if file.kind != KIND {
        return Err(format!("kind is {:?}: write {KIND}", file.kind));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: config.mullion.io/v1alpha1\nkind: NodeAgentConfig\n";

    fn settings(file: &str, args: Args) -> Result<Settings, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yaml");
        std::fs::write(&path, format!("{HEAD}{file}")).unwrap();
        Settings::load(Args { config: Some(path), ..args })
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file =
            "nodeName: from-file\nstateDir: /file\nenforcement: report\nhealth:\n  ignoredXids: [13]\n";
        let args = Args { state_dir: Some("/flag".into()), ..Args::default() };
        let settings = settings(file, args).unwrap();
        assert_eq!(settings.node.as_str(), "from-file");
        assert_eq!(settings.state_dir, Path::new("/flag"));
        assert_eq!(settings.cdi_dir, Path::new("/var/run/cdi"));
        assert_eq!(settings.enforcement, Enforcement::Report);
        assert_eq!((settings.health.ignored_xids, settings.health.recovery_checks), (vec![13], 3));
        assert_eq!(settings.listen.port(), 9394);
        assert!(settings.legacy_metrics, "unless told otherwise");
    }

    #[test]
    fn names_of_old_can_be_left_out() {
        let file = "nodeName: a\nmetrics: {legacyNames: false}\n";
        assert!(!settings(file, Args::default()).unwrap().legacy_metrics);
    }

    /// A default is applied after the file was read, so clap does not know it: the help's words must not lie.
    #[test]
    fn the_help_names_each_default() {
        let settings = settings("nodeName: a\n", Args::default()).unwrap();
        let text = |path: &Path| path.display().to_string();
        let dirs: Vec<_> = settings.driver_cdi_dirs.iter().map(|d| text(d)).collect();
        let help = <Args as clap::Args>::augment_args(clap::Command::new("x")).render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for (flag, default) in [
            ("device-plugin-dir", text(&settings.device_plugin_dir)),
            ("kubelet-config", text(&settings.kubelet_config)),
            ("cdi-dir", text(&settings.cdi_dir)),
            ("driver-cdi-dirs", dirs.join(",")),
            ("state-dir", text(&settings.state_dir)),
            ("hook-dir", text(&settings.hook_dir)),
            ("cgroup-mount", text(&settings.cgroup_mount)),
            ("cgroup-root", settings.cgroup_root.clone()),
            ("listen", settings.listen.to_string()),
            ("enforcement", "required".to_owned()),
        ] {
            let of_flag = help.split_once(&format!("--{flag} ")).unwrap().1;
            let of_flag = of_flag.split(" --").next().unwrap();
            assert!(of_flag.contains(&format!("[default: {default}]")), "{flag}: {of_flag}");
        }
        assert_eq!(settings.enforcement, Enforcement::Required);
    }

    #[test]
    fn what_it_does_not_know_is_refused_with_file_and_field() {
        for (case, file, fragment) in [
            ("unknown field", "nodeName: a\nstatDir: /x\n", "statDir"),
            ("unknown nested field", "nodeName: a\nhealth: {polSeconds: 1}\n", "polSeconds"),
            ("bad value", "nodeName: a\nenforcement: maybe\n", "maybe"),
        ] {
            let error = settings(file, Args::default()).unwrap_err();
            assert_eq!(error.code(), "ConfigInvalid", "{case}");
            assert!(error.to_string().contains(fragment), "{case}: {error}");
        }
        assert_eq!(settings("", Args::default()).unwrap_err().code(), "NodeNameMissing");
        assert!(parse("apiVersion: v1\nkind: NodeAgentConfig\n").unwrap_err().contains(API_VERSION));
        assert!(parse("apiVersion: config.mullion.io/v1alpha1\nkind: X\n").unwrap_err().contains(KIND));
    }
}
