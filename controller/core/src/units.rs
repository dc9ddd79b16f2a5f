//! Units and identifiers as types, so that a number cannot be taken for another one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// GPU memory in MiB (2^20 bytes), the unit of HAMi's `nvidia.com/gpumem`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mib(pub u64);

impl Mib {
    /// Bytes in this many MiB; saturates at `u64::MAX`.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(1 << 20)
    }

    /// Whole MiB in `bytes`, rounded down: a card's odd bytes cannot be granted.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes >> 20)
    }

    /// `percent` of this amount, rounded down as HAMi does.
    #[must_use]
    pub fn share(self, percent: Percent) -> Self {
        let exact = u128::from(self.0) * u128::from(percent.get()) / 100;
        Self(u64::try_from(exact).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

/// A whole percentage, `1..=100`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Percent(u8);

impl Percent {
    /// All of it.
    pub const WHOLE: Self = Self(100);

    /// `None` outside `1..=100`.
    #[must_use]
    pub const fn new(percent: u8) -> Option<Self> {
        if percent >= 1 && percent <= 100 { Some(Self(percent)) } else { None }
    }

    /// The number, `1..=100`.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Percent {
    type Error = String;

    fn try_from(value: u8) -> Result<Self, Self::Error> {
        Self::new(value).ok_or_else(|| format!("{value} is outside the range 1 to 100"))
    }
}

impl From<Percent> for u8 {
    fn from(value: Percent) -> Self {
        value.0
    }
}

/// A share of a card's SMs in whole percent: `0` is best effort (charged nothing), `100` is unthrottled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct CoreShare(u8);

impl CoreShare {
    /// Charged nothing, gets what others leave.
    pub const BEST_EFFORT: Self = Self(0);
    /// The whole card's compute; nobody else may be on the card.
    pub const WHOLE: Self = Self(100);

    /// `None` above 100.
    #[must_use]
    pub const fn new(percent: u8) -> Option<Self> {
        if percent <= 100 { Some(Self(percent)) } else { None }
    }

    /// The number, `0..=100`.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for CoreShare {
    type Error = String;

    fn try_from(value: u8) -> Result<Self, Self::Error> {
        Self::new(value).ok_or_else(|| format!("{value} is outside the range 0 to 100"))
    }
}

impl From<CoreShare> for u8 {
    fn from(value: CoreShare) -> Self {
        value.0
    }
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            /// The text as Kubernetes or NVML spells it.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }
    };
}

identifier!(
    /// A card's uuid as NVML reports it (`GPU-…`).
    GpuUuid
);
identifier!(
    /// A node's name; `GPUNode` objects have the same one.
    NodeName
);
identifier!(
    /// The uid that the API server gave a Node object: a node made anew under an old name has another.
    NodeUid
);
identifier!(
    /// The uid that the API server gave a pod.
    PodUid
);
identifier!(
    /// The uid that the API server gave a `VGPUAllocation`.
    AllocationUid
);
