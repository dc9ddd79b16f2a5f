//! Everything the controller refuses or fails at: the object, the value, the way out.

use std::time::Duration;

use mullion_core::refusal::Refusal;
use mullion_core::request::RequestError;
use mullion_core::units::NodeName;

/// What went wrong. [`Error::code`] is its stable name in logs, Events and metrics.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration file cannot be read.
    #[error("config file {path} cannot be read: pass --config with a file that exists")]
    ConfigRead {
        /// The file.
        path: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// The configuration file is no `ControllerConfig`.
    #[error("config file {path} is refused: {reason}")]
    ConfigParse {
        /// The file.
        path: String,
        /// What is wrong, with its place in the file.
        reason: String,
    },
    /// A setting has a value that cannot be used.
    #[error("setting {field} = {value:?} is refused: {fix}")]
    ConfigValue {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to write instead.
        fix: &'static str,
    },
    /// There is no way to a cluster.
    #[error("no cluster to talk to: set KUBECONFIG, or run in a pod with a service account")]
    Kubeconfig {
        /// kube's word.
        source: Box<kube::Error>,
    },
    /// The API server is older than what Mullion runs on.
    #[error(
        "the API server is version {found}: Mullion needs Kubernetes {minimum} or newer, upgrade the cluster"
    )]
    ApiServerTooOld {
        /// What it says it is.
        found: String,
        /// The oldest version taken.
        minimum: &'static str,
    },
    /// A port cannot be listened on.
    #[error("the {what} server cannot listen on {address}: free the port or set --{what}-listen")]
    Listen {
        /// Which server.
        what: &'static str,
        /// Its address.
        address: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// A server ended.
    #[error("the {what} server on {address} ended: see the cause, then restart the controller")]
    Served {
        /// Which server.
        what: &'static str,
        /// Its address.
        address: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// Not everything is loaded that an answer depends on.
    #[error("not ready, still waiting for {missing}: try again")]
    NotReady {
        /// What has not been seen yet.
        missing: String,
    },
    /// The API server refused a call: it did not happen.
    #[error("{verb} {object} was refused by the API server")]
    ApiRefused {
        /// What was to be done.
        verb: &'static str,
        /// To what.
        object: String,
        /// The API server's word.
        source: Box<kube::Error>,
    },
    /// Whether a call happened is not known.
    #[error("{verb} {object} has an unknown outcome: it is looked up before anything else is done")]
    ApiUnknown {
        /// What was to be done.
        verb: &'static str,
        /// To what.
        object: String,
        /// The client's word.
        source: Box<kube::Error>,
    },
    /// A call got no answer in time, so whether it happened is not known.
    #[error("{verb} {object} got no answer within {limit:?}: it is looked up before anything else is done")]
    ApiTimeout {
        /// What was to be done.
        verb: &'static str,
        /// To what.
        object: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The pod to bind is gone, or another pod has taken its name.
    #[error("pod {pod} (uid {uid}) is gone: nothing to bind")]
    PodGone {
        /// `namespace/name`.
        pod: String,
        /// The uid that was asked for.
        uid: String,
    },
    /// The pod to bind is being deleted.
    #[error("pod {pod} is being deleted: it is not bound any more")]
    PodDeleting {
        /// `namespace/name`.
        pod: String,
    },
    /// The pod runs on another node already.
    #[error("pod {pod} is bound to node {bound} already, not to {node}: nothing to do")]
    PodBoundElsewhere {
        /// `namespace/name`.
        pod: String,
        /// Where it is.
        bound: String,
        /// Where it was to go.
        node: NodeName,
    },
    /// The pod's request cannot be taken.
    #[error("pod {pod} asks for what cannot be given: create it anew as the cause says")]
    Request {
        /// `namespace/name`.
        pod: String,
        /// Why.
        source: Box<RequestError>,
    },
    /// The node does not fit any more.
    #[error("{refusal}")]
    NoFit {
        /// Why.
        refusal: Box<Refusal>,
    },
    /// An allocation of that pod on another node has to go first.
    #[error("allocation {allocation} of the pod stands in the way and could not be undone yet: bind again")]
    StaleAllocation {
        /// `namespace/name`.
        allocation: String,
    },
    /// An allocation that a node has acted on, or whose pod is bound, is not ours to undo.
    #[error("allocation {allocation} is in use on node {node}: its agent releases it")]
    AllocationInUse {
        /// `namespace/name`.
        allocation: String,
        /// Its node.
        node: String,
    },
    /// An object of that name belongs to someone else.
    #[error("allocation {allocation} belongs to another pod (uid {uid}): delete it")]
    AllocationNameTaken {
        /// `namespace/name`.
        allocation: String,
        /// Uid of that pod.
        uid: String,
    },
    /// The binding was undone because the pod did not get the node.
    #[error("pod {pod} was not bound to node {node}; its allocation was undone: it is tried again")]
    BindUndone {
        /// `namespace/name`.
        pod: String,
        /// Where it was to go.
        node: NodeName,
        /// Why the binding did not happen.
        source: Box<Error>,
    },
    /// A bind took so long that kube-scheduler may have given it up.
    #[error("pod {pod} could not be bound to node {node} within {limit:?}: it is tried again")]
    BindTooLate {
        /// `namespace/name`.
        pod: String,
        /// Where it was to go.
        node: NodeName,
        /// How long it may take until its binding is begun.
        limit: Duration,
    },
    /// A task of our own broke.
    #[error("the task for {what} broke: see the log, the caller tries again")]
    TaskBroke {
        /// Which.
        what: &'static str,
    },
    /// A certificate cannot be made.
    #[error("the webhook's certificate cannot be made for {names}: check webhook.extraNames")]
    CertificateMake {
        /// The names.
        names: String,
        /// rcgen's word.
        source: rcgen::Error,
    },
    /// A certificate in the Secret cannot be used.
    #[error("Secret {secret}: {key} cannot be used ({reason}): delete the Secret and it is made anew")]
    CertificateBad {
        /// `namespace/name`.
        secret: String,
        /// Which entry.
        key: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl Error {
    /// The stable name, shared by log, Event and metric.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::ConfigRead { .. } => "ConfigUnreadable",
            Self::ConfigParse { .. } => "ConfigInvalid",
            Self::ConfigValue { .. } => "ConfigValueInvalid",
            Self::Kubeconfig { .. } => "NoCluster",
            Self::ApiServerTooOld { .. } => "ApiServerTooOld",
            Self::Listen { .. } => "ListenFailed",
            Self::Served { .. } => "ServerEnded",
            Self::NotReady { .. } => "NotReady",
            Self::ApiRefused { .. } => "ApiRefused",
            Self::ApiUnknown { .. } => "ApiOutcomeUnknown",
            Self::ApiTimeout { .. } => "ApiTimeout",
            Self::PodGone { .. } => "PodGone",
            Self::PodDeleting { .. } => "PodDeleting",
            Self::PodBoundElsewhere { .. } => "PodBoundElsewhere",
            Self::Request { source, .. } => source.code(),
            Self::NoFit { refusal } => refusal.code(),
            Self::StaleAllocation { .. } => "StaleAllocation",
            Self::AllocationInUse { .. } => "AllocationInUse",
            Self::AllocationNameTaken { .. } => "AllocationNameTaken",
            Self::BindUndone { .. } => "BindUndone",
            Self::BindTooLate { .. } => "BindTooLate",
            Self::TaskBroke { .. } => "TaskBroke",
            Self::CertificateMake { .. } => "CertificateFailed",
            Self::CertificateBad { .. } => "CertificateUnusable",
        }
    }

    /// Whether the call may have happened all the same.
    #[must_use]
    pub const fn outcome_unknown(&self) -> bool {
        matches!(self, Self::ApiUnknown { .. } | Self::ApiTimeout { .. })
    }

    /// The API server's status, where it gave one.
    #[must_use]
    pub fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::ApiRefused { source, .. } | Self::ApiUnknown { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            _ => None,
        }
    }
}
