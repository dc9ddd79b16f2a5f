//! Settings: one YAML file (`ControllerConfig`), and flags with environment variables for what differs between
//! two processes on one machine.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use mullion_core::request::{Defaults, MAX_MEMORY, Policy};
use mullion_core::units::Mib;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// `apiVersion` of every configuration file.
pub const API_VERSION: &str = "config.mullion.io/v1alpha1";
/// Longest duration of the Lease, in seconds: so long a dead leader would be waited for.
const LONGEST_LEASE: u32 = 3600;
/// Longest life of a certificate, in seconds: ten years. Dates end somewhere.
const LONGEST_CERTIFICATE: u64 = 10 * 365 * 24 * 3600;
/// `kind` of the controller's.
pub const KIND: &str = "ControllerConfig";

/// Webhook, scheduler extender and reconcilers of Mullion.
#[derive(Clone, Debug, Default, Parser)]
#[command(name = "mullion-controller", version)]
pub struct Args {
    /// YAML file of kind `ControllerConfig`; without it the defaults hold.
    #[arg(long, env = "MULLION_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Address of the admission webhook (HTTPS).
    #[arg(long, env = "MULLION_WEBHOOK_LISTEN", value_name = "ADDRESS")]
    pub webhook_listen: Option<SocketAddr>,

    /// Address of the scheduler extender (HTTP, for the kube-scheduler beside it: keep it on loopback).
    #[arg(long, env = "MULLION_EXTENDER_LISTEN", value_name = "ADDRESS")]
    pub extender_listen: Option<SocketAddr>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, env = "MULLION_HEALTH_LISTEN", value_name = "ADDRESS")]
    pub health_listen: Option<SocketAddr>,

    /// Namespace of the installation: Lease and certificate Secret live there.
    #[arg(long, env = "MULLION_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// Name of this process among its replicas: in the Lease and in Events. Default: the host's name.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub pod_name: Option<String>,

    /// Further host names and addresses in the webhook's certificate, for a webhook registered by URL.
    #[arg(long, env = "MULLION_WEBHOOK_NAMES", value_name = "NAMES", value_delimiter = ',')]
    pub webhook_names: Vec<String>,

    /// Logs and traces.
    #[command(flatten)]
    pub telemetry: mullion_telemetry::Args,
}

/// The file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    /// Always [`API_VERSION`].
    pub api_version: String,
    /// Always [`KIND`].
    pub kind: String,
    /// Namespace of the installation.
    #[serde(default = "namespace")]
    pub namespace: String,
    /// Where the servers listen.
    #[serde(default)]
    pub listen: Listen,
    /// What a pod gets that leaves a wish open.
    #[serde(default)]
    pub defaults: DefaultWishes,
    /// The admission webhook.
    #[serde(default)]
    pub webhook: Webhook,
    /// The reconcilers' election.
    #[serde(default)]
    pub lease: Lease,
    /// What happens to pods that ask for our resources without our scheduler's name (WH-04, HA-04).
    #[serde(default)]
    pub unmanaged_pods: UnmanagedPods,
}

/// Where the servers listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Listen {
    /// HTTPS.
    pub webhook: SocketAddr,
    /// HTTP for the kube-scheduler beside it.
    pub extender: SocketAddr,
    /// HTTP: `/healthz`, `/readyz`, `/metrics`.
    pub health: SocketAddr,
}

impl Default for Listen {
    fn default() -> Self {
        // Ports: design, section 11.
        Self {
            webhook: (Ipv4Addr::UNSPECIFIED, 9443).into(),
            extender: (Ipv4Addr::LOCALHOST, 9396).into(),
            health: (Ipv4Addr::UNSPECIFIED, 9395).into(),
        }
    }
}

/// What a pod gets that leaves a wish open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DefaultWishes {
    /// Among nodes: `binpack` (HAMi's default) or `spread`.
    pub node_policy: Policy,
    /// Among the cards of a node: `spread` (HAMi's default) or `binpack`.
    pub card_policy: Policy,
    /// Memory per card, in MiB, of a container that names none. Absent: the whole card.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
}

impl Default for DefaultWishes {
    fn default() -> Self {
        let Defaults { node_policy, card_policy, memory } = Defaults::default();
        Self { node_policy, card_policy, memory_mib: memory.map(|m| m.0) }
    }
}

impl From<DefaultWishes> for Defaults {
    fn from(wishes: DefaultWishes) -> Self {
        Self {
            node_policy: wishes.node_policy,
            card_policy: wishes.card_policy,
            memory: wishes.memory_mib.map(Mib),
        }
    }
}

