use core::fmt;

/// Why bytes were not accepted as a control page or a usage file, or a value not as part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Fewer bytes than the layout needs.
    TooShort {
        /// Which file.
        what: &'static str,
        /// Bytes needed.
        need: u64,
        /// Bytes there.
        found: u64,
    },
    /// The first bytes are not the layout's magic number.
    Magic {
        /// Which file.
        what: &'static str,
        /// The bytes found, as a little-endian number.
        found: u64,
    },
    /// A version that this library does not know.
    Version {
        /// Which file.
        what: &'static str,
        /// Version found.
        found: u32,
        /// Version known here.
        known: u32,
    },
    /// A length field that disagrees with the version's length.
    Length {
        /// Which file.
        what: &'static str,
        /// Length found.
        found: u32,
        /// Length of that version.
        known: u32,
    },
    /// More cards than the layout has room for.
    TooManyDevices {
        /// Cards asked for or announced.
        found: u64,
    },
    /// More process slots announced than the usage file has.
    TooManySlots {
        /// Value of `proc_num`.
        found: i32,
    },
    /// More slots announced by the extension than the usage file has.
    HighWater {
        /// Value of the high-water mark.
        found: u32,
    },
    /// A file of a HAMi library of early 2024, which kept no utilisation and no version.
    TooOld {
        /// Bytes of the file.
        found: u64,
    },
    /// A file of another of HAMi's layouts than the one wanted.
    Layout {
        /// Layout found.
        found: &'static str,
        /// Layout wanted.
        known: &'static str,
    },
    /// A card's uuid is empty, too long or holds something other than printable uuid characters.
    CardUuid {
        /// Index of the card in the file; 0 for a value that is not in a file yet.
        index: usize,
    },
    /// A core share outside of 1..=100.
    CorePercent {
        /// The value.
        found: u64,
    },
    /// A field of a card that must not be zero is zero.
    Zero {
        /// Index of the card.
        index: usize,
        /// Name of the field.
        field: &'static str,
    },
    /// A field holds a value without a meaning.
    Unknown {
        /// Name of the field.
        field: &'static str,
        /// The value.
        found: u32,
    },
}

impl Error {
    /// The stable name of this error, the same in log, Event, metric and CLI.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::TooShort { .. } => "RegionTooShort",
            Self::Magic { .. } => "RegionMagic",
            Self::Version { .. } => "RegionVersion",
            Self::Length { .. } => "RegionLength",
            Self::TooManyDevices { .. } => "RegionTooManyDevices",
            Self::TooManySlots { .. } => "RegionTooManySlots",
            Self::HighWater { .. } => "RegionHighWater",
            Self::TooOld { .. } => "RegionTooOld",
            Self::Layout { .. } => "RegionLayout",
            Self::CardUuid { .. } => "RegionCardUuid",
            Self::CorePercent { .. } => "RegionCorePercent",
            Self::Zero { .. } => "RegionZero",
            Self::Unknown { .. } => "RegionUnknown",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { what, need, found } => {
                write!(f, "the {what} has {found} bytes of the {need} it needs: it was cut")
            }
            Self::Magic { what, found } => {
                write!(
                    f,
                    "the {what} starts with {found:#x}, which is not its magic number: it is another file"
                )
            }
            Self::Version { what, found, known } => write!(
                f,
                "the {what} has version {found}, known is {known}: use the agent and the library of one release"
            ),
            Self::Length { what, found, known } => {
                write!(f, "the {what} gives its length as {found} instead of {known}: it is damaged")
            }
            Self::TooManyDevices { found } => {
                write!(f, "{found} cards in one container, at most {} fit: ask for fewer", crate::MAX_DEVICES)
            }
            Self::TooManySlots { found } => {
                write!(
                    f,
                    "proc_num is {found}, outside of 0 to {}: the tenant overwrote it",
                    crate::usage::SLOTS
                )
            }
            Self::HighWater { found } => {
                write!(
                    f,
                    "the high-water mark of slots is {found}, above {}: the tenant overwrote it",
                    crate::usage::SLOTS
                )
            }
            Self::TooOld { found } => write!(
                f,
                "the usage file has {found} bytes, as HAMi's library wrote it before April 2024, without a version and \
                 without utilisation: restart the pod with a newer library"
            ),
            Self::Layout { found, known } => {
                write!(f, "the usage file has layout {found}, wanted is {known}: it is of another library")
            }
            Self::CardUuid { index } => write!(
                f,
                "the uuid of card {index} is not 1 to {} letters, digits or any of '-', '/', '_', '.'",
                crate::CardUuid::MAX
            ),
            Self::CorePercent { found } => {
                write!(f, "core share {found}% is outside of 1 to 100: give a whole percent")
            }
            Self::Zero { index, field } => {
                write!(f, "{field} of card {index} is 0, which would mean no limit")
            }
            Self::Unknown { field, found } => {
                write!(f, "{field} is {found}, which has no meaning in this version")
            }
        }
    }
}

impl core::error::Error for Error {}
