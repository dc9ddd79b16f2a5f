//! Whether a container may start with what its allocation says: a pure function, and its answers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mullion_core::facts::{AllocationFact, CardMode, ContainerGrant, ContainerKind, PodRef};
use mullion_core::ledger::{Shortage, Standing};
use mullion_core::units::{AllocationUid, CoreShare, GpuUuid, Mib, NodeName, PodUid};
use mullion_region::{CardUuid, CorePercent, Devices, MAX_DEVICES, page, usage};

use crate::checkpoint::CheckpointError;
use crate::config::{ContainerSettings, Enforcement};
use crate::error::Error;
use crate::prepare::driver_files::{CardName, NoDevice};
use crate::prepare::library::Unusable;

/// A card as the agent sees it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// Its names.
    pub name: CardName,
    /// How it is given out.
    pub mode: CardMode,
    /// The driver lists it.
    pub present: bool,
    /// The card that is in its place now.
    pub replaced_by: Option<String>,
    /// What is wrong with it; `None` for a healthy card.
    pub fault: Option<String>,
    /// Memory that may be granted in percent of what the card has.
    pub memory_scaling: u32,
}

/// Everything that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// This node.
    pub node: &'a NodeName,
    /// The pod whose container is to start.
    pub pod: &'a PodUid,
    /// Its namespace and name, where the watch has brought them: the kubelet tells the uid alone.
    pub pod_name: Option<(&'a str, &'a str)>,
    /// The container.
    pub container: &'a str,
    /// Number of device ids that the kubelet gave it.
    pub ids: usize,
    /// The pod's allocation.
    pub allocation: Option<&'a AllocationFact>,
    /// What the ledger makes of it.
    pub standing: Option<&'a Standing>,
    /// The node's cards; `None` until the driver, or the state file of this boot, has told them.
    pub cards: Option<&'a BTreeMap<GpuUuid, CardView>>,
    /// What happens where no limit can be applied.
    pub enforcement: Enforcement,
    /// Why no library applies limits; `None` where one does.
    pub unusable: Option<&'a Unusable>,
}

/// One card given to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenDevice {
    /// The card.
    pub card: CardName,
    /// Memory limit.
    pub memory: Mib,
    /// Share of the SMs.
    pub cores: CoreShare,
    /// Memory that may be granted in percent of what the card has.
    pub memory_scaling: u32,
}

/// What a container gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// By which allocation.
    pub allocation: AllocationUid,
    /// The allocation's name.
    pub name: String,
    /// Whose.
    pub pod: PodRef,
    /// Which container.
    pub container: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Its cards in its own order.
    pub devices: Vec<GivenDevice>,
    /// The limits are applied by the library.
    pub enforced: bool,
}

