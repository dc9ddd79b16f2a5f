//! The commands that disturb a node: `lab fake NODE VERB …`.

use crate::state::named_uuid;
use crate::{Card, Error, InjectedError, NodeState, Process, Store, calls};

/// Every verb. CARD is an index or a uuid, CALL an entry point such as `nvmlDeviceGetUUID` or `*`.
pub const USAGE: &str = "xid CARD CODE [GI CI] | remove CARD | restore CARD | lost CARD | unlist CARD | replace CARD | reset CARD | \
     error CALL NVML_CODE N | latency CALL MS | process CARD PID MIB [SM%] [GI] | show";

/// XID of a card that has fallen off the bus.
const XID_OFF_THE_BUS: u64 = 79;

/// Highest `nvmlReturn_t`, `NVML_ERROR_UNKNOWN`.
const NVML_ERROR_UNKNOWN: u32 = 999;

/// The longest latency that can be injected: ten minutes.
const MAX_LATENCY_MS: u64 = 600_000;

/// Applies one verb with its arguments and tells what it did.
///
/// - `remove` lets the card fall off the bus: XID 79, then every call about it answers `GPU_IS_LOST`;
///   it stays in the list. `lost` does the same without an XID.
/// - `unlist` takes it out of the list, as after a reboot without it.
/// - `replace` puts another card of the same model into its place: a new uuid, empty and well.
/// - `restore` undoes `remove`, `lost` and `unlist`; a pending MIG mode becomes active.
/// - `reset` is a GPU reset: instances vanish, a pending MIG mode becomes active; refused with processes.
/// - `error … 0` and `latency … 0` end an injection, `process … 0` ends the process.
/// - `show` prints the state as JSON, calls counted.
///
/// # Errors
/// [`Error::UnknownVerb`], [`Error::BadArgument`] or [`Error::UnknownCard`] for what was given,
/// [`Error::CardBusy`] for a reset, and what [`Store::update`] gives.
pub fn apply(store: &Store, args: &[String]) -> Result<String, Error> {
    let (verb, rest) = args.split_first().map_or(("", [].as_slice()), |(v, rest)| (v.as_str(), rest));
    let args = |verb, usage| Args { verb, usage, rest };
    match verb {
        "xid" => xid(store, &args("xid", "xid CARD CODE [GI CI]")),
        "remove" => remove(store, &args("remove", "remove CARD"), true),
        "lost" => remove(store, &args("lost", "lost CARD"), false),
        "unlist" => unlist(store, &args("unlist", "unlist CARD")),
        "replace" => replace(store, &args("replace", "replace CARD")),
        "restore" => restore(store, &args("restore", "restore CARD")),
        "reset" => reset(store, &args("reset", "reset CARD")),
        "error" => error(store, &args("error", "error CALL NVML_CODE N")),
        "latency" => latency(store, &args("latency", "latency CALL MS")),
        "process" => process(store, &args("process", "process CARD PID MIB [SM%] [GI]")),
        "show" => {
            args("show", "show").between(0, 0)?;
            let state = store.read_with_calls()?;
            serde_json::to_string_pretty(&state)
                .map_err(|source| Error::Print { node: state.node.clone(), source })
        }
        _ => Err(Error::UnknownVerb { verb: verb.to_owned(), usage: USAGE }),
    }
}

struct Args<'a> {
    verb: &'static str,
    usage: &'static str,
    rest: &'a [String],
}

