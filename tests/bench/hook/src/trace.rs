//! Counting from outside what a program does between two points, with the means of a debugger: nothing is believed, and no
//! rights are needed.

use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::container::{Container, Setup};
use crate::program::{Call, Program};

/// What is counted: names, calls, and the containers that they are made in.
#[must_use]
pub fn cases() -> [(&'static str, Call, Setup); 7] {
    let one = Setup::default();
    let two = Setup { cards: 2, ..one };
    [
        ("alloc + free, 2 MiB", Call::Pair(2 << 20), one),
        ("alloc + free, 512 B", Call::Pair(512), Setup { step: 512, ..one }),
        ("memory info", Call::Info, one),
        ("launch, no limit", Call::Launch, one),
        ("launch, no limit, two cards", Call::Launch, two),
        ("launch, 50 %", Call::Launch, Setup { core: 50, ..one }),
        ("launch, 50 %, two cards", Call::Launch, Setup { core: 50, ..two }),
    ]
}

/// Calls before the first that is counted.
const WARM: u32 = 20_000;
/// Calls of a stretch: fewer than there are between two that do more than the others.
const STRETCH: u32 = 8;
const STRETCHES: u32 = 8;

/// Instructions that ran between the two points, by where they lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// In `libvgpu.so`.
    pub library: u64,
    /// In `libcuda.so.1`.
    pub driver: u64,
    /// Anywhere else: the program, the C library, the clock of the vDSO.
    pub elsewhere: u64,
}

/// The start of the trace; the program stands at its first point.
fn start(program: &mut Program, call: Call, count: u32) -> Result<Pid> {
    program.tell(&format!("trace {call} {count}"))?;
    let pid = Pid::from_raw(i32::try_from(program.id())?);
    match waitpid(pid, None)? {
        WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
        other => bail!("hook-calls does not stop for its tracer: {other:?}"),
    }
    ptrace::setoptions(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD | ptrace::Options::PTRACE_O_EXITKILL)?;
    Ok(pid)
}

fn end(program: &mut Program, pid: Pid) -> Result<()> {
    ptrace::detach(pid, None)?;
    program.hear()?;
    Ok(())
}

/// System calls that `count` calls make.
///
/// # Errors
/// When the program fails or cannot be traced.
pub fn system_calls(program: &mut Program, call: Call, count: u32) -> Result<u64> {
    let pid = start(program, call, count)?;
    let mut stops = 0_u64;
    loop {
        ptrace::syscall(pid, None)?;
        match waitpid(pid, None)? {
            WaitStatus::PtraceSyscall(_) => stops += 1,
            WaitStatus::Stopped(_, Signal::SIGTRAP) => break,
            other => bail!("{call}: {other:?}"),
        }
    }
    end(program, pid)?;
    // One at its entry, one at its exit.
    Ok(stops.div_ceil(2))
}

/// Instructions that `count` calls take.
///
/// # Errors
/// When the program fails or cannot be traced.
pub fn instructions(program: &mut Program, call: Call, count: u32) -> Result<Instructions> {
    let pid = start(program, call, count)?;
    let [library, driver] = ranges(pid, ["libvgpu.so", "libcuda.so"])?;
    let mut counted = Instructions::default();
    loop {
        let at = ptrace::getregs(pid)?.rip;
        let within = |ranges: &[(u64, u64)]| ranges.iter().any(|&(from, to)| (from..to).contains(&at));
        if within(&library) {
            counted.library += 1;
        } else if within(&driver) {
            counted.driver += 1;
        } else {
            counted.elsewhere += 1;
        }
        ptrace::step(pid, None)?;
        match waitpid(pid, None)? {
            // The second point is a breakpoint, and no step: neither to the next instruction nor over a system call.
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                if ptrace::getsiginfo(pid)?.si_code == libc::SI_KERNEL {
                    break;
                }
            }
            other => bail!("{call}: {other:?}"),
        }
    }
    end(program, pid)?;
    Ok(counted)
}

/// Instructions of one ordinary `call`: the least of some short stretches, so that what is done once in many calls is not
/// in it.
///
/// # Errors
/// When the program fails or cannot be traced.
pub fn instructions_of_one(container: &Container, program: &mut Program, call: Call) -> Result<Instructions> {
    program.call(call, WARM)?;
    let mut least: Option<Instructions> = None;
    for _ in 0..STRETCHES {
        container.refill()?;
        let found = instructions(program, call, STRETCH)?;
        if least.is_none_or(|least| found.library < least.library) {
            least = Some(found);
        }
    }
    let all = least.unwrap_or_default();
    let each = |count: u64| count / u64::from(STRETCH);
    Ok(Instructions { library: each(all.library), driver: each(all.driver), elsewhere: each(all.elsewhere) })
}

/// Where files whose name contains one of `names` are mapped.
fn ranges<const N: usize>(pid: Pid, names: [&str; N]) -> Result<[Vec<(u64, u64)>; N]> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut found = [const { Vec::new() }; N];
    for line in maps.lines() {
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let file = rest.rsplit(' ').next().and_then(|path| Path::new(path).file_name()?.to_str());
        let Some(file) = file else { continue };
        for (name, ranges) in names.iter().zip(&mut found) {
            if file.starts_with(name) {
                let (from, to) = range.split_once('-').with_context(|| line.to_owned())?;
                ranges.push((u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?));
            }
        }
    }
    Ok(found)
}
