//! Limits given by hand, in the environment: `LD_PRELOAD=libvgpu.so CUDA_DEVICE_MEMORY_LIMIT_0=4g ./app`.
//!
//! The names are HAMi's, the reading is stricter. HAMi takes `16Gi` for 16 bytes, `1.5g` for 1 GiB and an overflow for
//! "no limit"; here each of them is an error, and the process is told so before it can use the card. A number with a
//! leading 0 is refused as well: HAMi reads it as octal, people write it as decimal.
//!
//! Where a control page is mounted, nothing of this is looked at: what a tenant may set must not move a limit.

use core::ffi::CStr;
use core::fmt::{self, Write};
use core::num::NonZeroU64;

use mullion_pace::policy::Policy;
use mullion_region::{CorePercent, MAX_DEVICES};

use crate::sys;

/// A variable that this library reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variable {
    /// `CUDA_DEVICE_MEMORY_LIMIT`, or with `_<i>` for one card.
    MemoryLimit(Option<usize>),
    /// `CUDA_DEVICE_SM_LIMIT`, or with `_<i>` for one card.
    SmLimit(Option<usize>),
    /// `GPU_CORE_UTILIZATION_POLICY`.
    Policy,
    /// `CUDA_TASK_PRIORITY`.
    Priority,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MemoryLimit(None) => f.write_str("CUDA_DEVICE_MEMORY_LIMIT"),
            Self::MemoryLimit(Some(card)) => write!(f, "CUDA_DEVICE_MEMORY_LIMIT_{card}"),
            Self::SmLimit(None) => f.write_str("CUDA_DEVICE_SM_LIMIT"),
            Self::SmLimit(Some(card)) => write!(f, "CUDA_DEVICE_SM_LIMIT_{card}"),
            Self::Policy => f.write_str("GPU_CORE_UTILIZATION_POLICY"),
            Self::Priority => f.write_str("CUDA_TASK_PRIORITY"),
        }
    }
}

/// Room for a variable's name, for the C library.
#[derive(Debug, Default)]
pub(crate) struct Name {
    bytes: [u8; 32],
    len: usize,
}

impl Name {
    /// The name, with a NUL behind it.
    pub(crate) fn of(&mut self, variable: Variable) -> Option<&CStr> {
        *self = Self::default();
        write!(self, "{variable}").ok()?;
        CStr::from_bytes_until_nul(&self.bytes).ok()
    }
}

impl Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// A variable that says no limit which could be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Error<'a> {
    /// Its value is none.
    Value {
        /// Which.
        variable: Variable,
        /// Its value.
        value: &'a [u8],
    },
    /// What stands behind the name for all cards is not `_` and a card's number.
    Card {
        /// The name for all cards.
        all: Variable,
        /// What stands behind it.
        suffix: &'a [u8],
    },
}

/// Longest value, and longest number of a card, that a message repeats.
const SHOWN: usize = 64;

/// Text of the environment, in a line.
struct Shown<'a>(&'a [u8]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.get(..SHOWN).unwrap_or(self.0);
        write!(f, "{}", shown.escape_ascii())?;
        f.write_str(if shown.len() < self.0.len() { "..." } else { "" })
    }
}

impl fmt::Display for Error<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (variable, value) = match *self {
            Self::Value { variable, value } => (variable, value),
            Self::Card { all, suffix } => {
                return write!(
                    f,
                    "{all}{} is the limit of no card: write a number from 0 to {} behind {all}_, or unset it",
                    Shown(suffix),
                    MAX_DEVICES - 1
                );
            }
        };
        write!(f, "{variable}=\"{}\"", Shown(value))?;
        f.write_str(match variable {
            _ if has_leading_zero(value) => " has a leading zero, which is octal to some: leave it out",
            Variable::MemoryLimit(_) if is_too_large(value) => {
                " is too large: write less than 2^64 bytes; 0 or unset is no limit"
            }
            Variable::MemoryLimit(_) => {
                " is no size: write bytes, or a whole number with k, m or g behind it: 4g; 0 or unset is no limit"
            }
            Variable::SmLimit(_) => {
                " is no percentage: write a whole number from 1 to 100; 0 or unset is no limit"
            }
            Variable::Policy => " is no policy: write default, force or disable, or unset it",
            Variable::Priority => {
                " is no priority: write a whole number from 0 (high) to 2147483647, or unset it (1)"
            }
        })
    }
}

