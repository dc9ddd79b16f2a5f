//! A process of a tenant's: this program again, told by lines what to do with a usage file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};

use mullion_region::extension;
use nix::fcntl::{FallocateFlags, FcntlArg, fallocate, fcntl};
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

const FILE: &str = "MULLION_TEST_TENANT_FILE";

/// What such a process does: lines of words in, a line out for each.
pub fn run() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<u64>().unwrap();
        match words[0] {
            // Takes a slot, as the library does.
            "claim" => {
                let lock = libc::flock {
                    l_type: i16::try_from(libc::F_WRLCK).unwrap(),
                    l_whence: i16::try_from(libc::SEEK_SET).unwrap(),
                    l_start: i64::try_from(extension::LOCK_AT + number(1)).unwrap(),
                    l_len: 1,
                    l_pid: 0,
                };
                fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
            }
            "put" => file.write_all_at(&number(2).to_le_bytes(), number(1)).unwrap(),
            "put32" => {
                file.write_all_at(&u32::try_from(number(2)).unwrap().to_le_bytes(), number(1)).unwrap();
            }
            "raise32" => {
                let mut bytes = [0; 4];
                file.read_exact_at(&mut bytes, number(1)).unwrap();
                let raised = u32::from_le_bytes(bytes).max(u32::try_from(number(2)).unwrap());
                file.write_all_at(&raised.to_le_bytes(), number(1)).unwrap();
            }
            // Cuts the file and makes it whole again, punches holes, writes noise: as fast as it can, until killed.
            "spoil" => {
                println!("ok");
                let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
                loop {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = noise % length;
                    match noise >> 61 {
                        0 => file.set_len(at).unwrap(),
                        1 | 2 => file.set_len(length).unwrap(),
                        3 => {
                            let flags =
                                FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                            fallocate(&file, flags, i64::try_from(at).unwrap(), 65_536).unwrap();
                        }
                        _ => {
                            let bytes: Vec<u8> = (0..64_u8).map(|n| n ^ noise.to_le_bytes()[3]).collect();
                            file.write_all_at(&bytes, at).unwrap();
                        }
                    }
                }
            }
            // A lease, taken anew whenever somebody asks for it back.
            "lease" => lease(&file),
            // Keeps everybody from writing to the file, until killed.
            "keep" => {
                let Some((never, mut faults)) = memory_that_never_comes() else {
                    println!("not here");
                    continue;
                };
                let file = file.try_clone().unwrap();
                std::thread::spawn(move || file.write_at(never, 3 << 20));
                // It has the file, and asks for the first byte.
                faults.read_exact(&mut [0; 32]).unwrap();
                std::mem::forget(faults);
            }
            other => unreachable!("{other}"),
        }
        println!("ok");
    }
}

/// Memory of which not a byte will ever be there: a `write` from it holds its file for ever, as any long one does for as long
/// as it takes. With it, where the kernel tells that somebody asks for it. `None` where the system does not let us.
#[expect(unsafe_code, reason = "userfaultfd has no safe interface")]
fn memory_that_never_comes() -> Option<(&'static [u8], File)> {
    const LENGTH: usize = 4096;
    const UFFDIO_API: u64 = 0xc018_aa3f;
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a fresh mapping that overlaps nothing.
    let memory =
        unsafe { mmap_anonymous(None, NonZeroUsize::new(LENGTH)?, protection, MapFlags::MAP_PRIVATE) };
    let memory = memory.ok()?;
    // SAFETY: no pointers.
    let faults = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    let faults = i32::try_from(faults).ok().filter(|fd| *fd >= 0)?;
    let mut version = [0xaa_u64, 0, 0];
    // SAFETY: three words, as the call wants them.
    if unsafe { libc::ioctl(faults, UFFDIO_API, version.as_mut_ptr()) } != 0 {
        return None;
    }
    let mut range = [memory.addr().get() as u64, LENGTH as u64, 1, 0];
    // SAFETY: four words, as the call wants them.
    if unsafe { libc::ioctl(faults, UFFDIO_REGISTER, range.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: mapped for as long as the process lives; nobody but the kernel looks at it.
    let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), LENGTH) };
    // SAFETY: it was opened above, and is nobody else's.
    Some((memory, unsafe { File::from_raw_fd(faults) }))
}

static LEASED: AtomicI32 = AtomicI32::new(-1);

/// Gives the lease back, and takes it again as soon as it can be had.
#[expect(unsafe_code, reason = "leases have no safe interface")]
extern "C" fn again(_: i32) {
    let file = LEASED.load(Ordering::SeqCst);
    // SAFETY: a descriptor and two numbers.
    unsafe { libc::fcntl(file, libc::F_SETLEASE, libc::F_UNLCK) };
    for _ in 0..10_000_000 {
        // SAFETY: a descriptor and two numbers.
        if unsafe { libc::fcntl(file, libc::F_SETLEASE, libc::F_WRLCK) } == 0 {
            return;
        }
    }
}

#[expect(unsafe_code, reason = "signals and leases have no safe interface")]
fn lease(file: &File) {
    LEASED.store(file.as_raw_fd(), Ordering::SeqCst);
    // SAFETY: the handler makes nothing but system calls.
    unsafe { libc::signal(libc::SIGIO, again as *const () as libc::sighandler_t) };
    // SAFETY: a descriptor and two numbers.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    assert_eq!(taken, 0, "{}", std::io::Error::last_os_error());
}

/// A tenant's process.
pub struct Tenant {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Tenant {
    /// Starts one that has the usage file at `path` open.
    pub fn start(path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tenant_process", "--nocapture"])
            .env(FILE, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut tenant = Self { child, orders, answers };
        tenant.hear("ready");
        tenant
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "ended");
        }
    }

    /// Does something, and has done it when this returns.
    pub fn order(&mut self, line: &str) {
        writeln!(self.orders, "{line}").unwrap();
        self.hear("ok");
    }

    /// Keeps everybody else from writing to the file until it is killed; false where this system does not let it.
    pub fn keeps_the_file(&mut self) -> bool {
        writeln!(self.orders, "keep").unwrap();
        let mut line = String::new();
        while line.trim().is_empty() {
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "ended");
        }
        if line.trim() != "ok" {
            eprintln!("no userfaultfd here: nothing is held");
        }
        line.trim() == "ok"
    }

    /// Claims a slot and settles `bytes` on card 0 of it, as the library does.
    pub fn hold(&mut self, slot: usize, bytes: u64) {
        let layout = mullion_region::hami::Layout::V1_2;
        let high = mullion_region::usage::EXTENSION_AT + extension::HIGH_WATER_AT;
        let attached = mullion_region::usage::EXTENSION_AT + extension::ATTACHED_AT;
        let words = extension::slot_offset(0, slot).unwrap();
        let pid = self.pid();
        self.order(&format!("claim {slot}"));
        self.order(&format!("put32 {} {pid}", layout.slot_offset(slot).unwrap()));
        self.order(&format!("put32 {} 1", layout.status(slot, 1).unwrap().offset));
        self.order(&format!("raise32 {high} {}", slot + 1));
        self.order(&format!("put {attached} {}", slot + 1));
        self.order(&format!("put {} {bytes}", words + extension::CLAIMED_AT));
        self.order(&format!("put {} {bytes}", words + extension::SETTLED_AT));
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL; it is dead when this returns.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
