//! The container that this process belongs to: its control page, its usage file, its slot.

use crate::cuda::CUresult;

/// What is known of the container once the process is attached.
#[derive(Debug)]
pub(crate) struct Container;

/// One card of the container.
#[derive(Debug)]
pub(crate) struct Card;

/// The container, when this process is attached to it.
pub(crate) fn attached() -> Option<&'static Container> {
    None
}

/// The container for a program that reads NVML without CUDA: attaches on first use, without CUDA's ordinals.
pub(crate) fn for_nvml() -> Option<&'static Container> {
    attached()
}

/// `cuInit`.
///
/// # Safety
/// As `cuInit`.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn init(real: unsafe extern "C" fn(u32) -> CUresult, flags: u32) -> CUresult {
    // SAFETY: the caller's own argument.
    unsafe { real(flags) }
}

/// Whether a function that cannot be held to the limit is to be refused: a limit is asked for, and the page does not
/// say `report`. May be asked before the process is attached.
pub(crate) fn refuses() -> bool {
    false
}

/// Counts a look-up that could not be answered with a wrapper (`escapes` of the usage file).
pub(crate) fn count_escape() {}

/// A process of the container that has memory on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// As this container counts.
    pub(crate) pid: i32,
    /// As the host counts; 0 = the agent has not said yet.
    pub(crate) host_pid: i32,
    /// Bytes on the card.
    pub(crate) bytes: u64,
}

impl Container {
    /// The card with this uuid, in NVML's writing (`GPU-…`, `MIG-…`).
    pub(crate) fn card_by_uuid(&self, uuid: &str) -> Option<&Card> {
        let _ = uuid;
        None
    }
}

impl Card {
    /// Limit in bytes; `None` = this card has none.
    pub(crate) fn limit(&self) -> Option<u64> {
        None
    }

    /// Bytes that the container has on the card.
    pub(crate) fn used(&self) -> u64 {
        0
    }

    /// Shows every live process of the container with bytes on this card (or without, when it only has a slot).
    pub(crate) fn each_process(&self, see: &mut dyn FnMut(Process)) {
        let _ = see;
    }
}
