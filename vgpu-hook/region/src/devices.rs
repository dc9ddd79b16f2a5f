use core::fmt;

use crate::{Error, MAX_DEVICES};

/// The uuid of a card or of a MIG instance as NVML prints it, e.g. `GPU-8f2b…` or `MIG-c6d4…`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CardUuid {
    bytes: [u8; CardUuid::MAX],
    len: usize,
}

impl CardUuid {
    /// Longest uuid in bytes: the control page's field of 64 less its closing NUL. NVML's own are 40 characters, the
    /// ones of MIG instances before driver 470 (`MIG-GPU-<uuid>/<gi>/<ci>`) up to 50.
    pub const MAX: usize = 63;

    /// # Errors
    /// [`Error::CardUuid`] when empty, longer than [`Self::MAX`] or with a character no uuid has.
    pub fn new(text: &str) -> Result<Self, Error> {
        Self::from_bytes(text.as_bytes(), 0)
    }

    fn from_bytes(text: &[u8], index: usize) -> Result<Self, Error> {
        let legal = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'/' | b'_' | b'.');
        let mut bytes = [0; Self::MAX];
        match bytes.get_mut(..text.len()) {
            Some(target) if !text.is_empty() && text.iter().all(legal) => target.copy_from_slice(text),
            _ => return Err(Error::CardUuid { index }),
        }
        Ok(Self { bytes, len: text.len() })
    }

    /// Reads a NUL-padded field; what follows the first NUL is not looked at.
    pub(crate) fn from_field(field: &[u8], index: usize) -> Result<Self, Error> {
        let text = field.split(|b| *b == 0).next().unwrap_or_default();
        Self::from_bytes(text, index)
    }

    /// The uuid's characters.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// The uuid as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Only ASCII gets in, so the empty default is never used.
        core::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }
}

impl fmt::Display for CardUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for CardUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// Share of a card's SMs in whole percent, `1..=100`; 100 is not throttled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CorePercent(u8);

impl CorePercent {
    /// The whole card.
    pub const WHOLE: Self = Self(100);

    /// # Errors
    /// [`Error::CorePercent`] outside of 1..=100.
    pub fn new(percent: u8) -> Result<Self, Error> {
        let legal = (1..=100).contains(&percent);
        legal.then_some(Self(percent)).ok_or(Error::CorePercent { found: percent.into() })
    }

    pub(crate) fn from_field(found: u64) -> Result<Self, Error> {
        u8::try_from(found).map_err(|_| Error::CorePercent { found }).and_then(Self::new)
    }

    /// The percentage as a number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// Up to [`MAX_DEVICES`] cards in the container's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices<T> {
    items: [Option<T>; MAX_DEVICES],
    count: usize,
}

impl<T: Copy> Devices<T> {
    /// No cards.
    #[must_use]
    pub const fn new() -> Self {
        Self { items: [None; MAX_DEVICES], count: 0 }
    }

    /// # Errors
    /// [`Error::TooManyDevices`] for more than [`MAX_DEVICES`].
    pub fn from_slice(items: &[T]) -> Result<Self, Error> {
        let mut devices = Self::new();
        for item in items {
            devices.push(*item).map_err(|_| Error::TooManyDevices { found: items.len() as u64 })?;
        }
        Ok(devices)
    }

    /// Adds a card behind the others.
    ///
    /// # Errors
    /// [`Error::TooManyDevices`] when all places are taken.
    pub fn push(&mut self, item: T) -> Result<(), Error> {
        let place =
            self.items.get_mut(self.count).ok_or(Error::TooManyDevices { found: MAX_DEVICES as u64 + 1 })?;
        *place = Some(item);
        self.count += 1;
        Ok(())
    }

    /// Number of cards.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no card.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The cards in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().flatten()
    }
}

impl<T: Copy> Default for Devices<T> {
    fn default() -> Self {
        Self::new()
    }
}