/// What is set by hand for one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Memory in bytes; none is no limit.
    pub(crate) memory: Option<NonZeroU64>,
    /// Share of the SMs; none is no limit, like 100.
    pub(crate) core: Option<CorePercent>,
}

/// What is set by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// By CUDA's ordinal in this process.
    pub(crate) cards: [Limits; MAX_DEVICES],
    /// When the SM limit applies.
    pub(crate) policy: Policy,
    /// 0 is high.
    pub(crate) priority: i32,
}

impl Settings {
    /// Whether any limit is set at all: without one the library keeps out of the way.
    pub(crate) fn any(&self) -> bool {
        self.cards.iter().any(|card| *card != Limits::default())
    }
}

/// Reads the environment, single variables through `value_of`. A variable of one card wins over the one for all.
///
/// # Errors
/// [`Error`] for the first variable that is set to something without a meaning.
pub(crate) fn read(value_of: impl Fn(Variable) -> Option<&'static [u8]>) -> Result<Settings, Error<'static>> {
    read_from(value_of, sys::variables().map(CStr::to_bytes))
}

/// The variables that limit a card of its own, from card `cards` on: this process has none of that number.
pub(crate) fn beyond<'a>(
    value_of: impl Fn(Variable) -> Option<&'a [u8]>,
    cards: usize,
) -> impl Iterator<Item = Variable> {
    let is_limit = move |variable: &Variable| match *variable {
        Variable::MemoryLimit(_) => value_of(*variable).and_then(size).is_some_and(|bytes| bytes > 0),
        _ => value_of(*variable).and_then(percent).is_some_and(|percent| (1..100).contains(&percent)),
    };
    (cards..MAX_DEVICES)
        .flat_map(|card| [Variable::MemoryLimit(Some(card)), Variable::SmLimit(Some(card))])
        .filter(is_limit)
}

fn read_from<'a>(
    value_of: impl Fn(Variable) -> Option<&'a [u8]>,
    mut variables: impl Iterator<Item = &'a [u8]>,
) -> Result<Settings, Error<'a>> {
    if let Some(error) = variables.find_map(limit_of_no_card) {
        return Err(error);
    }
    let parsed = |variable: Variable, parse: fn(&[u8]) -> Option<u64>| match value_of(variable) {
        None => Ok(None),
        Some(value) => parse(value).map(Some).ok_or(Error::Value { variable, value }),
    };
    let mut cards = [Limits::default(); MAX_DEVICES];
    let memory = parsed(Variable::MemoryLimit(None), size)?;
    let core = parsed(Variable::SmLimit(None), percent)?;
    for (index, card) in cards.iter_mut().enumerate() {
        let memory = parsed(Variable::MemoryLimit(Some(index)), size)?.or(memory);
        let core = parsed(Variable::SmLimit(Some(index)), percent)?.or(core);
        *card = Limits {
            memory: memory.and_then(NonZeroU64::new),
            // 100 throttles nothing, so it is no limit either.
            core: core
                .filter(|percent| *percent < 100)
                .and_then(|percent| CorePercent::new(u8::try_from(percent).ok()?).ok()),
        };
    }
    let policy = match value_of(Variable::Policy) {
        None => Policy::Default,
        Some(value) => policy(value).ok_or(Error::Value { variable: Variable::Policy, value })?,
    };
    let priority = match value_of(Variable::Priority) {
        None => mullion_region::usage::DEFAULT_PRIORITY,
        Some(value) => number(value)
            .and_then(|n| i32::try_from(n).ok())
            .ok_or(Error::Value { variable: Variable::Priority, value })?,
    };
    Ok(Settings { cards, policy, priority })
}

