//! What is said on stderr: a line, and not again and again.

use core::fmt::{self, Write as _};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use crate::sys;

/// Bytes of a line; what is longer is cut.
pub(super) const LONGEST: usize = 480;

/// Says `text` of `card` behind its `code`, unless this process has done so within the last minute.
pub(super) fn say(code: &str, card: usize, text: fmt::Arguments<'_>) {
    if SAID.is_news(code, card, sys::process_id(), sys::clock::coarse_ns() / 1_000_000_000) {
        let mut line = Line::default();
        let _ = write!(line, "{code}: {text}");
        sys::complain(&[line.as_str()]);
    }
}

/// Which codes were said, by which process and when. There is room for all refusals, and for notices of each card.
struct Said([(AtomicU64, AtomicU64); 64]);

static SAID: Said = Said::new();

/// Seconds after which the same is said again.
const AGAIN_AFTER: u64 = 60;

impl Said {
    const fn new() -> Self {
        Self([const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64])
    }

    /// Whether process `pid` is to say `code` of `card` at `now`, in seconds since the machine's start; notes that it is
    /// said. A forked child has not said what its parent has. Of two threads at once each may say it.
    fn is_news(&self, code: &str, card: usize, pid: i32, now: u64) -> bool {
        // FNV-1a; no two codes share a number.
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let card = u8::try_from(card).unwrap_or(u8::MAX);
        let code = code.bytes().chain([card]).fold(0xcbf2_9ce4_8422_2325, step);
        let own = |place: &&(AtomicU64, AtomicU64)| {
            let found = place.0.compare_exchange(0, code, Relaxed, Relaxed);
            found.is_ok() || found == Err(code)
        };
        let Some((_, last)) = self.0.iter().find(own) else { return true };
        let pid = u64::from(pid.unsigned_abs());
        let said = last.load(Relaxed);
        let news = said >> 32 != pid || now.saturating_sub(said & 0xffff_ffff) >= AGAIN_AFTER;
        if news {
            last.store(pid << 32 | now & 0xffff_ffff, Relaxed);
        }
        news
    }
}

/// A line being put together without an allocator; what does not fit is left out.
struct Line {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; LONGEST], len: 0 }
    }
}

impl Line {
    fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or_default();
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            // Cut within a character.
            Err(error) => {
                core::str::from_utf8(bytes.get(..error.valid_up_to()).unwrap_or_default()).unwrap_or_default()
            }
        }
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
                self.len += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_said_once_by_each_process_and_once_a_minute_after_that() {
        let said = Said::new();
        for (pid, code, card, now, want) in [
            (7, "LimitInvalid", 0, 0, true),
            (7, "LimitInvalid", 0, 0, false),
            (7, "LimitInvalid", 0, 59, false),
            (7, "SlotsFull", 0, 59, true),
            (7, "SlotsFull", 1, 59, true),
            (7, "SlotsFull", 1, 59, false),
            (7, "LimitInvalid", 0, 60, true),
            (7, "LimitInvalid", 0, 61, false),
            (8, "LimitInvalid", 0, 61, true),
            (8, "LimitInvalid", 0, 62, false),
            (8, "SlotsFull", 0, 62, true),
        ] {
            assert_eq!(said.is_news(code, card, pid, now), want, "{code} {card} by {pid} at {now}");
        }
    }

    #[test]
    fn a_line_is_cut() {
        let mut line = Line::default();
        for _ in 0..100 {
            let _ = line.write_str("0123456789");
        }
        assert_eq!(line.as_str().len(), LONGEST);
    }
}