impl Args<'_> {
    fn bad(&self, what: &'static str, value: &str, hint: impl Into<String>) -> Error {
        let (verb, usage) = (self.verb, self.usage);
        Error::BadArgument { verb, what, value: value.to_owned(), hint: hint.into(), usage }
    }

    fn between(&self, least: usize, most: usize) -> Result<(), Error> {
        if self.rest.len() < least {
            return Err(self.bad("argument", "", format!("{least} are needed, {} given", self.rest.len())));
        }
        match self.rest.get(most) {
            Some(surplus) => Err(self.bad("argument", surplus, format!("at most {most} are taken"))),
            None => Ok(()),
        }
    }

    fn text(&self, place: usize) -> &str {
        self.rest.get(place).map_or("", String::as_str)
    }

    /// A plain decimal number in `least..=most`; no sign, no blanks.
    fn number(&self, place: usize, what: &'static str, least: u64, most: u64) -> Result<u64, Error> {
        let text = self.text(place);
        let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let number = plain.then(|| text.parse::<u64>().ok()).flatten();
        number
            .filter(|n| (least..=most).contains(n))
            .ok_or_else(|| self.bad(what, text, format!("give a whole number from {least} to {most}")))
    }

    fn small(&self, place: usize, what: &'static str, least: u32, most: u32) -> Result<u32, Error> {
        let number = self.number(place, what, least.into(), most.into())?;
        u32::try_from(number).map_err(|_| self.bad(what, self.text(place), "give a smaller number"))
    }

    fn call(&self) -> Result<&str, Error> {
        let name = self.text(0);
        let known = name == "*" || calls::index_of(name).is_some();
        known.then_some(name).ok_or_else(|| {
            self.bad("call", name, "give * or an entry point with its version, as in nvmlDeviceGetCount_v2")
        })
    }

    /// The card of the first argument, by index or uuid.
    fn card<'s>(&self, state: &'s mut NodeState) -> Result<&'s mut Card, Error> {
        let wanted = self.text(0);
        let plain = wanted.bytes().all(|b| b.is_ascii_digit());
        let place =
            state.cards.iter().position(|c| c.uuid == wanted || (plain && wanted.parse() == Ok(c.index)));
        let known: Vec<_> = state.cards.iter().map(|c| format!("{}={}", c.index, c.uuid)).collect();
        let unknown =
            Error::UnknownCard { node: state.node.clone(), card: wanted.to_owned(), known: known.join(", ") };
        place.and_then(|p| state.cards.get_mut(p)).ok_or(unknown)
    }
}

fn xid(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(2, 4)?;
    if args.rest.len() == 3 {
        return Err(args.bad("CI", "", "a GPU instance needs its compute instance"));
    }
    let code = args.number(1, "CODE", 1, 999)?;
    let instance = match args.rest.len() {
        4 => Some((args.small(2, "GI", 0, 14)?, args.small(3, "CI", 0, 7)?)),
        _ => None,
    };
    store.update(|state| {
        let uuid = args.card(state)?.uuid.clone();
        state.push_xid(&uuid, code, instance);
        Ok(format!("{uuid}: XID {code} queued"))
    })
}

fn remove(store: &Store, args: &Args<'_>, with_xid: bool) -> Result<String, Error> {
    args.between(1, 1)?;
    store.update(|state| {
        let card = args.card(state)?;
        let already = std::mem::replace(&mut card.lost, true);
        let uuid = card.uuid.clone();
        if with_xid && !already {
            state.push_xid(&uuid, XID_OFF_THE_BUS, None);
        }
        Ok(format!("{uuid}: lost"))
    })
}

fn unlist(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(1, 1)?;
    store.update(|state| {
        let card = args.card(state)?;
        card.present = false;
        Ok(format!("{}: not in the list", card.uuid))
    })
}

fn replace(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(1, 1)?;
    store.update(|state| {
        let card = args.card(state)?;
        let old = card.uuid.clone();
        let new = format!("GPU-{}", named_uuid(&format!("after.{old}")));
        card.reset();
        card.uuid.clone_from(&new);
        card.processes.clear();
        (card.lost, card.present) = (false, true);
        for link in state.cards.iter_mut().flat_map(|c| &mut c.links).filter(|l| l.peer == old) {
            link.peer.clone_from(&new);
        }
        Ok(format!("{old}: replaced by {new}"))
    })
}

fn restore(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(1, 1)?;
    store.update(|state| {
        let card = args.card(state)?;
        (card.lost, card.present) = (false, true);
        card.activate_mode();
        Ok(format!("{}: restored", card.uuid))
    })
}

