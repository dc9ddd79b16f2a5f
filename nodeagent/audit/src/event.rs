use serde::{Deserialize, Serialize};

/// Which pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: String,
}

/// Which `VGPUAllocation`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationRef {
    /// Uid of the object.
    pub uid: String,
    /// Name of the object, in its pod's namespace.
    pub name: String,
}

/// What kind of container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerKind {
    /// An init container that ends before the next one starts.
    Init,
    /// A native sidecar.
    Sidecar,
    /// A container of `spec.containers`.
    App,
}

/// A MIG instance given as part of a card.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigShare {
    /// Uuid of the instance; absent before it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// GPU instance profile id.
    pub profile_id: u32,
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

/// A container's share of one card.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// Uuid of the card, also for a MIG instance on it.
    pub card: String,
    /// Memory limit in MiB; `memoryMib` in the oldest rows.
    #[serde(rename = "memoryMiB", alias = "memoryMib")]
    pub memory_mib: u64,
    /// Share of the SMs in percent; 0 is best effort.
    pub core_percent: u32,
    /// The MIG instance, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigShare>,
}

/// What one container of an allocation was given.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerShares {
    /// Name of the container.
    pub name: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Its cards in its own order.
    pub devices: Vec<Share>,
}

/// A card of an inventory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CardSeen {
    /// Uuid of the card.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Memory in MiB; `memoryMib` in the oldest rows.
    #[serde(rename = "memoryMiB", alias = "memoryMib")]
    pub memory_mib: u64,
}

/// Health of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CardState {
    /// It can be used.
    Healthy,
    /// It cannot.
    Unhealthy,
}

/// What a container did with one card in a minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CardMinute {
    /// Uuid of the card.
    pub card: String,
    /// Memory limit in MiB.
    pub limit_mib: u64,
    /// Most memory held at once in MiB, by the library's account.
    pub peak_mib: u64,
    /// Memory held at the end in MiB.
    pub used_mib: u64,
    /// Mean share of time with a kernel on the card in percent; absent where the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_utilization: Option<u32>,
    /// Allocations that the limit refused.
    pub limit_hits: u64,
    /// Allocations within the limit for which the card had no memory.
    pub card_full: u64,
    /// Launches that waited.
    pub launch_waits: u64,
    /// How long they did, in ms, all processes together.
    pub launch_wait_ms: u64,
    /// First launch of the container, Unix seconds; absent before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_launch: Option<u64>,
    /// Last launch of the container, Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_launch: Option<u64>,
}

