//! What is found by looking at the card (contexts, their limits, modules), while others work on the same card: each
//! process is charged what it has itself.
#![cfg(test)]

mod common;
mod sessions;

use std::process::Command;

use fake_state::{Process, Store};
use sessions::{MIB, Place, Session};

/// How drivers list processes, by `FAKE_NVML_PROCESSES`: those of the caller's pid namespace; by pids of the host; not
/// at all; without their memory. With the first alone the library finds itself there.
const LISTS: [&str; 4] = ["own", "host", "none", "unsized"];

/// What is measured, and what ends it.
const STEPS: [(&str, &str); 5] = [
    ("context c 0", "destroy-context c"),
    ("module m 5000000", "unload m"),
    ("heap 41943040", "heap 8388608"),
    ("green g 0", "destroy-green g"),
    ("module n 2500000", "unload n"),
];

fn place(lists: &str) -> Place {
    let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
    place.set("FAKE_NVML_PROCESSES", lists);
    place
}

fn rest(mut session: Session) {
    session.done("stop");
    session.done("sync");
    session.agree("the neighbour came to rest");
    session.end();
}

/// Does all steps so many times, each time in another order, ends what they made in the reverse one, and lists where
/// what `charged` says is not what the card gave.
fn off(session: &mut Session, rounds: usize, mut charged: impl FnMut(&mut Session) -> u64) -> Vec<String> {
    let mut off = Vec::new();
    let mut look = |session: &mut Session, round: usize, step: &str| {
        session.done(step);
        let (charged, given) = (charged(session), session.given());
        if charged != given {
            off.push(format!("round {round}, {step}: charged {charged}, given {given}"));
        }
    };
    for round in 0..rounds {
        let turned = |at: usize| STEPS[(at * 3 + round) % STEPS.len()];
        for at in 0..STEPS.len() {
            look(session, round, turned(at).0);
        }
        // What was made after a context is the context's.
        for at in (0..STEPS.len()).rev() {
            look(session, round, turned(at).1);
            if turned(at).1.starts_with("destroy-context") {
                session.done("primary 0");
            }
        }
    }
    off
}

fn none(off: &[String], case: &str) {
    assert!(off.is_empty(), "{case}: {} times off: {:#?}", off.len(), &off[..off.len().min(12)]);
}

#[test]
#[ignore = "needs the built library"]
fn what_is_measured_alone_is_exact_whatever_nvml_lists() {
    for lists in LISTS {
        let place = place(lists);
        let mut session = place.ready();
        assert_eq!(session.agree("the primary context"), 64 * MIB, "{lists}");
        none(&off(&mut session, 10, Session::used), lists);
        assert_eq!(session.agree("the end"), 64 * MIB, "{lists}");
        session.end();
    }
}