fn reset(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(1, 1)?;
    store.update(|state| {
        let card = args.card(state)?;
        if !card.processes.is_empty() {
            let pids = card.processes.iter().map(|p| p.pid).collect();
            return Err(Error::CardBusy { card: card.uuid.clone(), pids });
        }
        card.reset();
        Ok(format!("{}: reset", card.uuid))
    })
}

fn error(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(3, 3)?;
    let call = args.call()?;
    let code = args.small(1, "NVML_CODE", 1, NVML_ERROR_UNKNOWN)?;
    let remaining = args.number(2, "N", 0, u64::MAX)?;
    store.update(|state| {
        if remaining == 0 {
            state.errors.remove(call);
        } else {
            state.errors.insert(call.to_owned(), InjectedError { code, remaining });
        }
        Ok(format!("{call}: error {code} for the next {remaining} calls"))
    })
}

fn latency(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(2, 2)?;
    let call = args.call()?;
    let ms = args.number(1, "MS", 0, MAX_LATENCY_MS)?;
    store.update(|state| {
        if ms == 0 {
            state.latencies.remove(call);
        } else {
            state.latencies.insert(call.to_owned(), ms);
        }
        Ok(format!("{call}: {ms} ms a call"))
    })
}

fn process(store: &Store, args: &Args<'_>) -> Result<String, Error> {
    args.between(3, 5)?;
    let pid = args.small(1, "PID", 1, u32::MAX)?;
    let memory_mib = args.number(2, "MIB", 0, u64::from(u32::MAX))?;
    let sm_percent = if args.rest.len() > 3 { args.small(3, "SM%", 0, 100)? } else { 0 };
    let gpu_instance = if args.rest.len() > 4 { Some(args.small(4, "GI", 0, 14)?) } else { None };
    store.update(|state| {
        let card = args.card(state)?;
        if let Some(gi) = gpu_instance
            && card.gpu_instance(gi).is_none()
        {
            let live: Vec<_> = card.mig.instances.iter().map(|g| g.id).collect();
            return Err(args.bad(
                "GI",
                args.text(4),
                format!("{} has the GPU instances {live:?}", card.uuid),
            ));
        }
        card.processes.retain(|p| p.pid != pid);
        if memory_mib > 0 {
            card.processes.push(Process { pid, memory_mib, sm_percent, gpu_instance });
        }
        Ok(format!("{}: process {pid} with {memory_mib} MiB and {sm_percent} % SM", card.uuid))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile;

    fn node(profile: &str) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let state = profile::node(profile, "node-a").unwrap();
        let store = Store::create(folder.path().join("node-a.json"), &state).unwrap();
        (folder, store)
    }

    fn run(store: &Store, line: &str) -> Result<String, Error> {
        apply(store, &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_replaced_card_is_another_one_in_the_same_place() {
        let (_folder, store) = node("h100x2");
        let before = store.read().unwrap();
        run(&store, "process 0 12 500").unwrap();
        run(&store, "remove 0").unwrap();
        run(&store, "replace 0").unwrap();
        let after = store.read().unwrap();
        assert_ne!(after.cards[0].uuid, before.cards[0].uuid);
        assert!(after.cards[0].processes.is_empty() && !after.cards[0].lost);
        assert_eq!(after.cards[0].pci, before.cards[0].pci);
        assert!(after.cards[1].links.iter().any(|l| l.peer == after.cards[0].uuid));
        assert!(!after.cards[1].links.iter().any(|l| l.peer == before.cards[0].uuid));
    }

    #[test]
    fn malformed_commands_are_refused_with_value_and_usage() {
        let (_folder, store) = node("h100x2");
        let before = store.read().unwrap();
        for (line, code, fragment) in [
            ("", "UnknownVerb", "usage: xid CARD"),
            ("explode 0", "UnknownVerb", "\"explode\""),
            ("xid 0", "BadArgument", "2 are needed, 1 given"),
            ("xid 0 -5", "BadArgument", "\"-5\""),
            ("xid 0 0", "BadArgument", "\"0\""),
            ("xid 0 79 1", "BadArgument", "needs its compute instance"),
            ("xid 0 +79", "BadArgument", "\"+79\""),
            ("xid 7 79", "UnknownCard", "0=GPU-"),
            ("xid GPU-none 79", "UnknownCard", "\"GPU-none\""),
            ("remove 0 1", "BadArgument", "at most 1"),
            ("error nvmlDeviceGetNothing 3 1", "BadArgument", "\"nvmlDeviceGetNothing\""),
            ("error nvmlDeviceGetUUID 1000 1", "BadArgument", "from 1 to 999"),
            ("error nvmlDeviceGetUUID 0 1", "BadArgument", "from 1 to 999"),
            ("latency nvmlDeviceGetUUID 1e3", "BadArgument", "\"1e3\""),
            ("latency nvmlDeviceGetUUID 600001", "BadArgument", "to 600000"),
            ("process 0 12 99999999999999999999", "BadArgument", "MIB"),
            ("process 0 0 5", "BadArgument", "PID"),
            ("process 0 12 5 101", "BadArgument", "SM%"),
            ("process 0 12 5 10 3", "BadArgument", "GPU instances []"),
            ("show me", "BadArgument", "\"me\""),
        ] {
            let error = run(&store, line).unwrap_err();
            assert_eq!(error.code(), code, "{line}");
            assert!(error.to_string().contains(fragment), "{line}: {error}");
        }
        assert_eq!(store.read().unwrap(), before);
    }

    #[test]
    fn a_removed_card_stays_listed_says_xid_79_once_and_comes_back() {
        let (_folder, store) = node("h100x2");
        let uuid = store.read().unwrap().cards[1].uuid.clone();
        run(&store, &format!("remove {uuid}")).unwrap();
        run(&store, "remove 1").unwrap();
        let state = store.read().unwrap();
        assert!(state.cards[1].lost && state.cards[1].present && !state.cards[0].lost);
        let events: Vec<_> = state.events.iter().map(|e| (e.sequence, e.card.as_str(), e.data)).collect();
        assert_eq!(events, [(1, uuid.as_str(), 79)]);
        run(&store, "restore 1").unwrap();
        run(&store, "lost 0").unwrap();
        run(&store, "unlist 1").unwrap();
        let state = store.read().unwrap();
        assert!(!state.cards[1].lost && state.cards[0].lost);
        assert_eq!((state.events.len(), state.listed().count()), (1, 1));
    }

    #[test]
    fn injected_errors_count_down_and_end() {
        let (_folder, store) = node("a30");
        run(&store, "error nvmlDeviceGetUUID 15 2").unwrap();
        run(&store, "latency * 5").unwrap();
        let mut state = store.read().unwrap();
        let codes: Vec<_> = (0..3).map(|_| state.take_error("nvmlDeviceGetUUID")).collect();
        assert_eq!(codes, [Some(15), Some(15), None]);
        assert_eq!(state.take_error("nvmlDeviceGetName"), None);
        assert_eq!(state.latency_ms("nvmlInit_v2"), 5);
        run(&store, "error nvmlDeviceGetUUID 15 0").unwrap();
        run(&store, "latency * 0").unwrap();
        let state = store.read().unwrap();
        assert!(state.errors.is_empty() && state.latencies.is_empty());
    }

    #[test]
    fn processes_come_and_go_and_hold_off_a_reset() {
        let (_folder, store) = node("a100");
        run(&store, "process 0 4242 3000 30").unwrap();
        run(&store, "process 0 4242 3500 40").unwrap();
        run(&store, "process 0 4243 100").unwrap();
        let card = store.read().unwrap().cards[0].clone();
        assert_eq!((card.used_mib(), card.utilization(), card.processes.len()), (3600, 40, 2));
        assert_eq!(run(&store, "reset 0").unwrap_err().code(), "CardBusy");
        run(&store, "process 0 4242 0").unwrap();
        run(&store, "process 0 4243 0").unwrap();
        run(&store, "reset 0").unwrap();
        let shown: NodeState = serde_json::from_str(&run(&store, "show").unwrap()).unwrap();
        assert_eq!(shown, store.read().unwrap());
    }
}