/// A fact, in the past tense; appended once, never edited. Later releases add kinds and optional fields, and never
/// change what is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all_fields = "camelCase")]
pub enum Event {
    /// The agent started.
    AgentStarted {
        /// `/proc/sys/kernel/random/boot_id`.
        boot_id: String,
        /// Version of the agent.
        agent_version: String,
    },
    /// The device plugin was registered with the kubelet.
    PluginRegistered {
        /// Resource name.
        resource: String,
        /// Slots offered.
        slots: u32,
    },
    /// The agent wrote another inventory.
    InventoryChanged {
        /// Number of the observation in `GPUNode.status`.
        observation: u64,
        /// Version of the driver; absent without one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        driver_version: Option<String>,
        /// The cards seen.
        cards: Vec<CardSeen>,
    },
    /// A card's health changed.
    HealthChanged {
        /// Uuid of the card.
        card: String,
        /// What it is now.
        state: CardState,
        /// The XID that caused it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        xid: Option<u64>,
        /// Why, for people.
        message: String,
    },
    /// An allocation for this node was seen and fits: from now on its cards are held.
    AllocationReserved {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// 1 + the highest that its decider had seen on the node.
        sequence: u64,
        /// Creation time of the object, Unix seconds.
        created: i64,
        /// What each container gets.
        containers: Vec<ContainerShares>,
    },
    /// An allocation lost against an earlier one: it never holds a card.
    AllocationVoided {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Stable code of the reason.
        code: String,
        /// The reason for people.
        message: String,
    },
    /// `Allocate` answered with a grant; whose it is shows later.
    GrantIssued {
        /// The 16 hex digits of the CDI device.
        grant: String,
        /// Slots it stands for.
        device_ids: Vec<String>,
    },
    /// A grant that no container will use was removed.
    GrantWithdrawn {
        /// The 16 hex digits.
        grant: String,
        /// Stable code of the reason.
        code: String,
    },
    /// A container may start: its grant is filled. Repeated when the container restarts.
    Prepared {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
        /// Its kind.
        container_kind: ContainerKind,
        /// The 16 hex digits of its CDI device.
        grant: String,
        /// The kubelet's device ids.
        device_ids: Vec<String>,
        /// Its cards in its own order.
        devices: Vec<Share>,
    },
    /// A container may not start.
    PrepareRefused {
        /// Which allocation, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allocation: Option<AllocationRef>,
        /// Whose, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod: Option<PodRef>,
        /// Which container, where known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        container: Option<String>,
        /// The kubelet's device ids.
        device_ids: Vec<String>,
        /// Stable code of the reason.
        code: String,
        /// The reason for people.
        message: String,
    },
    /// A prepared container was seen running, or to have run.
    ContainerStarted {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
        /// When it started by the kubelet's word, RFC 3339 in whole seconds; the row may be younger.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        started: Option<String>,
    },
    /// Every ordinary init container of a pod has ended: what only they held is free.
    InitDone {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
    },
    /// Nothing of an allocation is left on the node: its cards are free.
    Released {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Stable code of the reason.
        code: String,
        /// Number of the latest observation in `GPUNode.status`.
        observation: u64,
    },
    /// What a container did with its cards in a minute; minutes without anything new have no row.
    UsageMinute {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
        /// Beginning of the minute, Unix seconds.
        start: u64,
        /// Its cards in its own order.
        cards: Vec<CardMinute>,
    },
    /// The driver shows more memory of a container's processes than the library accounted for: a process runs without
    /// it.
    LimitBypassed {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
        /// Uuid of the card.
        card: String,
        /// Memory by the driver's word in MiB.
        held_mib: u64,
        /// Memory by the library's account in MiB.
        accounted_mib: u64,
        /// Memory limit in MiB.
        limit_mib: u64,
        /// Processes on the card.
        processes: u32,
    },
    /// That is over.
    BypassEnded {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
    },
    /// A container's usage file, by which its limits are kept, cannot be read any more.
    UsageFileDamaged {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
        /// Stable code of the reason.
        code: String,
    },
    /// It can be read again: mostly another one, after the container started anew.
    UsageFileReadable {
        /// Which allocation.
        allocation: AllocationRef,
        /// Whose.
        pod: PodRef,
        /// Which container.
        container: String,
    },
    /// The log could not be written for a while. Written by the log itself when it can be again. Containers were
    /// refused in that time; observations may be missing.
    AuditGap {
        /// Code of the first error.
        code: String,
        /// When it began, RFC 3339.
        since: String,
        /// Events that were refused.
        refused: u64,
    },
}

impl Event {
    /// Every [`Self::kind`], in the order of the variants.
    pub const KINDS: [&'static str; 19] = [
        "AgentStarted",
        "PluginRegistered",
        "InventoryChanged",
        "HealthChanged",
        "AllocationReserved",
        "AllocationVoided",
        "GrantIssued",
        "GrantWithdrawn",
        "Prepared",
        "PrepareRefused",
        "ContainerStarted",
        "InitDone",
        "Released",
        "UsageMinute",
        "LimitBypassed",
        "BypassEnded",
        "UsageFileDamaged",
        "UsageFileReadable",
        "AuditGap",
    ];

