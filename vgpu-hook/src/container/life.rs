//! Which process has a pid, by what `/proc` tells of it.

use core::ffi::CStr;
use core::fmt::{self, Write};

use crate::sys::{self, Errno};

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
        let (pid, life) = parse(read(c"/proc/self/stat", &mut text).ok()??)?;
        // Else `/proc` is another pid namespace's.
        life.filter(|_| pid == u64::from(sys::process_id().unsigned_abs()))
    }

    /// That of the process that has this pid now; `None` also where it has no memory any more.
    ///
    /// # Errors
    /// It may live: a process without a free descriptor cannot ask, for one.
    pub(super) fn of(pid: i32) -> Result<Option<Self>, Errno> {
        let mut text = [0; LONGEST];
        let mut path = Path::default();
        let Some(text) = read(path.of(pid)?, &mut text)? else { return Ok(None) };
        parse(text).map(|(_, life)| life).ok_or(UNREADABLE)
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

/// Whether there may be a process of this pid: only `/proc` without it tells that there is none.
pub(super) fn exists(pid: i32) -> bool {
    let mut path = Path::default();
    match path.of(pid).and_then(|path| if_there(sys::open(path, sys::O_RDONLY | sys::O_CLOEXEC, 0))) {
        Ok(None) => false,
        Ok(Some(file)) => {
            file.close();
            true
        }
        Err(_) => true,
    }
}

/// What is said of a process, or that there is none. Any other error says neither.
fn if_there<T>(said: Result<T, Errno>) -> Result<Option<T>, Errno> {
    const ESRCH: Errno = Errno(3);
    match said {
        Err(Errno::NOENT | ESRCH) => Ok(None),
        said => said.map(Some),
    }
}

/// `EIO`: it is no such file.
const UNREADABLE: Errno = Errno(5);

/// Longer than all fields up to the last that is read.
const LONGEST: usize = 1024;

fn read<'t>(path: &CStr, text: &'t mut [u8; LONGEST]) -> Result<Option<&'t [u8]>, Errno> {
    let opened = if_there(sys::open(path, sys::O_RDONLY | sys::O_CLOEXEC, 0))?;
    let Some(file) = opened else { return Ok(None) };
    let len = file.read_at(text, 0);
    file.close();
    Ok(if_there(len)?.and_then(|len| text.get(..len)))
}

/// Reads the pid and what tells the process from others, if it has any memory; the name, in parentheses, may hold anything.
fn parse(text: &[u8]) -> Option<(u64, Option<Life>)> {
    let number = |field: &[u8]| core::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let pid = number(text.split(|byte| *byte == b' ').next()?)?;
    let after = text.iter().rposition(|byte| *byte == b')')?;
    // The first of them is empty, the next one the third field.
    let mut fields = text.get(after + 1..)?.split(|byte| *byte == b' ');
    let threads = number(fields.nth(20 - 2)?)?;
    let begun = number(fields.nth(22 - 20 - 1)?)?;
    let code = number(fields.nth(26 - 22 - 1)?)?;
    let stack = number(fields.nth(28 - 26 - 1)?)?;
    let low = |number: u64, bits: u32| u32::try_from(number & u64::from(bits)).unwrap_or(0);
    // Where its code begins is 0 when its memory is gone, and 1 for who may not know. What is told is of the first thread,
    // which has none any more, either, when it alone has ended: then all the others still count as threads.
    let lives = code != 0 || threads > 1;
    Some((pid, lives.then(|| Life { begun: low(begun, u32::MAX), stack: low(stack >> 4, STACK_BITS) })))
}

/// Room for `/proc/PID/stat`.
#[derive(Default)]
struct Path {
    bytes: [u8; 32],
    len: usize,
}

impl Path {
    fn of(&mut self, pid: i32) -> Result<&CStr, Errno> {
        let _ = write!(self, "/proc/{pid}/stat\0");
        CStr::from_bytes_until_nul(&self.bytes).map_err(|_| Errno::NAMETOOLONG)
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
        assert_eq!(Life::of(pid), Ok(Some(own)));
        assert_eq!(Life::unpack(own.pack()), Some(own));
        assert_eq!(Life::unpack(0), None);
        let mut child =
            Command::new("sh").args(["-c", "read x; exec cat"]).stdin(Stdio::piped()).spawn().unwrap();
        let child_pid = i32::try_from(child.id()).unwrap();
        let pause = || std::thread::sleep(std::time::Duration::from_millis(1));
        // For a moment of exec it has neither the old memory nor any code.
        let before = loop {
            match Life::of(child_pid).unwrap() {
                Some(life) => break life,
                None => pause(),
            }
        };
        assert!(before.may_be(before) && !before.may_be(own) && exists(child_pid));
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, b"\n").unwrap();
        // The same process, another program.
        while Life::of(child_pid).unwrap().is_none_or(|now| now.may_be(before)) {
            pause();
        }
        drop(stdin);
        // Dead, and not waited for.
        while Life::of(child_pid).unwrap().is_some() {
            pause();
        }
        assert!(exists(child_pid));
        child.wait().unwrap();
        assert!(!exists(child_pid));
        assert_eq!(Life::of(child_pid), Ok(None));
    }

    #[test]
    fn only_what_is_not_there_is_gone() {
        for (errno, want) in [(2, Ok(None)), (3, Ok(None)), (13, Err(Errno(13))), (24, Err(Errno(24)))] {
            assert_eq!(if_there::<()>(Err(Errno(errno))), want, "error {errno}");
        }
        assert_eq!(if_there(Ok(7)), Ok(Some(7)));
    }

    #[test]
    fn a_name_is_no_field_and_what_is_hidden_is_no_difference() {
        let read = |threads: u64, code: u64, stack: u64| {
            let line = std::format!(
                "7 (a) S 1 (b)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 {threads} 18 4242 20 21 22 {code} 24 {stack} 26"
            );
            let (pid, found) = parse(line.as_bytes()).unwrap();
            assert_eq!(pid, 7);
            found
        };
        let known = read(1, 99, 0x7ffc_1230).unwrap();
        assert_eq!(known, Life { begun: 4242, stack: 0x07ff_c123 });
        let hidden = read(1, 1, 0).unwrap();
        assert!(known.may_be(hidden) && hidden.may_be(known));
        assert_eq!(read(1, 0, 0), None, "its memory is gone");
        assert!(read(2, 0, 0).unwrap().may_be(known), "its first thread has ended, the other has not");
        assert_eq!(parse(b"7 (a) S 1"), None);
    }
}
