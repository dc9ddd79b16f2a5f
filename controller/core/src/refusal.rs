//! Why a node cannot take a pod, as a value: a stable code, the object, the number that was short and the best
//! near miss.
//!
//! kube-scheduler gets [`Code::reason`] alone. It writes a histogram of the distinct reasons into the pod's
//! condition, so a text with names or numbers in it would make it write, and try again, for ever.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::NodeName;

/// The rule that stood in the way. The text of [`Code::as_str`] is shared by log, Event, metric and CLI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Code {
    /// No `GPUNode`, or no Node, of that name.
    NodeUnknown,
    /// The `GPUNode` was written under another Node object than the present one.
    NodeReplaced,
    /// The admin, or a planned stop of the agent, closed the node.
    NodeClosed,
    /// Something on the node holds cards, and which is not known: an allocation that cannot be read, or a pod
    /// that runs without its allocation.
    HoldingsUnknown,
    /// The driver does not answer.
    DriverNotReady,
    /// The kubelet offers no slot at all: the device plugin is not registered.
    PluginDown,
    /// The kubelet has too few free slots.
    SlotsTaken,
    /// A container asks for more cards than the node has.
    TooFewCards,
    /// Too few cards are healthy.
    CardsUnhealthy,
    /// Too few cards are given out as slices.
    CardsInMigMode,
    /// Too few cards are open for new pods.
    CardsClosed,
    /// Too few cards have that much memory even when empty.
    CardTooSmall,
    /// Too few cards have a free share.
    CardSlotsTaken,
    /// Too few cards are empty, for a request that needs a card alone; or those with room are held alone.
    CardExclusive,
    /// Too few cards have enough memory free.
    MemoryShort,
    /// Too few cards have enough compute free.
    CoresShort,
    /// Every container would fit by itself, all of them together do not.
    TooFewTogether,
}