/// A limit that would go unheard: of a 17th card, or of one whose number is written in another way, also without the line
/// before it. 0 asks for none.
fn limit_of_no_card(variable: &[u8]) -> Option<Error<'_>> {
    type Parse = fn(&[u8]) -> Option<u64>;
    let of = |prefix: &[u8], all, parse: Parse| {
        let rest = variable.strip_prefix(prefix)?;
        let end = rest.iter().position(|byte| *byte == b'=')?;
        let (suffix, value) = (rest.get(..end)?, rest.get(end + 1..)?);
        let is_other = !matches!(suffix, [b'_' | b'0'..=b'9', ..]);
        let is_card = suffix
            .strip_prefix(b"_")
            .is_some_and(|card| is_decimal(card) && number(card).is_some_and(|n| n < MAX_DEVICES as u64));
        (!is_other && !is_card && parse(value) != Some(0)).then_some(Error::Card { all, suffix })
    };
    of(b"CUDA_DEVICE_MEMORY_LIMIT", Variable::MemoryLimit(None), size)
        .or_else(|| of(b"CUDA_DEVICE_SM_LIMIT", Variable::SmLimit(None), percent))
}

fn is_decimal(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_digit)
}

/// A size in bytes: `4g`, `4096m`, `0x100000000`.
fn size(text: &[u8]) -> Option<u64> {
    let (digits, unit) = with_unit(text)?;
    number(digits)?.checked_mul(unit)
}

/// The digits of a size, and what they count.
fn with_unit(text: &[u8]) -> Option<(&[u8], u64)> {
    Some(match text.split_last()? {
        (b'k' | b'K', rest) => (rest, 1 << 10),
        (b'm' | b'M', rest) => (rest, 1 << 20),
        (b'g' | b'G', rest) => (rest, 1 << 30),
        _ => (text, 1_u64),
    })
}

/// Whether it is a size, of more than there can be.
fn is_too_large(text: &[u8]) -> bool {
    let is_number = |digits: &[u8]| !digits.is_empty() && is_decimal(digits) && !has_leading_zero(digits);
    size(text).is_none()
        && with_unit(text).is_some_and(|(digits, _)| number(digits).is_some() || is_number(digits))
}

fn has_leading_zero(text: &[u8]) -> bool {
    matches!(text, [b'0', b'0'..=b'9', ..])
}

/// A percentage; 0 is no limit.
fn percent(text: &[u8]) -> Option<u64> {
    number(text).filter(|percent| *percent <= 100)
}

/// A whole number, decimal or hexadecimal with `0x`.
fn number(text: &[u8]) -> Option<u64> {
    let (digits, radix) = match text {
        [b'0', b'x' | b'X', digits @ ..] => (digits, 16),
        [b'0', _, ..] => return None,
        digits => (digits, 10),
    };
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, digit| {
        let digit = char::from(*digit).to_digit(radix)?;
        number.checked_mul(radix.into())?.checked_add(digit.into())
    })
}