    /// Name of the variant, the `kind` column.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::AgentStarted { .. } => "AgentStarted",
            Self::PluginRegistered { .. } => "PluginRegistered",
            Self::InventoryChanged { .. } => "InventoryChanged",
            Self::HealthChanged { .. } => "HealthChanged",
            Self::AllocationReserved { .. } => "AllocationReserved",
            Self::AllocationVoided { .. } => "AllocationVoided",
            Self::GrantIssued { .. } => "GrantIssued",
            Self::GrantWithdrawn { .. } => "GrantWithdrawn",
            Self::Prepared { .. } => "Prepared",
            Self::PrepareRefused { .. } => "PrepareRefused",
            Self::ContainerStarted { .. } => "ContainerStarted",
            Self::InitDone { .. } => "InitDone",
            Self::Released { .. } => "Released",
            Self::UsageMinute { .. } => "UsageMinute",
            Self::LimitBypassed { .. } => "LimitBypassed",
            Self::BypassEnded { .. } => "BypassEnded",
            Self::UsageFileDamaged { .. } => "UsageFileDamaged",
            Self::UsageFileReadable { .. } => "UsageFileReadable",
            Self::AuditGap { .. } => "AuditGap",
        }
    }

    /// Whose event it is.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        match self {
            Self::AllocationReserved { pod, .. }
            | Self::AllocationVoided { pod, .. }
            | Self::Prepared { pod, .. }
            | Self::ContainerStarted { pod, .. }
            | Self::InitDone { pod, .. }
            | Self::Released { pod, .. }
            | Self::UsageMinute { pod, .. }
            | Self::LimitBypassed { pod, .. }
            | Self::BypassEnded { pod, .. }
            | Self::UsageFileDamaged { pod, .. }
            | Self::UsageFileReadable { pod, .. } => Some(pod),
            Self::PrepareRefused { pod, .. } => pod.as_ref(),
            _ => None,
        }
    }

    /// Which allocation it is about.
    #[must_use]
    pub fn allocation(&self) -> Option<&AllocationRef> {
        match self {
            Self::AllocationReserved { allocation, .. }
            | Self::AllocationVoided { allocation, .. }
            | Self::Prepared { allocation, .. }
            | Self::ContainerStarted { allocation, .. }
            | Self::InitDone { allocation, .. }
            | Self::Released { allocation, .. }
            | Self::UsageMinute { allocation, .. }
            | Self::LimitBypassed { allocation, .. }
            | Self::BypassEnded { allocation, .. }
            | Self::UsageFileDamaged { allocation, .. }
            | Self::UsageFileReadable { allocation, .. } => Some(allocation),
            Self::PrepareRefused { allocation, .. } => allocation.as_ref(),
            _ => None,
        }
    }

    /// The container it is about, where it is one.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::Prepared { container, .. }
            | Self::ContainerStarted { container, .. }
            | Self::UsageMinute { container, .. }
            | Self::LimitBypassed { container, .. }
            | Self::BypassEnded { container, .. }
            | Self::UsageFileDamaged { container, .. }
            | Self::UsageFileReadable { container, .. } => Some(container),
            Self::PrepareRefused { container, .. } => container.as_deref(),
            _ => None,
        }
    }

    /// The grant it is about.
    #[must_use]
    pub fn grant(&self) -> Option<&str> {
        match self {
            Self::GrantIssued { grant, .. }
            | Self::GrantWithdrawn { grant, .. }
            | Self::Prepared { grant, .. } => Some(grant),
            _ => None,
        }
    }

    /// The stable code of why.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::AllocationVoided { code, .. }
            | Self::GrantWithdrawn { code, .. }
            | Self::PrepareRefused { code, .. }
            | Self::Released { code, .. }
            | Self::UsageFileDamaged { code, .. }
            | Self::AuditGap { code, .. } => Some(code),
            _ => None,
        }
    }

    /// The key of a fact that can be true only once, so that a step repeated after a crash adds it once.
    /// What can happen again (a restarted container, a card's health) has none.
    #[must_use]
    pub fn natural_key(&self) -> Option<String> {
        match self {
            Self::GrantIssued { grant, .. } => Some(format!("grant/{grant}/issued")),
            Self::GrantWithdrawn { grant, .. } => Some(format!("grant/{grant}/withdrawn")),
            Self::AllocationReserved { allocation, .. } => {
                Some(format!("allocation/{}/reserved", allocation.uid))
            }
            Self::AllocationVoided { allocation, .. } => {
                Some(format!("allocation/{}/voided", allocation.uid))
            }
            Self::InitDone { allocation, .. } => Some(format!("allocation/{}/init-done", allocation.uid)),
            Self::Released { allocation, .. } => Some(format!("allocation/{}/released", allocation.uid)),
            _ => None,
        }
    }
}

/// An event on its way into the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The fact.
    pub event: Event,
    /// Names the fact: a second entry with the same key adds nothing and is answered with the first one's number.
    pub key: Option<String>,
    /// Trace that it belongs to, 32 hex digits.
    pub trace_id: Option<String>,
}

impl From<Event> for Entry {
    /// An entry with the event's [`Event::natural_key`].
    fn from(event: Event) -> Self {
        Self { key: event.natural_key(), event, trace_id: None }
    }
}

impl Entry {
    /// Sets the trace.
    #[must_use]
    pub fn traced(mut self, trace_id: impl Into<String>) -> Self {
        self.trace_id = Some(trace_id.into());
        self
    }

    /// Sets the key.
    #[must_use]
    pub fn keyed(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }
}