/// Why a container may not start. The kubelet shows the text as an Event of the pod and tries again.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's text says what it is")]
pub enum Refusal {
    #[error(
        "the kubelet's checkpoint {path:?} cannot be read: see the kubelet's log; it writes the file anew"
    )]
    CheckpointMissing { path: PathBuf, source: std::io::Error },
    #[error("the kubelet's checkpoint {path:?}")]
    CheckpointDamaged { path: PathBuf, source: CheckpointError },
    #[error("the kubelet's checkpoint {path:?} has no container with exactly the device ids {ids}")]
    OwnerUnknown { path: PathBuf, ids: String },
    #[error(
        "container {container:?} of pod {pod} was admitted by another device plugin: it has no grant of Mullion; \
         delete the pod so that it is made anew"
    )]
    GrantMissing { pod: PodUid, container: String },
    #[error("pod uid {pod:?} or container name {container:?} in the kubelet's checkpoint is none")]
    NameInvalid { pod: String, container: String },
    #[error(
        "pod {pod} has no VGPUAllocation after {seconds} s: it did not come through mullion-scheduler (was \
         spec.nodeName set by hand?); delete it and create it without nodeName"
    )]
    NoAllocation { pod: String, seconds: u64 },
    #[error("the VGPUAllocation {name} is for node {other}, this is {node}")]
    OtherNode { name: String, other: NodeName, node: NodeName },
    #[error(
        "the VGPUAllocation {name} gives nothing to container {container:?}: delete the pod so that it is placed anew"
    )]
    ContainerUnknown { name: String, container: String },
    #[error(
        "the VGPUAllocation {name} gives container {container:?} {devices} cards, the kubelet {ids} device ids: delete \
         the pod so that it is placed anew"
    )]
    DeviceCountMismatch { name: String, container: String, devices: usize, ids: usize },
    #[error(
        "the VGPUAllocation {name} gives container {container:?} {devices} cards: at most {MAX_DEVICES} fit"
    )]
    TooManyDevices { name: String, container: String, devices: usize },
    #[error("the VGPUAllocation {name} is damaged: {problem}; delete the pod so that it is placed anew")]
    AllocationInvalid { name: String, problem: String },
    #[error("the VGPUAllocation {name} lost against an earlier one ({by}): its pod is evicted")]
    Void { name: String, by: Shortage },
    #[error("the VGPUAllocation {name} is released: its pod has ended")]
    Released { name: String },
    #[error("the driver has not told this node's cards yet: see condition DriverReady of the GPUNode")]
    DriverNotReady,
    #[error("card {uuid} of VGPUAllocation {name} is not on this node any more: the pod is placed anew")]
    DeviceGone { name: String, uuid: GpuUuid },
    #[error("card {uuid} is unhealthy ({fault}): the container is tried again until it is well")]
    CardUnhealthy { uuid: GpuUuid, fault: String },
    #[error("card {uuid} has MIG mode on, which takes no slices: switch it off or delete the pod")]
    CardInMigMode { uuid: GpuUuid },
    #[error(
        "init container {container:?} would run again, but what only the init containers of the pod held was given on \
         when they had ended: the pod is placed anew"
    )]
    InitRerun { container: String },
    #[error(transparent)]
    Hook(Unusable),
    #[error(
        "no CDI spec of kind nvidia.com/gpu {missing}: run `nvidia-ctk cdi generate --output /etc/cdi/nvidia.yaml`"
    )]
    CdiSpecMissing { missing: String },
    #[error("the card's driver files are not known")]
    CdiDeviceMissing { source: NoDevice },
    #[error(
        "grant {grant} would have to change within a boot (the driver or the card's device node was replaced, or it was \
         made without the library and limits are required now): the pod is placed anew"
    )]
    GrantChanged { grant: String },
    #[error("not prepared")]
    Failed { source: Error },
}

impl Refusal {
    /// The stable name of the refusal.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::CheckpointMissing { .. } | Self::CheckpointDamaged { .. } => "CheckpointUnreadable",
            Self::OwnerUnknown { .. } => "OwnerUnknown",
            Self::GrantMissing { .. } => "GrantMissing",
            Self::NameInvalid { .. } => "NameInvalid",
            Self::NoAllocation { .. } => "NoAllocation",
            Self::OtherNode { .. } => "OtherNode",
            Self::ContainerUnknown { .. } => "ContainerUnknown",
            Self::DeviceCountMismatch { .. } => "DeviceCountMismatch",
            Self::TooManyDevices { .. } => "TooManyDevices",
            Self::AllocationInvalid { .. } => "AllocationInvalid",
            Self::Void { .. } => "Void",
            Self::Released { .. } => "Released",
            Self::DriverNotReady => "DriverNotReady",
            Self::DeviceGone { .. } => "DeviceGone",
            Self::CardUnhealthy { .. } => "CardUnhealthy",
            Self::CardInMigMode { .. } => "CardInMigMode",
            Self::InitRerun { .. } => "InitRerun",
            Self::Hook(unusable) => unusable.code(),
            Self::CdiSpecMissing { .. } => "CdiSpecMissing",
            Self::CdiDeviceMissing { .. } => "CdiDeviceMissing",
            Self::GrantChanged { .. } => "GrantChanged",
            Self::Failed { source } => source.code(),
        }
    }

    /// Whether the same call can succeed later without anybody touching the pod.
    #[must_use]
    pub fn retriable(&self) -> bool {
        matches!(
            self,
            Self::CheckpointMissing { .. }
                | Self::CheckpointDamaged { .. }
                | Self::OwnerUnknown { .. }
                | Self::NoAllocation { .. }
                | Self::DriverNotReady
                | Self::CardUnhealthy { .. }
                | Self::CardInMigMode { .. }
                | Self::Hook(_)
                | Self::CdiSpecMissing { .. }
                | Self::CdiDeviceMissing { .. }
                | Self::Failed { .. }
        )
    }

    /// Whether the allocation can never be given: it is marked `Failed` so that the controller evicts its pod.
    #[must_use]
    pub fn fails_allocation(&self) -> bool {
        matches!(
            self,
            Self::ContainerUnknown { .. }
                | Self::DeviceCountMismatch { .. }
                | Self::TooManyDevices { .. }
                | Self::AllocationInvalid { .. }
                | Self::DeviceGone { .. }
                | Self::InitRerun { .. }
                | Self::GrantChanged { .. }
        )
    }
}