fn policy(text: &[u8]) -> Option<Policy> {
    [(&b"default"[..], Policy::Default), (b"force", Policy::Force), (b"disable", Policy::Disable)]
        .into_iter()
        .find_map(|(name, policy)| text.eq_ignore_ascii_case(name).then_some(policy))
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString as _;
    use std::vec::Vec;

    use super::*;

    fn of(set: &[(&'static str, &'static str)]) -> Result<Settings, Error<'static>> {
        let value_of = |variable: Variable| {
            let name = variable.to_string();
            set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_bytes())
        };
        let all = set
            .iter()
            .map(|(name, value)| -> &'static [u8] { std::format!("{name}={value}").into_bytes().leak() });
        read_from(value_of, all)
    }

    #[test]
    fn a_limit_of_a_card_that_cannot_be_is_refused_and_not_passed_over() {
        for (name, value, want) in [
            ("CUDA_DEVICE_MEMORY_LIMIT_15", "4g", true),
            ("CUDA_DEVICE_MEMORY_LIMIT_16", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_100", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_18446744073709551617", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_01", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_0x1", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_a", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT_16", "0", true),
            ("CUDA_DEVICE_MEMORY_LIMIT_16", "nonsense", false),
            ("CUDA_DEVICE_SM_LIMIT_16", "30", false),
            ("CUDA_DEVICE_SM_LIMIT_16", "0", true),
            ("CUDA_DEVICE_MEMORY_LIMIT0", "4g", false),
            ("CUDA_DEVICE_MEMORY_LIMIT0", "0", true),
            ("CUDA_DEVICE_SM_LIMIT1", "30", false),
            ("CUDA_DEVICE_MEMORY_LIMITS", "4g", true),
            ("MY_CUDA_DEVICE_MEMORY_LIMIT_16", "4g", true),
        ] {
            assert_eq!(of(&[(name, value)]).is_ok(), want, "{name}={value}");
        }
        let text = of(&[("CUDA_DEVICE_MEMORY_LIMIT_16", "4g")]).unwrap_err().to_string();
        assert!(text.starts_with("CUDA_DEVICE_MEMORY_LIMIT_16 is the limit of no card: "), "{text}");
        assert!(text.contains("from 0 to 15"), "{text}");
    }

    #[test]
    fn a_size_is_what_it_says_or_an_error() {
        const GIB: u64 = 1 << 30;
        for (case, text, want) in [
            ("bytes", "1048576", Some(1 << 20)),
            ("k", "2048k", Some(2 << 20)),
            ("M, any case", "4096M", Some(4 * GIB)),
            ("g", "4g", Some(4 * GIB)),
            ("hexadecimal", "0x10m", Some(16 << 20)),
            ("hexadecimal, any case", "0XfF", Some(255)),
            ("0 is no limit", "0", Some(0)),
            ("0m as well", "0m", Some(0)),
            ("the largest", "18446744073709551615", Some(u64::MAX)),
            ("the largest with a unit", "17179869183g", Some(17_179_869_183 * GIB)),
            ("octal for HAMi, decimal for people", "010g", None),
            ("a leading zero", "00", None),
            ("Gi, 16 bytes for HAMi", "16Gi", None),
            ("MB, 4096 bytes for HAMi", "4096MB", None),
            ("b", "4b", None),
            ("a fraction, 1 GiB for HAMi", "1.5g", None),
            ("an exponent", "1e9", None),
            ("negative", "-1", None),
            ("a sign", "+1", None),
            ("empty", "", None),
            ("only a unit", "g", None),
            ("only a prefix", "0x", None),
            ("a prefix and a unit", "0xg", None),
            ("white space before", " 4g", None),
            ("white space behind", "4g\n", None),
            ("two units", "4gg", None),
            ("one more than the largest", "18446744073709551616", None),
            ("overflow by the unit", "17179869184g", None),
            ("a word", "unlimited", None),
            ("Arabic digits", "\u{0664}", None),
        ] {
            assert_eq!(size(text.as_bytes()), want, "{case}");
        }
    }

    #[test]
    fn the_variable_of_a_card_wins_over_the_one_for_all() {
        let settings = of(&[
            ("CUDA_DEVICE_MEMORY_LIMIT", "8g"),
            ("CUDA_DEVICE_MEMORY_LIMIT_1", "4g"),
            ("CUDA_DEVICE_MEMORY_LIMIT_2", "0"),
            ("CUDA_DEVICE_SM_LIMIT", "30"),
            ("CUDA_DEVICE_SM_LIMIT_3", "100"),
        ])
        .unwrap();
        let gib: Vec<_> = settings.cards[..4].iter().map(|c| c.memory.map(|m| m.get() >> 30)).collect();
        assert_eq!(gib, [Some(8), Some(4), None, Some(8)]);
        let core: Vec<_> = settings.cards[..4].iter().map(|c| c.core.map(CorePercent::get)).collect();
        assert_eq!(core, [Some(30), Some(30), Some(30), None]);
    }

    #[test]
    fn a_limit_of_a_card_that_is_not_there_is_found() {
        for (name, value, cards, want) in [
            ("CUDA_DEVICE_MEMORY_LIMIT_1", "4g", 1, true),
            ("CUDA_DEVICE_MEMORY_LIMIT_1", "4g", 2, false),
            ("CUDA_DEVICE_MEMORY_LIMIT_1", "0", 1, false),
            ("CUDA_DEVICE_SM_LIMIT_15", "30", 15, true),
            ("CUDA_DEVICE_SM_LIMIT_15", "100", 15, false),
            ("CUDA_DEVICE_SM_LIMIT_15", "30", 16, false),
            ("CUDA_DEVICE_MEMORY_LIMIT", "4g", 1, false),
        ] {
            let value_of = |variable: Variable| (variable.to_string() == name).then_some(value.as_bytes());
            let found: Vec<_> = beyond(value_of, cards).map(|variable| variable.to_string()).collect();
            assert_eq!(found, Vec::from_iter(want.then_some(name)), "{name}={value}, {cards} cards");
        }
        assert_eq!(beyond(|_| Some(&b"30"[..]), 14).count(), 4, "each of them is");
    }

    #[test]
    fn without_a_variable_there_is_no_limit() {
        let settings = of(&[]).unwrap();
        assert!(!settings.any());
        assert_eq!((settings.policy, settings.priority), (Policy::Default, 1));
        assert!(!of(&[("CUDA_DEVICE_MEMORY_LIMIT", "0"), ("CUDA_DEVICE_SM_LIMIT", "100")]).unwrap().any());
        assert!(of(&[("CUDA_DEVICE_SM_LIMIT_15", "1")]).unwrap().any());
    }

    #[test]
    fn policy_and_priority() {
        for (text, want) in [
            ("force", Some(Policy::Force)),
            ("FORCE", Some(Policy::Force)),
            ("Disable", Some(Policy::Disable)),
            ("dEFAULT", Some(Policy::Default)),
            ("on", None),
            ("", None),
        ] {
            let found = of(&[("GPU_CORE_UTILIZATION_POLICY", text)]).map(|s| s.policy);
            assert_eq!(found.ok(), want, "{text}");
        }
        for (text, want) in
            [("0", Some(0)), ("1", Some(1)), ("high", None), ("-1", None), ("4294967296", None)]
        {
            let found = of(&[("CUDA_TASK_PRIORITY", text)]).map(|s| s.priority);
            assert_eq!(found.ok(), want, "{text}");
        }
        for text in ["101", "0.5", "-5", "50%", "1e1"] {
            assert!(of(&[("CUDA_DEVICE_SM_LIMIT", text)]).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_names_the_variable_the_value_and_the_way_out() {
        for (name, value, want) in [
            ("CUDA_DEVICE_MEMORY_LIMIT_3", "16Gi", "=\"16Gi\" is no size: write bytes, or"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "4g ", "=\"4g \" is no size"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "99999999999g", " is too large: write less than 2^64 bytes"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "18446744073709551616", " is too large"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "0xffffffffffg", " is too large"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "04g", " has a leading zero"),
            ("CUDA_DEVICE_SM_LIMIT", "010", " has a leading zero"),
            ("CUDA_DEVICE_SM_LIMIT", "101", " is no percentage: write a whole number from 1 to 100"),
            ("CUDA_DEVICE_SM_LIMIT", "\u{1b}[31m", r#"="\x1b[31m" is no percentage"#),
            ("CUDA_TASK_PRIORITY", "4294967296", "from 0 (high) to 2147483647"),
        ] {
            let text = of(&[(name, value)]).unwrap_err().to_string();
            assert!(text.starts_with(name) && text.contains(want) && text.len() < 130, "{text}");
        }
        let long: &'static str = "9".repeat(1000).leak();
        let text = of(&[("CUDA_DEVICE_MEMORY_LIMIT", long)]).unwrap_err().to_string();
        assert!(text.len() < 300 && text.contains("999..."), "{text}");
    }
}