#[test]
#[ignore = "needs the built library"]
fn another_container_on_the_card_shifts_no_figure() {
    let place = place("own");
    let neighbour = place.busy("neighbour.cache");
    let mut session = place.ready();
    none(&off(&mut session, 200, Session::used), "with a neighbour");
    rest(neighbour);
    assert_eq!(session.agree("the end"), 64 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn another_process_of_the_container_shifts_no_figure() {
    let place = place("own");
    let neighbour = place.busy("usage.cache");
    let mut session = place.ready();
    // The first slot is the neighbour's.
    none(&off(&mut session, 200, |_| place.slot(1).claimed), "with a process of the container");
    let given = session.given();
    let mut neighbour = neighbour;
    neighbour.done("stop");
    neighbour.done("sync");
    assert_eq!(neighbour.used(), neighbour.given() + given);
    neighbour.end();
    assert_eq!(session.agree("the end"), 64 * MIB);
}

/// What the dead held stays on the card for a while.
#[test]
#[ignore = "needs the built library"]
fn processes_that_die_meanwhile_shift_no_figure() {
    let mut place = place("own");
    place.set("FAKE_CUDA_RELEASE_DELAY_MS", "30");
    let mut session = place.ready();
    let off = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            for _ in 0..30 {
                let mut victim = place.ready();
                victim.done("churn 1");
                victim.kill();
            }
        });
        let mut all = Vec::new();
        while !killer.is_finished() {
            all.extend(off(&mut session, 5, |_| place.slot(0).claimed));
        }
        all
    });
    none(&off, "beside processes that die");
    assert_eq!(session.given(), 64 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn primary_contexts_made_beside_a_busy_neighbour_are_charged_in_full() {
    let place = place("own");
    let neighbour = place.busy("neighbour.cache");
    for round in 0..20 {
        let mut session = place.session();
        session.done("init");
        for again in 0..5 {
            session.done("primary 0");
            assert_eq!(session.agree("made"), 64 * MIB, "round {round}, {again}");
            session.done("release-primary 0");
            session.done("current 0");
        }
        session.end();
    }
    rest(neighbour);
}

/// Where NVML does not show the process to itself, a neighbour shifts what is charged; nothing of that outlives what
/// was measured.
#[test]
#[ignore = "needs the built library"]
fn where_nvml_does_not_say_the_neighbours_part_goes_with_the_context() {
    for lists in ["host", "none", "unsized"] {
        for usage in ["neighbour.cache", "usage.cache"] {
            let place = place(lists);
            let mut session = place.ready();
            assert_eq!(session.agree("alone"), 64 * MIB, "{lists}, {usage}");
            let mut neighbour = place.busy(usage);
            let _ = off(&mut session, 10, Session::used);
            session.done("reset-primary 0");
            neighbour.done("stop");
            neighbour.done("sync");
            // Its context may have been made when the other one was.
            neighbour.done("reset-primary 0");
            for session in [&mut session, &mut neighbour] {
                assert_eq!(session.given(), 0, "{lists}, {usage}");
            }
            assert_eq!(place.hot().cards[0].total, 0, "{lists}, {usage}");
            neighbour.end();
            session.end();
        }
    }
}

/// A driver that knows nothing of pid namespaces lists pids of the host, and one of them is that of this process in its
/// container.
#[test]
#[ignore = "needs the built library"]
fn a_neighbour_that_the_host_knows_by_the_same_pid_is_somebody_else() {
    for lists in ["host", "none"] {
        let place = place(lists);
        let mut session = place.session();
        let pid = u32::try_from(session.ask("pid")[1]).unwrap();
        let node = Store::open(place.path("node.json")).unwrap();
        let neighbour = Process { pid, memory_mib: 3000, sm_percent: 0, gpu_instance: None };
        node.update(|state| {
            state.cards[0].processes.push(neighbour);
            Ok::<_, fake_state::Error>(())
        })
        .unwrap();
        session.done("init");
        session.done("primary 0");
        assert_eq!(session.agree("the primary context"), 64 * MIB, "{lists}");
        none(&off(&mut session, 5, Session::used), lists);
        session.end();
    }
}

/// What a neighbour allocates while a container's first context is made is taken for the context's. One that is refused for it is
/// no measure for those that follow.
#[test]
#[ignore = "needs the built library"]
fn a_context_that_was_refused_for_a_neighbours_memory_keeps_no_other_out() {
    let mut place = Place::new().contexts_of(64).limited(512 * MIB);
    place.set("FAKE_NVML_PROCESSES", "none");
    let mut neighbour = place.command("session");
    neighbour
        .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", place.path("neighbour.cache"))
        .env("CUDA_DEVICE_MEMORY_LIMIT", "4g");
    let mut neighbour = Session::start(neighbour);
    neighbour.done("init");
    neighbour.done("primary 0");
    place.set("FAKE_CUDA_LATE", "cuDevicePrimaryCtxRetain:2000000");
    let mut session = place.session();
    session.done("init");
    session.tell("primary 0");
    // Once the card has given the context it has been looked at.
    while neighbour.ask("given 0")[2] < 128 * MIB {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    neighbour.done("alloc a 943718400");
    assert_eq!(
        session.hear(),
        Some(vec![sessions::OUT_OF_MEMORY]),
        "it is not seen by the card's figure alone"
    );
    for _ in 0..3 {
        session.done("primary 0");
        assert_eq!(session.agree("the next one"), 64 * MIB);
        session.done("reset-primary 0");
    }
    session.end();
    neighbour.end();
}

/// The command in a pid namespace of its own.
fn in_a_pid_namespace(command: &Command) -> Command {
    let mut inside = Command::new("unshare");
    inside.env_clear().args(["--pid", "--fork", "--kill-child"]).arg(command.get_program());
    inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    inside
}

/// Two containers, in each of which the process is the first.
#[test]
#[ignore = "needs the built library"]
fn two_first_processes_of_containers_are_each_charged_their_own() {
    let place = place("own");
    let start = |usage: &str| {
        let mut command = place.command("session");
        command.env("CUDA_DEVICE_MEMORY_SHARED_CACHE", place.path(usage));
        let mut session = Session::start(in_a_pid_namespace(&command));
        assert_eq!(session.ask("pid"), [0, 1]);
        session.done("init");
        session.done("primary 0");
        session
    };
    let mut neighbour = start("neighbour.cache");
    neighbour.done("churn 2");
    let mut session = start("usage.cache");
    assert_eq!(session.agree("the primary context"), 64 * MIB);
    none(&off(&mut session, 100, Session::used), "two of pid 1");
    session.end();
    rest(neighbour);
}

/// The driver lists processes by their pids on the host, and the agent says this one's when its first context is there
/// already.
#[test]
#[ignore = "needs the built library"]
fn a_host_pid_that_the_agent_tells_late_is_used() {
    let mut place = place("host");
    place.set("FAKE_CUDA_LOAD_US", "1000");
    let mut session = place.ready();
    let pid = u32::try_from(session.ask("pid")[1]).unwrap();
    // Behind the pid as the container counts.
    let at = mullion_region::usage::slot_offset(0).unwrap() + 4;
    sessions::write_at(&place.usage(), &((1_u32 << 22) + pid).to_le_bytes(), at);
    let neighbour = place.busy("neighbour.cache");
    none(&off(&mut session, 20, Session::used), "told late");
    rest(neighbour);
    session.end();
}
