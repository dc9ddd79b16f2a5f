//! Several processes on one card, and what NVML shows of them.
#![expect(unsafe_code, reason = "forks, and sets the environment of the NVML library")]
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::{Argument as _, CONTEXT, Cuda, MIB, process};
use fake_state::{STATE_ENV, Store, profile};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

static ENVIRONMENT: Mutex<()> = Mutex::new(());

/// A node of two A30 in a folder of its own.
struct Node {
    store: Store,
    _folder: tempfile::TempDir,
}

/// What programs can have of an A30.
const CAPACITY: u64 = (24576 - 310) * MIB;

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = profile::node("a30x2", "node-a").unwrap();
        let store = Store::create(folder.path().join("node-a.json"), &state).unwrap();
        Self { store, _folder: folder }
    }

    fn path(&self) -> &str {
        self.store.path().to_str().unwrap()
    }

    fn start(&self, role: &str, variables: &[(&str, &str)]) -> Program {
        let all: Vec<_> = variables.iter().copied().chain([(STATE_ENV, self.path())]).collect();
        let mut child = process("a_program", role, &all);
        let told = BufReader::new(child.stdout.take().unwrap());
        Program { child, told }
    }

    /// The fake NVML of this node.
    fn nvml(&self) -> Nvml {
        self.nvml_that_lists("own")
    }

    fn nvml_that_lists(&self, processes: &str) -> Nvml {
        let built = std::env::current_exe().unwrap().with_file_name("libnvidia_ml.so");
        let copy = self.store.path().with_file_name(format!("libnvidia-ml.so.1.{processes}"));
        std::fs::copy(built, &copy).unwrap();
        let _one_at_a_time = ENVIRONMENT.lock().unwrap();
        // SAFETY: the library reads the environment in init alone, which runs under the same lock.
        unsafe { std::env::set_var(STATE_ENV, self.path()) };
        // SAFETY: as above.
        unsafe { std::env::set_var("FAKE_NVML_PROCESSES", processes) };
        Nvml::builder().lib_path(copy.as_os_str()).init().unwrap()
    }
}

struct Program {
    child: Child,
    told: BufReader<ChildStdout>,
}

impl Program {
    /// The next line that the program says.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            assert!(self.told.read_line(&mut line).unwrap() > 0, "the program ended without a word");
            if let Some((_, said)) = line.split_once("> ") {
                return said.trim().to_owned();
            }
            line.clear();
        }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.told.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn say(line: impl std::fmt::Display) {
    println!("> {line}");
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// The programs that the tests start; on its own it does nothing.
#[test]
fn a_program() {
    let Some(role) = common::role() else { return };
    let mut words = role.split(' ');
    let what = words.next().unwrap();
    let number = words.next().map_or(0, |n| n.parse::<u64>().unwrap());
    let cuda = Cuda::here();
    match what {
        // Takes MiB and holds them.
        "hold" => {
            let mut p = 0_u64;
            ok!(cuda.cuMemAlloc_v2(&mut p, number * MIB));
            say("held");
            hear();
        }
        // Takes blocks of so many MiB until the card is full.
        "fill" => {
            say("ready");
            hear();
            let (mut p, mut count) = (0_u64, 0_u64);
            loop {
                match call!(cuda.cuMemAlloc_v2(&mut p, number * MIB)) {
                    0 => count += 1,
                    2 => break,
                    other => panic!("{other}"),
                }
            }
            say(count);
            hear();
        }
        // Takes and gives back more than half of the card, so many times; when the card is full it tries again.
        "churn" => {
            say("ready");
            hear();
            let (mut p, mut done) = (0_u64, 0_u64);
            while done < number {
                if call!(cuda.cuMemAlloc_v2(&mut p, 13_000 * MIB)) == 0 {
                    assert!(cuda.given_on_card() <= CAPACITY);
                    ok!(cuda.cuMemFree_v2(p));
                    done += 1;
                }
            }
            say(done);
            hear();
        }
        // Hands in so many ms of work.
        "work" => {
            assert_eq!(cuda.call("fake_cuda_set_duration", &[c"work".word(), number * 1_000_000]), 0);
            let kernel = cuda.kernel(c"work");
            say("ready");
            hear();
            assert_eq!(cuda.launch(kernel, 0), 0);
            say("handed in");
            hear();
        }
        // Takes MiB, and says which processes NVML shows it, and which pid it has itself.
        "list" => {
            let mut p = 0_u64;
            ok!(cuda.cuMemAlloc_v2(&mut p, number * MIB));
            let library = std::env::current_exe().unwrap().with_file_name("libnvidia_ml.so");
            let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
            say(std::process::id());
            hear();
            for (pid, bytes) in shown(&nvml) {
                say(format!("{pid} {bytes}"));
            }
            say("all");
            hear();
        }
        "export" => {
            let (mut p, mut handle) = (0_u64, [0_u64; 8]);
            ok!(cuda.cuMemAlloc_v2(&mut p, number * MIB));
            ok!(cuda.cuIpcGetMemHandle(&mut handle, p));
            say(handle.map(|w| w.to_string()).join(" "));
            hear();
        }
        "fork" => {
            // SAFETY: the child calls the library and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let mut count = 0_i32;
                let codes = [call!(cuda.cuDeviceGetCount(&mut count)), cuda.call("cuInit", &[0])];
                // SAFETY: ends the child without running the test harness twice.
                unsafe { libc::_exit(i32::from(codes != [3, 3])) };
            }
            let mut status = 0;
            // SAFETY: a child of ours and a place for its status.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            say(format!("{status} {}", cuda.given() / MIB));
            hear();
        }
        other => panic!("{other}"),
    }
}

