//! Lock bytes past the end of a file.
#![expect(unsafe_code, reason = "fcntl")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use nix::libc;

fn lock(kind: libc::c_int, start: i64) -> libc::flock {
    // SAFETY: a plain C struct for which all zeroes is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = 0;
    (lock.l_start, lock.l_len) = (start, 1);
    lock
}

fn control(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: an open descriptor and a lock struct that outlives the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes the byte for the open file description; false when somebody else has it.
pub(super) fn try_own(file: &File, byte: i64) -> io::Result<bool> {
    match control(file, libc::F_OFD_SETLK, &mut lock(libc::F_WRLCK, byte)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives the byte of the open file description back.
pub(super) fn release_own(file: &File, byte: i64) -> io::Result<()> {
    control(file, libc::F_OFD_SETLK, &mut lock(libc::F_UNLCK, byte))
}

/// Whether somebody else has the byte.
pub(super) fn is_held(file: &File, byte: i64) -> io::Result<bool> {
    let mut wanted = lock(libc::F_WRLCK, byte);
    control(file, libc::F_OFD_GETLK, &mut wanted)?;
    Ok(libc::c_int::from(wanted.l_type) != libc::F_UNLCK)
}

/// Takes the byte for the process.
pub(super) fn set_pid(file: &File, byte: i64) -> io::Result<()> {
    control(file, libc::F_SETLK, &mut lock(libc::F_WRLCK, byte))
}

/// Who has a byte for the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Nobody, or this process: one's own locks do not stand in one's way.
    Nobody,
    /// A process by its pid in this process's pid namespace.
    Pid(u32),
    /// A process that this one's pid namespace does not have.
    Elsewhere,
}

/// Who has the byte for the process.
pub(super) fn holder(file: &File, byte: i64) -> Holder {
    let mut wanted = lock(libc::F_WRLCK, byte);
    let held = control(file, libc::F_GETLK, &mut wanted).is_ok()
        && libc::c_int::from(wanted.l_type) != libc::F_UNLCK;
    match u32::try_from(wanted.l_pid) {
        _ if !held => Holder::Nobody,
        Ok(pid) if pid > 0 => Holder::Pid(pid),
        _ => Holder::Elsewhere,
    }
}