/// Whether and with what the container may start.
///
/// # Errors
/// The first [`Refusal`] that applies.
pub fn decide(question: &Question<'_>, waited: u64) -> Result<Given, Refusal> {
    let none = || {
        let pod = match question.pod_name {
            Some((namespace, name)) => format!("{namespace}/{name}"),
            None => format!("with uid {}", question.pod),
        };
        Refusal::NoAllocation { pod, seconds: waited }
    };
    let allocation = question.allocation.ok_or_else(none)?;
    let standing = question.standing.ok_or_else(none)?;
    let name = || allocation.name.clone();
    if allocation.node != *question.node {
        return Err(Refusal::OtherNode {
            name: name(),
            other: allocation.node.clone(),
            node: question.node.clone(),
        });
    }
    match standing {
        Standing::Released => return Err(Refusal::Released { name: name() }),
        Standing::Void { by } => return Err(Refusal::Void { name: name(), by: by.clone() }),
        Standing::Holds | Standing::DeviceGone { .. } => {}
    }
    let container = question.container.to_owned();
    let grant = allocation.containers.iter().find(|c| c.name == container);
    let grant =
        grant.ok_or_else(|| Refusal::ContainerUnknown { name: name(), container: container.clone() })?;
    let devices = grant.devices.len();
    if devices != question.ids {
        return Err(Refusal::DeviceCountMismatch { name: name(), container, devices, ids: question.ids });
    }
    if devices > MAX_DEVICES {
        return Err(Refusal::TooManyDevices { name: name(), container, devices });
    }
    let devices = cards(question, allocation, grant)?;
    if grant.kind == ContainerKind::Init && allocation.init_done && !fits_what_lasts(allocation, grant) {
        return Err(Refusal::InitRerun { container });
    }
    if let Some(unusable) = question.unusable
        && question.enforcement == Enforcement::Required
    {
        return Err(Refusal::Hook(unusable.clone()));
    }
    Ok(Given {
        allocation: allocation.uid.clone(),
        name: name(),
        pod: allocation.pod.clone(),
        container,
        kind: grant.kind,
        devices,
        enforced: question.unusable.is_none(),
    })
}

fn cards(
    question: &Question<'_>,
    allocation: &AllocationFact,
    grant: &ContainerGrant,
) -> Result<Vec<GivenDevice>, Refusal> {
    let known = question.cards.ok_or(Refusal::DriverNotReady)?;
    let gone = |uuid: &GpuUuid| Refusal::DeviceGone { name: allocation.name.clone(), uuid: uuid.clone() };
    let one = |device: &mullion_core::facts::DeviceGrant| {
        let uuid = &device.uuid;
        let card = known.get(uuid).ok_or_else(|| gone(uuid))?;
        // One that is only away may come back while its pod waits.
        if card.replaced_by.is_some() || !card.present && !allocation.prepared {
            return Err(gone(uuid));
        }
        let fault =
            card.fault.clone().or_else(|| (!card.present).then(|| "the driver does not list it".to_owned()));
        if let Some(fault) = fault {
            return Err(Refusal::CardUnhealthy { uuid: uuid.clone(), fault });
        }
        if card.mode == CardMode::Mig {
            return Err(Refusal::CardInMigMode { uuid: uuid.clone() });
        }
        Ok(GivenDevice {
            card: card.name.clone(),
            memory: device.memory,
            cores: device.cores,
            memory_scaling: card.memory_scaling,
        })
    };
    grant.devices.iter().map(one).collect()
}