/// Lets programs that have their contexts go at once.
fn start(programs: &mut [Program]) {
    for program in &mut *programs {
        assert_eq!(program.hear(), "ready");
    }
    for program in programs {
        program.say("go");
    }
}

#[test]
fn racers_never_get_more_than_the_card_has() {
    let node = Node::new();
    let mut programs: Vec<Program> = (0..4).map(|_| node.start("fill 7", &[])).collect();
    start(&mut programs);
    let counts: Vec<u64> = programs.iter_mut().map(|p| p.hear().parse().unwrap()).collect();
    let blocks: u64 = counts.iter().sum();
    // 7 MiB take 8; four contexts are there too.
    let most = (CAPACITY - 4 * CONTEXT) / (8 * MIB);
    assert_eq!(blocks, most, "{counts:?}");
    programs.into_iter().for_each(Program::end);
}

#[test]
fn of_two_that_do_not_fit_together_one_always_does() {
    let node = Node::new();
    let mut programs: Vec<Program> = (0..2).map(|_| node.start("churn 3000", &[])).collect();
    start(&mut programs);
    for program in &mut programs {
        assert_eq!(program.hear(), "3000");
    }
    programs.into_iter().for_each(Program::end);
}

fn within(seconds: u64, mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) {
        if holds() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// The processes on card 0 and what each has of it; 0 where that is not told.
fn shown(nvml: &Nvml) -> Vec<(u32, u64)> {
    let all = nvml.device_by_index(0).unwrap().running_compute_processes().unwrap();
    let bytes = |u: &UsedGpuMemory| match u {
        UsedGpuMemory::Used(bytes) => *bytes,
        UsedGpuMemory::Unavailable => 0,
    };
    let mut shown: Vec<(u32, u64)> = all.iter().map(|p| (p.pid, bytes(&p.used_gpu_memory))).collect();
    shown.sort_unstable();
    shown
}

#[test]
fn processes_are_listed_as_the_drivers_of_all_kinds_do() {
    let node = Node::new();
    let mut program = node.start("hold 100", &[]);
    program.hear();
    let (pid, bytes) = (program.pid(), CONTEXT + 100 * MIB);
    for (how, want) in [
        ("own", vec![(pid, bytes)]),
        ("host", vec![(pid + (1 << 22), bytes)]),
        ("none", vec![]),
        ("unsized", vec![(pid, 0)]),
    ] {
        assert_eq!(shown(&node.nvml_that_lists(how)), want, "{how}");
    }
    program.end();
}

/// At once, and whatever it is.
#[test]
fn nvml_shows_all_that_a_process_has() {
    let node = Node::new();
    let nvml = node.nvml();
    let cuda = Cuda::load(&[(STATE_ENV, node.path())]);
    let mut last = 0;
    let mut grown = |kind: &str| {
        let given = cuda.given();
        assert_eq!(shown(&nvml), [(std::process::id(), given)], "{kind}");
        assert!(given > last, "{kind}");
        last = given;
    };
    let (mut context, mut place) = (0_u64, 0_u64);
    assert!(shown(&nvml).is_empty());
    ok!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0));
    grown("context");
    ok!(cuda.cuCtxSetCurrent(context));
    ok!(cuda.cuCtxSetLimit(2, 64 * MIB));
    grown("limit");
    ok!(cuda.cuMemAlloc_v2(&mut place, 100_u64));
    grown("plain memory");
    ok!(cuda.cuArrayCreate_v2(&mut place, &mut [16_u64, 8, 1 << 32 | 0x20]));
    grown("array");
    ok!(cuda.cuModuleLoadData(&mut place, c" .version 8.0"));
    grown("module");
    ok!(cuda.cuMemAllocAsync(&mut place, 100_u64, 0));
    grown("pool");
    ok!(cuda.cuMemCreate(&mut place, 2 * MIB, &mut [1_u64, 1, 0, 0], 0));
    grown("physical memory");
    ok!(cuda.cuDevicePrimaryCtxReset_v2(0));
    assert_eq!(shown(&nvml), [(std::process::id(), cuda.given())]);
}

