//! Which process has a pid, by what `/proc` tells of it.

use core::ffi::CStr;
use core::fmt::{self, Write};

use crate::sys;

/// A process, and which program it runs: another process that gets its pid, or another program that it calls exec for, is
/// another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    /// When it was started, in ticks since the machine's start; the lower half.
    begun: u32,
    /// Where its stack begins, which is chosen by chance at exec; 0 where the kernel does not tell that to this process.
    stack: u32,
}

const STACK_BITS: u32 = 0x7fff_ffff;

impl Life {
    /// This process's.
    pub(super) fn own() -> Option<Self> {
        let mut text = [0; LONGEST];
        let (pid, life) = parse(read(c"/proc/self/stat", &mut text)?)?;
        // Else `/proc` is another pid namespace's.
        (pid == u64::from(sys::process_id().unsigned_abs())).then_some(life)
    }

    /// That of the process that has this pid now; `None` also where it has no memory any more.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let mut text = [0; LONGEST];
        let mut path = Path::default();
        Some(parse(read(path.of(pid)?, &mut text)?)?.1)
    }

    /// Not 0.
    pub(super) fn pack(self) -> u64 {
        1 << 63 | u64::from(self.stack) << 32 | u64::from(self.begun)
    }

    pub(super) fn unpack(word: u64) -> Option<Self> {
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        (word >> 63 == 1).then(|| Self { begun: half(word), stack: half(word >> 32) & STACK_BITS })
    }

    /// Whether both may be the same one.
    pub(super) fn may_be(self, other: Self) -> bool {
        let is_known = self.stack != 0 && other.stack != 0;
        self.begun == other.begun && (!is_known || self.stack == other.stack)
    }
}

/// Whether there is a process of this pid, as far as `/proc` tells.
pub(super) fn exists(pid: i32) -> bool {
    read_any(pid).is_some()
}

fn read_any(pid: i32) -> Option<()> {
    let mut path = Path::default();
    sys::open(path.of(pid)?, sys::O_RDONLY | sys::O_CLOEXEC, 0).ok()?.close();
    Some(())
}

/// Longer than all fields up to the last that is read.
const LONGEST: usize = 1024;

fn read<'t>(path: &CStr, text: &'t mut [u8; LONGEST]) -> Option<&'t [u8]> {
    let file = sys::open(path, sys::O_RDONLY | sys::O_CLOEXEC, 0).ok()?;
    let len = file.read_at(text, 0);
    file.close();
    text.get(..len.ok()?)
}

/// Reads the pid and what tells the process from others; the name, in parentheses, may hold anything.
fn parse(text: &[u8]) -> Option<(u64, Life)> {
    let number = |field: &[u8]| core::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let pid = number(text.split(|byte| *byte == b' ').next()?)?;
    let after = text.iter().rposition(|byte| *byte == b')')?;
    // The first of them is empty, the next one the third field.
    let mut fields = text.get(after + 1..)?.split(|byte| *byte == b' ');
    let begun = number(fields.nth(22 - 2)?)?;
    let code = number(fields.nth(26 - 22 - 1)?)?;
    let stack = number(fields.nth(28 - 26 - 1)?)?;
    let low = |number: u64, bits: u32| u32::try_from(number & u64::from(bits)).unwrap_or(0);
    // Where its code begins is 0 when its memory is gone, and 1 for who may not know.
    (code != 0).then(|| (pid, Life { begun: low(begun, u32::MAX), stack: low(stack >> 4, STACK_BITS) }))
}

/// Room for `/proc/PID/stat`.
#[derive(Default)]
struct Path {
    bytes: [u8; 32],
    len: usize,
}

impl Path {
    fn of(&mut self, pid: i32) -> Option<&CStr> {
        write!(self, "/proc/{pid}/stat\0").ok()?;
        CStr::from_bytes_until_nul(&self.bytes).ok()
    }
}

impl Write for Path {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_told_from_others() {
        let own = Life::own().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Life::of(pid), Some(own));
        assert_eq!(Life::unpack(own.pack()), Some(own));
        assert_eq!(Life::unpack(0), None);
        let mut child =
            Command::new("sh").args(["-c", "read x; exec cat"]).stdin(Stdio::piped()).spawn().unwrap();
        let child_pid = i32::try_from(child.id()).unwrap();
        let pause = || std::thread::sleep(std::time::Duration::from_millis(1));
        // For a moment of exec it has neither the old memory nor any code.
        let before = loop {
            match Life::of(child_pid) {
                Some(life) => break life,
                None => pause(),
            }
        };
        assert!(before.may_be(before) && !before.may_be(own) && exists(child_pid));
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, b"\n").unwrap();
        // The same process, another program.
        while Life::of(child_pid).is_none_or(|now| now.may_be(before)) {
            pause();
        }
        drop(stdin);
        // Dead, and not waited for.
        while Life::of(child_pid).is_some() {
            pause();
        }
        assert!(exists(child_pid));
        child.wait().unwrap();
        assert!(!exists(child_pid));
    }

    #[test]
    fn a_name_is_no_field_and_what_is_hidden_is_no_difference() {
        let line = |code: u64, stack: u64| {
            std::format!(
                "7 (a) S 1 (b)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21 22 {code} 24 {stack} 26"
            )
        };
        let (pid, known) = parse(line(99, 0x7ffc_1230).as_bytes()).unwrap();
        assert_eq!((pid, known), (7, Life { begun: 4242, stack: 0x07ff_c123 }));
        let (_, hidden) = parse(line(1, 0).as_bytes()).unwrap();
        assert!(known.may_be(hidden) && hidden.may_be(known));
        assert_eq!(parse(line(0, 0).as_bytes()), None, "its memory is gone");
        assert_eq!(parse(b"7 (a) S 1"), None);
    }
}