/// The admission webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Webhook {
    /// The `MutatingWebhookConfiguration` that gets the CA.
    pub configuration: String,
    /// The Service in front of it.
    pub service: String,
    /// The Secret with its certificate.
    pub secret: String,
    /// Further host names and addresses in its certificate.
    pub extra_names: BTreeSet<String>,
    /// How long a certificate lives, in seconds; it is renewed after two thirds of that.
    pub certificate_seconds: u64,
    /// How long API servers are given to see a new CA before a certificate of it is shown to them.
    pub trust_seconds: u64,
}

impl Default for Webhook {
    fn default() -> Self {
        Self {
            configuration: "mullion".to_owned(),
            service: "mullion-webhook".to_owned(),
            secret: "mullion-webhook-tls".to_owned(),
            extra_names: BTreeSet::new(),
            certificate_seconds: 365 * 24 * 3600,
            trust_seconds: 60,
        }
    }
}

/// The reconcilers' election. Safety never depends on it, only who does the work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Lease {
    /// Name of the Lease.
    pub name: String,
    /// A holder that has not renewed for that long is followed by another.
    pub duration_seconds: u32,
    /// How often the holder renews.
    pub renew_seconds: u32,
}

impl Default for Lease {
    fn default() -> Self {
        Self { name: "mullion-controller".to_owned(), duration_seconds: 9, renew_seconds: 3 }
    }
}

/// What happens to pods that ask for our resources without our scheduler's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnmanagedPods {
    /// An Event on the pod and a gauge.
    #[default]
    Report,
    /// The same, and those that a controller owns are evicted, so that they come back through the webhook.
    Evict,
}

fn namespace() -> String {
    mullion_crds::names::NAMESPACE.to_owned()
}

impl Default for Config {
    fn default() -> Self {
        Self {
            api_version: API_VERSION.to_owned(),
            kind: KIND.to_owned(),
            namespace: namespace(),
            listen: Listen::default(),
            defaults: DefaultWishes::default(),
            webhook: Webhook::default(),
            lease: Lease::default(),
            unmanaged_pods: UnmanagedPods::default(),
        }
    }
}

impl Config {
    /// The file that `args` names, with the flags laid over it.
    ///
    /// # Errors
    /// A file that cannot be read, an unknown field, or a value that cannot be used.
    pub fn load(args: &Args) -> Result<Self, Error> {
        let mut config = match &args.config {
            Some(path) => Self::read(path)?,
            None => Self::default(),
        };
        let listen = &mut config.listen;
        listen.webhook = args.webhook_listen.unwrap_or(listen.webhook);
        listen.extender = args.extender_listen.unwrap_or(listen.extender);
        listen.health = args.health_listen.unwrap_or(listen.health);
        if let Some(namespace) = &args.namespace {
            config.namespace.clone_from(namespace);
        }
        let names = args.webhook_names.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
        config.webhook.extra_names.extend(names.map(str::to_owned));
        config.check()?;
        Ok(config)
    }