#[test]
fn nvml_shows_who_holds_what_and_a_dead_process_lingers() {
    let node = Node::new();
    let mut first = node.start("hold 100", &[("FAKE_CUDA_RELEASE_DELAY_MS", "700")]);
    let mut second = node.start("hold 50", &[]);
    assert_eq!((first.hear(), second.hear()), ("held".to_owned(), "held".to_owned()));
    let nvml = node.nvml();
    let card = nvml.device_by_index(0).unwrap();
    let shown = || shown(&nvml);
    let mut want = vec![(first.pid(), CONTEXT + 100 * MIB), (second.pid(), CONTEXT + 50 * MIB)];
    want.sort_unstable();
    assert_eq!(shown(), want);
    let used = || card.memory_info().unwrap().used;
    let both = 2 * CONTEXT + 150 * MIB;
    assert_eq!(used(), both);
    let survivor = second.pid();
    first.kill();
    assert!(within(5, || shown() == [(survivor, CONTEXT + 50 * MIB)]), "{:?}", shown());
    assert_eq!(used(), both, "its memory stays for 700 ms");
    assert!(within(5, || used() == CONTEXT + 50 * MIB), "{}", used());
    second.end();
    assert!(within(5, || used() == 0 && shown().is_empty()));
    assert_eq!(nvml.device_by_index(1).unwrap().memory_info().unwrap().used, 0);
}

#[test]
fn the_memory_of_scripted_processes_is_not_to_be_had() {
    let node = Node::new();
    let line = ["process", "0", "4242", "20000"].map(str::to_owned);
    if fake_state::verb::apply(&node.store, &line).is_err() {
        node.store
            .update(|state| {
                let process =
                    fake_state::Process { pid: 4242, memory_mib: 20_000, sm_percent: 0, gpu_instance: None };
                state.cards[0].processes.push(process);
                Ok::<_, fake_state::Error>(())
            })
            .unwrap();
    }
    let mut program = node.start("fill 100", &[]);
    start(std::slice::from_mut(&mut program));
    let blocks: u64 = program.hear().parse().unwrap();
    assert_eq!(blocks, (CAPACITY - 20_000 * MIB - CONTEXT) / (100 * MIB));
    program.end();
}

#[test]
fn rivals_share_the_time_of_a_card_and_nvml_samples_it() {
    let node = Node::new();
    let mut programs: Vec<Program> = (0..2).map(|_| node.start("work 3000", &[])).collect();
    let mut idle = node.start("hold 1", &[]);
    idle.hear();
    start(&mut programs);
    for program in &mut programs {
        assert_eq!(program.hear(), "handed in");
    }
    let nvml = node.nvml();
    let card = nvml.device_by_index(0).unwrap();
    let start = now_us();
    // Two full windows of both.
    std::thread::sleep(Duration::from_millis(400));
    let samples = card.process_utilization_stats(start).unwrap();
    let mut got: Vec<(u32, u32)> = samples.iter().map(|s| (s.pid, s.sm_util)).collect();
    got.sort_unstable();
    let mut want: Vec<(u32, u32)> = programs.iter().map(|p| (p.pid(), 50)).collect();
    want.sort_unstable();
    assert_eq!(got, want);
    assert!(samples.iter().all(|s| s.timestamp > start && s.timestamp <= now_us()), "{samples:?}");
    assert_eq!(card.utilization_rates().unwrap().gpu, 100);
    // One dies: its work goes with it, and the other has the card.
    programs.remove(0).kill();
    let survivor = programs[0].pid();
    let alone = || {
        let samples = card.process_utilization_stats(now_us() - 300_000).unwrap_or_default();
        samples.iter().map(|s| (s.pid, s.sm_util)).collect::<Vec<_>>() == [(survivor, 100)]
    };
    assert!(within(5, alone));
    idle.end();
    programs.remove(0).end();
    let nobody = || matches!(card.process_utilization_stats(now_us()), Ok(s) if s.is_empty());
    assert!(within(5, || nobody()
        || matches!(card.process_utilization_stats(now_us()), Err(NvmlError::NotFound))));
}

