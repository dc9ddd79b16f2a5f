//! What the agent as a whole can fail with. Why a single container is refused is a value of its own:
//! [`crate::prepare::Refusal`].

use std::io;
use std::path::PathBuf;

use crate::prepare::files::Oversize;

/// Everything that ends a step of the agent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file cannot be read.
    #[error("configuration file {path:?} cannot be read: check --config and the file's mode")]
    ConfigRead {
        /// Which file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// The configuration file does not say what it should.
    #[error("configuration file {path:?}: {problem}")]
    Config {
        /// Which file.
        path: PathBuf,
        /// What is wrong and what to write instead.
        problem: String,
    },
    /// Nothing says which node this is.
    #[error("the node's name is missing: give --node-name or set NODE_NAME from spec.nodeName")]
    NoNodeName,
    /// A file or folder of ours cannot be written, read or removed.
    #[error("cannot {action} {path:?}: check that the volume is mounted, writable and not full")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// A usage file stays too large, or grows as fast as it is cut.
    #[error("usage file {path:?} {over}, and cannot be cut back: delete its pod")]
    UsageFileNotCut {
        /// Which file.
        path: PathBuf,
        /// What it has too much of.
        over: Oversize,
    },
    /// Containers that may run have files from another folder than the settings name now: what they do would not be
    /// seen, and their files would be left behind.
    #[error(
        "{setting} is {now:?}, but containers of this node were given files from {before:?}: set it back, or let the \
         node's GPU pods end first under the old setting"
    )]
    FolderMoved {
        /// Name of the setting.
        setting: String,
        /// As it was.
        before: PathBuf,
        /// As it is.
        now: PathBuf,
    },
    /// The cgroups that are mounted are not those of the node's pods.
    #[error(
        "no kubelet keeps pods below {mount:?}, so that nothing proves a pod over: mount the node's /sys/fs/cgroup there \
         or set cgroupMount; what ended stays taken until then"
    )]
    CgroupUnseen {
        /// Where cgroups are looked for.
        mount: PathBuf,
    },
    /// Pods' cgroups are kept in another place than the one that was found.
    #[error(
        "pod {pod} runs, but its cgroup is not below {place:?}: set cgroupRoot to the kubelet's; until then only \
         processes prove that a pod is over"
    )]
    CgroupElsewhere {
        /// Uid of a pod that runs.
        pod: String,
        /// Where cgroups of pods were found.
        place: PathBuf,
    },
    /// The state file refuses.
    #[error(
        "the state file {path:?} cannot be used ({action}): stop the agent and remove it, it is made anew from the \
         API server and the audit log"
    )]
    State {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// SQLite's word.
        source: sqlx::Error,
    },
    /// A value of the state file is not what this version writes.
    #[error("{what} in the state file cannot be read and is dropped")]
    StateValue {
        /// Which value.
        what: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// The audit log refuses a row.
    #[error("the audit log takes no row: no new GPU container starts on this node until it does")]
    Audit {
        /// The log's word.
        source: mullion_audit::Error,
    },
    /// The API server refuses or is away.
    #[error("cannot {action}")]
    Api {
        /// What was tried.
        action: String,
        /// The client's word.
        source: Box<kube::Error>,
    },
    /// The kubelet refuses our registration.
    #[error("the kubelet at {socket:?} does not take the registration: see whether it runs and its log")]
    Register {
        /// Its socket.
        socket: PathBuf,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A socket cannot be opened.
    #[error("cannot listen on {address}: see whether another process holds it")]
    Listen {
        /// Which one.
        address: String,
        /// The system's word.
        source: io::Error,
    },
    /// The folder of plugin sockets cannot be watched.
    #[error("cannot watch {path:?}: see whether the kubelet's folder is mounted into the agent")]
    Watch {
        /// Which folder.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// The driver answered with an error, or not at all.
    #[error("{call} answered {code}")]
    Driver {
        /// Which NVML call.
        call: &'static str,
        /// NVML's name of the answer, or one of ours for a driver that does not answer.
        code: &'static str,
        /// More, where the wrapper says more.
        detail: String,
    },
    /// A signal cannot be listened for.
    #[error("cannot listen for {name}: the system gives this process no signal handler")]
    Signal {
        /// Which signal.
        name: &'static str,
        /// The system's word.
        source: io::Error,
    },
    /// A part of the agent broke down.
    #[error(
        "a part of the agent broke down, which ends all of it: please report the text above it in the log"
    )]
    Broken {
        /// How it ended.
        source: tokio::task::JoinError,
    },
    /// A thread of ours cannot start.
    #[error("cannot start the thread {name}: raise the limit of processes")]
    Thread {
        /// Which thread.
        name: &'static str,
        /// The system's word.
        source: io::Error,
    },
}

impl Error {
    /// The stable name of the error, the same in log, Event, metric and CLI.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::ConfigRead { .. } => "ConfigUnreadable",
            Self::Config { .. } => "ConfigInvalid",
            Self::NoNodeName => "NodeNameMissing",
            Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull => "DiskFull",
            Self::File { .. } => "FileFailed",
            Self::UsageFileNotCut { .. } => "UsageFileNotCut",
            Self::FolderMoved { .. } => "FolderMoved",
            Self::CgroupUnseen { .. } => "CgroupUnseen",
            Self::CgroupElsewhere { .. } => "CgroupElsewhere",
            Self::State { .. } => "StateFailed",
            Self::StateValue { .. } => "StateValueInvalid",
            Self::Audit { source } => source.code(),
            Self::Api { .. } => "ApiFailed",
            Self::Register { .. } => "RegisterFailed",
            Self::Listen { .. } => "ListenFailed",
            Self::Watch { .. } => "WatchFailed",
            Self::Driver { code, .. } => code,
            Self::Signal { .. } => "SignalFailed",
            Self::Broken { .. } => "AgentBroken",
            Self::Thread { .. } => "ThreadFailed",
        }
    }

    /// Wraps a failure of the API client; made to be used in `map_err`.
    pub fn api(action: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let action = action.into();
        move |source| Self::Api { action, source: Box::new(source) }
    }

    /// Wraps a failure of a file; made to be used in `map_err`.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}