    fn read(path: &Path) -> Result<Self, Error> {
        let shown = || path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::ConfigRead { path: shown(), source })?;
        Self::parse(&text).map_err(|reason| Error::ConfigParse { path: shown(), reason })
    }

    /// Reads the YAML text of a file; the error says what is wrong with it, in words.
    fn parse(text: &str) -> Result<Self, String> {
        let config: Self = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        if config.api_version != API_VERSION || config.kind != KIND {
            return Err(format!(
                "it is {} {}, not {API_VERSION} {KIND}: pass the controller's own file",
                config.api_version, config.kind
            ));
        }
        Ok(config)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |field, value: String, fix| Err(Error::ConfigValue { field, value, fix });
        let lease = &self.lease;
        let lasts = lease.duration_seconds;
        if lease.renew_seconds == 0 || lasts / 3 < lease.renew_seconds || lasts > LONGEST_LEASE {
            let fix = "give at least three times lease.renewSeconds, and at most 3600";
            return refuse("lease.durationSeconds", lasts.to_string(), fix);
        }
        let webhook = &self.webhook;
        let lives = webhook.certificate_seconds;
        if !(30..=LONGEST_CERTIFICATE).contains(&lives) || webhook.trust_seconds > lives / 6 {
            let fix = "give 30 to 315360000 (ten years), and at least six times webhook.trustSeconds";
            return refuse("webhook.certificateSeconds", lives.to_string(), fix);
        }
        if let Some(memory) = self.defaults.memory_mib.filter(|m| !(1..=MAX_MEMORY.0).contains(m)) {
            let fix = "leave it out for the whole card, or give MiB up to 2147483647";
            return refuse("defaults.memoryMiB", memory.to_string(), fix);
        }
        if self.namespace.is_empty() {
            return refuse("namespace", String::new(), "name the namespace of the installation");
        }
        Ok(())
    }

    /// The webhook's names: its Service's, `localhost`, and what the admin adds.
    #[must_use]
    pub fn webhook_names(&self) -> Vec<String> {
        let service = format!("{}.{}.svc", self.webhook.service, self.namespace);
        let mut names = vec![service.clone(), format!("{service}.cluster.local"), "localhost".to_owned()];
        names.extend(self.webhook.extra_names.iter().cloned());
        names
    }

    /// How long API servers are given to see a new CA.
    #[must_use]
    pub const fn trust(&self) -> Duration {
        Duration::from_secs(self.webhook.trust_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: config.mullion.io/v1alpha1\nkind: ControllerConfig\n";

    #[test]
    fn files() {
        for (case, body, want) in [
            ("nothing but the head", "", Ok(Config::default())),
            (
                "policies",
                "defaults: {nodePolicy: spread, cardPolicy: binpack, memoryMiB: 1000}\n",
                Ok(Config {
                    defaults: DefaultWishes {
                        node_policy: Policy::Spread,
                        card_policy: Policy::Binpack,
                        memory_mib: Some(1000),
                    },
                    ..Config::default()
                }),
            ),
            // FS-04: a typo is no default.
            ("unknown policy", "defaults: {nodePolicy: pack}\n", Err("pack")),
            ("unknown field", "defaultz: {}\n", Err("defaultz")),
            ("unknown nested field", "listen: {webhok: 1}\n", Err("webhok")),
            (
                "evict",
                "unmanagedPods: evict\n",
                Ok(Config { unmanaged_pods: UnmanagedPods::Evict, ..Config::default() }),
            ),
            ("not yaml", "{", Err("")),
        ] {
            let found = Config::parse(&format!("{HEAD}{body}"));
            match want {
                Ok(want) => assert_eq!(found, Ok(want), "{case}"),
                Err(text) => assert!(found.as_ref().is_err_and(|e| e.contains(text)), "{case}: {found:?}"),
            }
        }
        let other = Config::parse("apiVersion: config.mullion.io/v1alpha1\nkind: NodeAgentConfig\n");
        assert!(other.is_err_and(|e| e.contains("ControllerConfig")));
    }

    #[test]
    fn flags_win_and_values_are_checked() {
        let args = Args {
            namespace: Some("gpu".to_owned()),
            webhook_names: vec!["10.0.0.1".to_owned(), String::new()],
            health_listen: Some((Ipv4Addr::LOCALHOST, 1).into()),
            ..Args::default()
        };
        let config = Config::load(&args).unwrap();
        assert_eq!(config.listen.health.port(), 1);
        assert_eq!(config.listen.extender.to_string(), "127.0.0.1:9396");
        assert_eq!(
            config.webhook_names(),
            ["mullion-webhook.gpu.svc", "mullion-webhook.gpu.svc.cluster.local", "localhost", "10.0.0.1"]
        );
        for (case, body) in [
            ("renewed too seldom", "lease: {renewSeconds: 9}"),
            ("never renewed", "lease: {renewSeconds: 0}"),
            ("a product past 32 bits", "lease: {renewSeconds: 4294967295, durationSeconds: 4294967295}"),
            ("a lease of a day", "lease: {durationSeconds: 86400}"),
            ("a certificate of a moment", "webhook: {certificateSeconds: 29, trustSeconds: 1}"),
            ("a certificate past every calendar", "webhook: {certificateSeconds: 18446744073709551615}"),
            ("trusted too late", "webhook: {certificateSeconds: 60, trustSeconds: 11}"),
            ("no memory", "defaults: {memoryMiB: 0}"),
            ("more memory than a request may name", "defaults: {memoryMiB: 2147483648}"),
            ("no namespace", "namespace: ''"),
        ] {
            let checked = Config::parse(&format!("{HEAD}{body}\n")).unwrap().check();
            assert_eq!(checked.map_err(|error| error.code()), Err("ConfigValueInvalid"), "{case}");
        }
        let missing = Config::load(&Args { config: Some("/nowhere.yaml".into()), ..Args::default() });
        assert_eq!(missing.unwrap_err().code(), "ConfigUnreadable");
    }
}