fn now_us() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

#[test]
fn ipc_memory_is_given_once() {
    let node = Node::new();
    let mut exporter = node.start("export 64", &[]);
    let words: Vec<u64> = exporter.hear().split(' ').map(|w| w.parse().unwrap()).collect();
    let cuda = Cuda::ready(&[(STATE_ENV, node.path())]);
    assert_eq!(cuda.given_on_card(), 2 * CONTEXT + 64 * MIB);
    // 64 bytes by value go on the stack, behind one word that stands for the first argument.
    let name = cuda.address("cuIpcOpenMemHandle_v2");
    let handle: [u64; 8] = words.try_into().unwrap();
    let p = common::open_ipc(name, handle).unwrap();
    assert_eq!(cuda.given_on_card(), 2 * CONTEXT + 64 * MIB);
    assert_eq!(common::open_ipc(name, handle), Ok(p), "opened twice");
    assert_eq!(call!(cuda.cuMemFree_v2(p)), 1, "closed, not freed");
    ok!(cuda.cuIpcCloseMemHandle(p));
    ok!(cuda.cuIpcCloseMemHandle(p));
    assert_eq!(call!(cuda.cuIpcCloseMemHandle(p)), 1);
    exporter.end();
}

#[test]
fn a_forked_child_cannot_use_the_driver() {
    let node = Node::new();
    let mut program = node.start("fork", &[]);
    assert_eq!(program.hear(), format!("0 {}", CONTEXT / MIB));
    program.end();
}

/// HK-03: a driver that calls its own entry points through the global scope comes to an end.
#[test]
fn init_through_the_global_scope_ends() {
    let node = Node::new();
    let mut program = node.start("hold 1", &[("FAKE_CUDA_RECURSE", "1"), ("FAKE_NVML_RECURSE", "1")]);
    assert_eq!(program.hear(), "held");
    program.end();
}

/// A program in a pid namespace of its own; none without the right to make one.
fn start_in_a_pid_namespace(node: &Node, role: &str) -> Option<Program> {
    // SAFETY: asks for the user id.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: a pid namespace needs root");
        return None;
    }
    let mut child = std::process::Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_program", "--nocapture", "--test-threads=1"])
        .env("FAKE_CUDA_TEST_ROLE", role)
        .env(STATE_ENV, node.path())
        .env_remove("FAKE_NVML_PROCESSES")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let told = BufReader::new(child.stdout.take().unwrap());
    Some(Program { child, told })
}

/// What the agent on the node sees of a program in a container: its host pid.
#[test]
fn a_program_in_a_pid_namespace_has_a_host_pid() {
    let node = Node::new();
    let Some(mut program) = start_in_a_pid_namespace(&node, "hold 5") else { return };
    assert_eq!(program.hear(), "held");
    let nvml = node.nvml();
    let shown = shown(&nvml);
    assert_eq!(shown.len(), 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", shown[0].0)).unwrap();
    let namespaces = status.lines().find(|l| l.starts_with("NSpid:")).unwrap();
    assert!(namespaces.split_whitespace().count() > 2, "{namespaces}");
    program.end();
}

/// What a program in a container sees: itself, and not the neighbour that has the same pid in a container of its own.
#[test]
fn processes_of_other_pid_namespaces_are_not_listed() {
    let node = Node::new();
    let mut programs: Vec<Program> =
        (1..=2).filter_map(|mib| start_in_a_pid_namespace(&node, &format!("list {}", 2 * mib))).collect();
    for program in &mut programs {
        assert_eq!(program.hear(), "1");
    }
    for (program, mib) in programs.iter_mut().zip([2, 4]) {
        program.say("go");
        assert_eq!(program.hear(), format!("1 {}", CONTEXT + mib * MIB));
        assert_eq!(program.hear(), "all");
    }
    programs.into_iter().for_each(Program::end);
}