/// Whether a lone init container takes no more of any card than the pod's sidecars and apps hold, which do not run
/// while it does (the kubelet runs init containers again only in a new sandbox). Then a second run takes nothing from
/// anybody.
fn fits_what_lasts(allocation: &AllocationFact, init: &ContainerGrant) -> bool {
    let position = allocation.containers.iter().position(|c| c.name == init.name).unwrap_or(0);
    let lasting = |c: &&ContainerGrant| c.kind != ContainerKind::Init;
    let before = allocation.containers.iter().take(position).filter(lasting);
    let sums = |containers: Vec<&ContainerGrant>| {
        let mut sums: BTreeMap<GpuUuid, (u64, u64, u64)> = BTreeMap::new();
        for device in containers.into_iter().flat_map(|c| &c.devices) {
            let sum = sums.entry(device.uuid.clone()).or_default();
            sum.0 = sum.0.saturating_add(device.memory.0);
            sum.1 = sum.1.saturating_add(u64::from(device.cores.get()));
            sum.2 += 1;
        }
        sums
    };
    let again = sums(before.chain([init]).collect());
    let held = sums(allocation.containers.iter().filter(lasting).collect());
    again.iter().all(|(uuid, a)| held.get(uuid).is_some_and(|h| a.0 <= h.0 && a.1 <= h.1 && a.2 <= h.2))
}

/// The variables of a container, the same as HAMi's; `NVIDIA_VISIBLE_DEVICES` is `void`, since the devices come by CDI.
#[must_use]
pub fn environment(given: &Given, settings: &ContainerSettings, usage_file: &str) -> Vec<String> {
    let mut env = vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()];
    for (index, device) in given.devices.iter().enumerate() {
        env.push(format!("CUDA_DEVICE_MEMORY_LIMIT_{index}={}m", device.memory.0));
    }
    if let Some(first) = given.devices.first() {
        env.push(format!("CUDA_DEVICE_SM_LIMIT={}", first.cores.get()));
    }
    env.push(format!("CUDA_DEVICE_MEMORY_SHARED_CACHE={usage_file}"));
    if given.devices.iter().any(|d| d.memory_scaling > 100) {
        env.push("CUDA_OVERSUBSCRIBE=true".to_owned());
    }
    if let Some(level) = settings.libcuda_log_level {
        env.push(format!("LIBCUDA_LOG_LEVEL={level}"));
    }
    if settings.disable_core_limit {
        env.push("GPU_CORE_UTILIZATION_POLICY=disable".to_owned());
    }
    env
}

/// The control page and the usage file of a grant.
///
/// # Errors
/// [`Refusal::AllocationInvalid`] for a limit or uuid that the layouts cannot express.
pub fn pages(
    given: &Given,
    grant: &str,
    enforcement: Enforcement,
) -> Result<(page::PageSpec, usage::UsageSpec), Refusal> {
    let invalid = |problem: String| Refusal::AllocationInvalid { name: given.name.clone(), problem };
    let mut cards = Vec::new();
    let mut usages = Vec::new();
    for device in &given.devices {
        let uuid = CardUuid::new(&device.card.uuid).map_err(|e| invalid(e.to_string()))?;
        let limit = std::num::NonZeroU64::new(device.memory.bytes());
        let limit = limit.ok_or_else(|| invalid(format!("0 MiB of card {}", device.card.uuid)))?;
        // Best effort is not throttled: it gets what others leave.
        let core = CorePercent::new(device.cores.get()).unwrap_or(CorePercent::WHOLE);
        let mut card = page::PageDevice::new(uuid, limit, core);
        if device.memory_scaling > 100 {
            let real = u128::from(limit.get()) * 100 / u128::from(device.memory_scaling);
            card.real_memory = u64::try_from(real).ok().and_then(std::num::NonZeroU64::new);
        }
        cards.push(card);
        usages.push(usage::UsageDevice { uuid, memory_limit: limit, core });
    }
    let number = u64::from_str_radix(grant, 16).map_err(|_| invalid(format!("grant {grant:?}")))?;
    let page = page::PageSpec {
        sequence: 0,
        heartbeat_ns: 0,
        futex: 0,
        enforcement: enforcement.into(),
        grant: number,
        devices: Devices::from_slice(&cards).map_err(|e| invalid(e.to_string()))?,
    };
    let usage = usage::UsageSpec {
        devices: Devices::from_slice(&usages).map_err(|e| invalid(e.to_string()))?,
        priority: usage::DEFAULT_PRIORITY,
    };
    Ok((page, usage))
}

#[cfg(test)]
mod tests;