impl Code {
    /// Every code there is, in the order in which the checks run.
    pub const ALL: [Self; 17] = [
        Self::NodeUnknown,
        Self::NodeReplaced,
        Self::NodeClosed,
        Self::HoldingsUnknown,
        Self::DriverNotReady,
        Self::PluginDown,
        Self::SlotsTaken,
        Self::TooFewCards,
        Self::CardsUnhealthy,
        Self::CardsInMigMode,
        Self::CardsClosed,
        Self::CardTooSmall,
        Self::CardSlotsTaken,
        Self::CardExclusive,
        Self::MemoryShort,
        Self::CoresShort,
        Self::TooFewTogether,
    ];

    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NodeUnknown => "NodeUnknown",
            Self::NodeReplaced => "NodeReplaced",
            Self::NodeClosed => "NodeClosed",
            Self::HoldingsUnknown => "HoldingsUnknown",
            Self::DriverNotReady => "DriverNotReady",
            Self::PluginDown => "PluginDown",
            Self::SlotsTaken => "SlotsTaken",
            Self::TooFewCards => "TooFewCards",
            Self::CardsUnhealthy => "CardsUnhealthy",
            Self::CardsInMigMode => "CardsInMigMode",
            Self::CardsClosed => "CardsClosed",
            Self::CardTooSmall => "CardTooSmall",
            Self::CardSlotsTaken => "CardSlotsTaken",
            Self::CardExclusive => "CardExclusive",
            Self::MemoryShort => "MemoryShort",
            Self::CoresShort => "CoresShort",
            Self::TooFewTogether => "TooFewTogether",
        }
    }

    /// The fixed text for kube-scheduler: no names, no numbers.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::NodeUnknown => "node(s) without a GPUNode",
            Self::NodeReplaced => "node(s) whose GPUNode belongs to an earlier node of that name",
            Self::NodeClosed => "node(s) whose GPUNode is closed for new pods",
            Self::HoldingsUnknown => "node(s) where it is not known which GPUs are taken",
            Self::DriverNotReady => "node(s) whose GPU driver is not ready",
            Self::PluginDown => "node(s) whose GPU device plugin is not registered",
            Self::SlotsTaken => "node(s) with too few free GPU slots",
            Self::TooFewCards => "node(s) with too few GPUs",
            Self::CardsUnhealthy => "node(s) with too few healthy GPUs",
            Self::CardsInMigMode => "node(s) with too few GPUs outside MIG mode",
            Self::CardsClosed => "node(s) with too few GPUs open for new pods",
            Self::CardTooSmall => "node(s) whose GPUs have less memory than asked even when empty",
            Self::CardSlotsTaken => "node(s) with too few GPUs that have a free share",
            Self::CardExclusive => "node(s) with too few GPUs that a pod can have alone",
            Self::MemoryShort => "node(s) with too few GPUs that have enough free memory",
            Self::CoresShort => "node(s) with too few GPUs that have enough free compute",
            Self::TooFewTogether => "node(s) where the containers fit by themselves but not together",
        }
    }

    /// Whether taking other pods off the node could never help (kube-scheduler's "failed and unresolvable").
    #[must_use]
    pub const fn unresolvable(self) -> bool {
        match self {
            Self::NodeUnknown
            | Self::NodeReplaced
            | Self::NodeClosed
            | Self::HoldingsUnknown
            | Self::DriverNotReady
            | Self::PluginDown
            | Self::TooFewCards
            | Self::CardsUnhealthy
            | Self::CardsInMigMode
            | Self::CardsClosed
            | Self::CardTooSmall => true,
            Self::SlotsTaken
            | Self::CardSlotsTaken
            | Self::CardExclusive
            | Self::MemoryShort
            | Self::CoresShort
            | Self::TooFewTogether => false,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The numbers behind a refusal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detail {
    /// The container whose request could not be met, where it is one.
    pub container: Option<String>,
    /// How much was asked, per card, in the unit of the code (MiB, percent, slots); the largest card's memory
    /// stands beside it in `best` for [`Code::CardTooSmall`].
    pub asked: u64,
    /// The most that any card which failed by this code had to offer, in the same unit.
    pub best: u64,
    /// Distinct cards that the container asks for.
    pub cards_asked: u32,
    /// Cards that the node has.
    pub cards_total: u32,
    /// Cards without a fault.
    pub cards_healthy: u32,
    /// Cards that could take the container by itself.
    pub cards_fitting: u32,
}

/// Why a node cannot take a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The rule.
    pub code: Code,
    /// The node.
    pub node: NodeName,
    /// The numbers.
    pub detail: Detail,
}

impl Refusal {
    /// The stable name of the rule.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        self.code.as_str()
    }
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, node, detail: d } = self;
        let asked = grouped(d.asked);
        let best = grouped(d.best);
        write!(f, "{node}: ")?;
        match code {
            Code::NodeUnknown => {
                return write!(
                    f,
                    "has no GPUNode (or no Node) of that name: check that the node agent runs there"
                );
            }
            Code::NodeReplaced => {
                return write!(
                    f,
                    "its GPUNode was written under an earlier Node object of that name: wait for the new node's agent"
                );
            }
            Code::NodeClosed => {
                return write!(
                    f,
                    "closed for new pods: clear the cordon in the spec of GPUNode {node}, or wait for its agent's planned stop to end"
                );
            }
            Code::HoldingsUnknown => {
                return write!(
                    f,
                    "a pod there runs without its allocation (Event AllocationMissing): delete that pod; or an allocation cannot be read (log code AllocationUnreadable): run the version that wrote it"
                );
            }
            Code::DriverNotReady => {
                return write!(
                    f,
                    "the driver does not answer: see the condition DriverReady of GPUNode {node}"
                );
            }
            Code::PluginDown => {
                return write!(
                    f,
                    "the kubelet offers no {}: see the condition PluginRegistered of GPUNode {node}",
                    crate::request::COUNT
                );
            }
            Code::SlotsTaken => return write!(f, "{best} slots free on the node of {asked} asked"),
            _ => {}
        }
        write!(f, "{} of {} cards healthy", d.cards_healthy, d.cards_total)?;
        if d.cards_asked > 1 {
            let name = d.container.as_deref().unwrap_or_default();
            write!(
                f,
                "; container {name} asks for {} cards, {} can take it",
                d.cards_asked, d.cards_fitting
            )?;
        }
        let next = if d.cards_fitting == 0 { "the best" } else { "the next best" };
        match code {
            Code::TooFewCards => write!(f, "; lower {}", crate::request::COUNT),
            Code::CardsUnhealthy => write!(f, "; see status.cards of GPUNode {node}"),
            Code::CardsInMigMode => write!(f, "; the others are in MIG mode, which gives no slices"),
            Code::CardsClosed => write!(f, "; the others are cordoned in the spec of GPUNode {node}"),
            Code::CardTooSmall => write!(f, "; {next} has {best} MiB in all of {asked} asked"),
            Code::CardSlotsTaken => write!(f, "; {next} has {best} shares free of {asked} asked"),
            Code::CardExclusive => {
                write!(f, "; it must be alone on a card, or a pod that must be alone holds it")
            }
            Code::MemoryShort => write!(f, "; {next} has {best} MiB free of {asked} asked"),
            Code::CoresShort if d.best == 0 => write!(f, "; {next} has no compute left"),
            Code::CoresShort => write!(f, "; {next} has {best} % of compute free of {asked} % asked"),
            _ => write!(f, "; each container fits by itself, all of them together do not"),
        }
    }
}

/// `2100` as `2,100`: for people.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
