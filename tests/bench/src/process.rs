//! Memory and CPU of processes, from `/proc`.

use std::fs;

use anyhow::{Context, Result};

use crate::stats::real;

/// Unit of the times in `/proc/PID/stat`: `USER_HZ` is 100 on every architecture that Linux has.
const TICK_MILLIS: f64 = 10.0;

/// CPU time that a process has used so far, in milliseconds (user and system, all threads).
///
/// # Errors
/// When there is no such process.
pub fn cpu_millis(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    ticks(&text)
        .map(|ticks| real(ticks) * TICK_MILLIS)
        .with_context(|| format!("{path} is not as in proc(5)"))
}

fn ticks(stat: &str) -> Option<usize> {
    // The name in brackets may hold anything; utime and stime are fields 14 and 15, the state after the name is 3.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let utime: usize = fields.next()?.parse().ok()?;
    let stime: usize = fields.next()?.parse().ok()?;
    Some(utime + stime)
}

/// CPU time that the whole machine has used so far, in milliseconds.
///
/// # Errors
/// When `/proc/stat` cannot be read.
pub fn machine_cpu_millis() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_ticks(&text).map(|ticks| real(ticks) * TICK_MILLIS).context("/proc/stat is not as in proc(5)")
}

fn busy_ticks(stat: &str) -> Option<usize> {
    // cpu user nice system idle iowait irq softirq steal guest guest_nice; guests are counted in user and nice.
    let fields: Vec<usize> =
        stat.lines().next()?.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    (fields.len() >= 7).then(|| [0, 1, 2, 5, 6].iter().map(|&field| fields[field]).sum())
}

/// One reading of `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    /// Resident, in KiB.
    pub resident: u64,
    /// Resident and not backed by a file, in KiB.
    pub anonymous: u64,
    /// Largest resident size so far, in KiB.
    pub peak: u64,
    /// Threads.
    pub threads: u64,
}

/// Memory of a process.
///
/// # Errors
/// When there is no such process.
pub fn memory(pid: i32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .with_context(|| format!("{path} has no {key}"))
    };
    Ok(Memory {
        resident: value("VmRSS:")?,
        anonymous: value("RssAnon:")?,
        peak: value("VmHWM:")?,
        threads: value("Threads:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_a_process_with_a_wild_name() {
        let stat = "42 (a) b (c)) S 1 42 42 0 -1 4194304 100 0 0 0 7 5 0 0 20 0 3 0 1000 1 1";
        assert_eq!(ticks(stat), Some(12));
        assert_eq!(ticks("42 (cut"), None);
    }

    #[test]
    fn waiting_is_not_busy() {
        assert_eq!(busy_ticks("cpu  1 2 3 1000 1000 4 5 0 0 0\ncpu0 9"), Some(15));
        assert_eq!(busy_ticks("cpu 1"), None);
    }

    #[test]
    fn this_process_has_memory() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let memory = memory(pid).unwrap();
        assert!(memory.resident > 0 && memory.anonymous <= memory.resident, "{memory:?}");
        assert!(cpu_millis(pid).unwrap() >= 0.0);
        assert!(cpu_millis(-1).is_err());
    }
}
