//! The node's report: what the agent knows as `GPUNode.status`, written only when it changed.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use mullion_audit::{CardSeen, Entry, Event as AuditEvent};
use mullion_crds::gpunode::{Card, GPUNode, GPUNodeSpec, GPUNodeStatus, HealthState, Summary};
use mullion_crds::names::AGENT_MANAGER;
use tokio::sync::Mutex;
use tracing::{debug, info, warn};

use crate::audit::Audit;
use crate::error::Error;
use crate::health::Known;
use crate::metrics::Metrics;
use crate::state::{Key, State};
use crate::world::{Driver, Shared, World};

/// Changes that come together are written together.
const SETTLE: Duration = Duration::from_millis(300);
/// How often at most the sums for the printer columns are written when nothing else changed: they follow every pod.
const SUMMARY_PAUSE: Duration = Duration::from_secs(10);
/// Longest pause after a failed write.
const SLOWEST: Duration = Duration::from_secs(30);

/// The report, as of `now`. Its number is the last one written: who writes it, raises it.
#[must_use]
pub fn describe(world: &World, now: Timestamp) -> GPUNodeStatus {
    let listed = |k: &&Known| k.present || world.holds_card(&k.card.uuid);
    let mut cards: Vec<Card> =
        world.cards.iter().flat_map(|c| c.values()).filter(listed).map(Known::reported).collect();
    cards.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
    let before = world.gpunode.as_ref().and_then(|n| n.status.as_ref());
    let before = before.map(|s| s.conditions.as_slice()).unwrap_or_default();
    let driver_version = match &world.driver {
        Driver::Ready { version } => Some(version.clone()),
        // Kept from the last report until the driver was asked.
        Driver::Unknown => world.gpunode.as_ref().and_then(|n| n.status.as_ref()?.driver_version.clone()),
        Driver::Down { .. } => None,
    };
    GPUNodeStatus {
        node_uid: world.node_uid.clone(),
        observation: world.observation,
        boot_id: world.boot_id.clone(),
        driver_version,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        closed: world.closed,
        summary: Some(summary(world, &cards)),
        cards,
        mig_tables: world.mig_tables.values().cloned().collect(),
        conditions: conditions(world).into_iter().map(|c| dated(c, before, now)).collect(),
    }
}

struct Sign {
    kind: &'static str,
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn conditions(world: &World) -> Vec<Sign> {
    let sign =
        |kind, status, reason, message: &str| Sign { kind, status, reason, message: message.to_owned() };
    let driver = match &world.driver {
        Driver::Ready { version } => {
            sign("DriverReady", "True", "DriverAnswers", &format!("driver {version}"))
        }
        // The state file of this boot speaks for it until it was asked.
        Driver::Unknown if world.cards.is_some() => sign(
            "DriverReady",
            "True",
            "DriverAnswered",
            "the driver answered before the agent was restarted",
        ),
        Driver::Unknown => sign("DriverReady", "Unknown", "NotAsked", "the driver has not been asked yet"),
        Driver::Down { reason, .. } => sign("DriverReady", "False", "DriverSilent", reason),
    };
    let plugin = if world.signs.registered {
        sign("PluginRegistered", "True", "KubeletWatches", "the kubelet watches the slots")
    } else {
        sign(
            "PluginRegistered",
            "False",
            "KubeletAway",
            "the kubelet has not taken the registration, or its stream ended",
        )
    };
    let cdi = match &world.signs.cdi {
        Some(Ok(files)) => sign("CDISpecFound", "True", "Found", files),
        Some(Err(problem)) => sign("CDISpecFound", "False", "CdiSpecMissing", problem),
        None => sign("CDISpecFound", "Unknown", "NotLooked", "not looked for yet"),
    };
    let library = match &world.signs.library {
        Some(Ok(library)) => sign("LibraryFound", "True", "Found", library),
        Some(Err((code, problem, true))) => sign("LibraryFound", "False", code, problem),
        // Not False, which closes the node: containers start, without limits, as the admin wants it.
        Some(Err((_, problem, false))) => sign("LibraryFound", "Unknown", "ReportOnly", problem),
        None => sign("LibraryFound", "Unknown", "NotLooked", "not looked for yet"),
    };
    let topology = match world.signs.topology.as_deref() {
        None => sign(
            "TopologyAligned",
            "Unknown",
            "PolicyUnknown",
            "the kubelet's configuration file cannot be read",
        ),
        Some(policy @ ("restricted" | "single-numa-node")) => sign(
            "TopologyAligned",
            "False",
            "PolicyStrict",
            &format!(
                "topologyManagerPolicy is {policy}, but a slot belongs to no card and so to no NUMA node: CPUs and memory \
                 are not aligned with the cards"
            ),
        ),
        Some(policy) => {
            sign("TopologyAligned", "True", "PolicyLenient", &format!("topologyManagerPolicy is {policy}"))
        }
    };
    let rivals = if world.signs.rivals.is_empty() {
        sign("ResourceConflict", "False", "Alone", "no other plugin's socket for nvidia.com/gpu was seen")
    } else {
        sign(
            "ResourceConflict",
            "True",
            "OtherPlugin",
            &format!(
                "another device plugin may offer nvidia.com/gpu: {}; remove it",
                world.signs.rivals.join(", ")
            ),
        )
    };
    let cgroups = match &world.signs.cgroups {
        Some(Ok(place)) => {
            sign("PodCgroupsSeen", "True", "Found", &format!("pods' cgroups are below {place}"))
        }
        Some(Err((code, problem))) => sign("PodCgroupsSeen", "False", code, problem),
        None => sign("PodCgroupsSeen", "Unknown", "NotLooked", "not looked for yet"),
    };
    let audit = match &world.signs.audit {
        Some(Ok(())) => sign("AuditWritable", "True", "TakesRows", "the audit log takes rows"),
        Some(Err((code, problem))) => {
            sign("AuditWritable", "False", code, &format!("no new GPU container starts here: {problem}"))
        }
        None => sign("AuditWritable", "Unknown", "NotTried", "the audit log has not been opened yet"),
    };
    vec![audit, cdi, driver, library, plugin, cgroups, rivals, topology]
}

fn dated(sign: Sign, before: &[Condition], now: Timestamp) -> Condition {
    let same = before.iter().find(|c| c.type_ == sign.kind && c.status == sign.status);
    Condition {
        type_: sign.kind.to_owned(),
        status: sign.status.to_owned(),
        reason: sign.reason.to_owned(),
        message: sign.message,
        last_transition_time: same.map_or(Time(now), |c| c.last_transition_time.clone()),
        observed_generation: None,
    }
}

fn summary(world: &World, cards: &[Card]) -> Summary {
    let healthy = cards.iter().filter(|c| c.health.state == HealthState::Healthy).count();
    let usage = world.ledger.card_usage(&world.node);
    let gib = |mib: u64| mib / 1024;
    let total: u64 = usage.iter().map(|u| u.card.memory.0).sum();
    let free: u64 = usage.iter().filter(|u| u.card.healthy).map(|u| u.free.memory.0).sum();
    let mig = cards.iter().filter(|c| c.mig.as_ref().is_some_and(|m| m.current)).count();
    let ill: Vec<&Card> = cards.iter().filter(|c| c.health.state == HealthState::Unhealthy).collect();
    let health = match ill.as_slice() {
        _ if matches!(world.driver, Driver::Down { .. }) => "driver down".to_owned(),
        [] => "Healthy".to_owned(),
        [first, ..] => {
            let xid = first.health.xid.map(|x| format!(" (XID {x})")).unwrap_or_default();
            format!("{} unhealthy{xid}", ill.len())
        }
    };
    Summary {
        gpus: format!("{healthy}/{}", cards.len()),
        free_memory: format!("{}Gi/{}Gi", gib(free), gib(total)),
        layout: "-".to_owned(),
        mig: if mig == 0 { "off".to_owned() } else { format!("{mig}/{} on", cards.len()) },
        health,
    }
}

/// What a new report differs in from the one that the API server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Nothing.
    None,
    /// The sums alone.
    Summary,
    /// Facts.
    Facts,
}

/// Compares reports. Number and times of conditions follow from the rest.
#[must_use]
pub fn difference(old: Option<&GPUNodeStatus>, new: &GPUNodeStatus) -> Difference {
    let Some(old) = old else { return Difference::Facts };
    let plain = |s: &GPUNodeStatus| {
        let mut s = GPUNodeStatus { observation: 0, summary: None, ..s.clone() };
        for condition in &mut s.conditions {
            condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
        }
        s.conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
        s
    };
    if plain(old) != plain(new) {
        Difference::Facts
    } else if old.summary == new.summary {
        Difference::None
    } else {
        Difference::Summary
    }
}

/// Writes the report.
#[derive(Clone)]
pub struct Publisher {
    /// The API server.
    pub client: Client,
    /// The world.
    pub shared: Arc<Shared>,
    /// The state file.
    pub state: State,
    /// The audit log.
    pub audit: Audit,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// One write at a time; and the number of the last inventory that this run knows to be in the audit log.
    pub turn: Arc<Mutex<i64>>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").finish_non_exhaustive()
    }
}

impl Publisher {
    /// Writes on change until dropped.
    pub async fn run(self) {
        let mut bell = self.shared.bell();
        let mut pause = SETTLE;
        let mut summarised = tokio::time::Instant::now();
        loop {
            tokio::time::sleep(SETTLE).await;
            bell.borrow_and_update();
            match self.pending() {
                Difference::None => {
                    self.catch_up().await;
                    if bell.changed().await.is_err() {
                        return;
                    }
                    continue;
                }
                Difference::Summary if summarised.elapsed() < SUMMARY_PAUSE => {
                    let left = SUMMARY_PAUSE.saturating_sub(summarised.elapsed());
                    // Facts that come meanwhile do not wait for the sums.
                    let _ = tokio::time::timeout(left, bell.changed()).await;
                    continue;
                }
                Difference::Summary | Difference::Facts => {}
            }
            match self.publish().await {
                Ok(()) => {
                    pause = SETTLE;
                    summarised = tokio::time::Instant::now();
                }
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "report not written");
                    tokio::time::sleep(pause).await;
                    pause = pause.saturating_mul(2).min(SLOWEST);
                }
            }
        }
    }

    /// Whether something is to be written; nothing is until the node, its object and the driver are known.
    fn pending(&self) -> Difference {
        self.shared.read(|w| {
            let looked = w.signs.cdi.is_some() && w.signs.cgroups.is_some() && w.signs.audit.is_some();
            let ready = w.gpunode_known && !w.node_uid.is_empty() && looked;
            if !ready || w.driver == Driver::Unknown {
                return Difference::None;
            }
            let old = w.gpunode.as_ref().and_then(|n| n.status.as_ref());
            difference(old, &describe(w, Timestamp::UNIX_EPOCH))
        })
    }

    /// Writes the report if it differs from what the API server has.
    ///
    /// # Errors
    /// [`Error::Api`], [`Error::State`]; a write that met another one is tried again with what that one left.
    pub async fn publish(&self) -> Result<(), Error> {
        let mut audited = self.turn.lock().await;
        let name = self.shared.read(|w| w.node.0.clone());
        let api: Api<GPUNode> = Api::all(self.client.clone());
        let object = match self.shared.read(|w| w.gpunode.clone()) {
            Some(object) => object,
            None => self.create(&api, &name).await?,
        };
        let now = Timestamp::now();
        let (mut status, change) = self.shared.read(|w| {
            let status = describe(w, now);
            let change = difference(object.status.as_ref(), &status);
            (status, change)
        });
        if change == Difference::None {
            return Ok(());
        }
        let theirs = object.status.as_ref().map_or(0, |s| s.observation);
        let last = status.observation.max(theirs);
        status.observation = if change == Difference::Facts { last + 1 } else { last };
        // Kept first: a number is never used twice, not even by an agent that is killed here.
        self.state.put(Key::Observation, &status.observation).await?;
        let params = PostParams { field_manager: Some(AGENT_MANAGER.to_owned()), ..PostParams::default() };
        let new = GPUNode { status: Some(status.clone()), ..object };
        self.metrics.api_write("gpunodes/status");
        let written = match api.replace_status(&name, &params, &new).await {
            Ok(written) => written,
            Err(kube::Error::Api(answer)) if answer.is_conflict() || answer.is_not_found() => {
                let fresh = api.get_opt(&name).await.map_err(Error::api(format!("read GPUNode {name}")))?;
                self.shared.change(|w| w.gpunode = fresh);
                debug!(name, "report met another write");
                return Ok(());
            }
            Err(error) => return Err(Error::api(format!("write the status of GPUNode {name}"))(error)),
        };
        info!(observation = status.observation, cards = status.cards.len(), ?change, "report written");
        self.shared.change(|w| {
            w.observation = status.observation;
            w.gpunode = Some(written.clone());
            w.refold_node();
        });
        self.state.put(Key::GpuNode, &written).await?;
        self.audit_inventory(&written, &mut audited).await;
        Ok(())
    }

    /// Writes down what the API server has and the audit log may not: an agent can be killed between the two, and the
    /// report that says that the log takes no rows is one of which it has none.
    async fn catch_up(&self) {
        let mut audited = self.turn.lock().await;
        let object = self.shared.read(|w| w.gpunode.clone().filter(|_| w.gpunode_known));
        if let Some(object) = object {
            self.audit_inventory(&object, &mut audited).await;
        }
    }

    async fn create(&self, api: &Api<GPUNode>, name: &str) -> Result<GPUNode, Error> {
        let fresh = GPUNode::new(name, GPUNodeSpec::default());
        let params = PostParams { field_manager: Some(AGENT_MANAGER.to_owned()), ..PostParams::default() };
        self.metrics.api_write("gpunodes");
        match api.create(&params, &fresh).await {
            Ok(object) => Ok(object),
            Err(kube::Error::Api(answer)) if answer.is_already_exists() => {
                api.get(name).await.map_err(Error::api(format!("read GPUNode {name}")))
            }
            Err(error) => Err(Error::api(format!("create GPUNode {name}"))(error)),
        }
    }

    /// Each inventory once, also over restarts; later where the log takes no rows or is not open yet.
    async fn audit_inventory(&self, object: &GPUNode, audited: &mut i64) {
        if self.shared.read(|w| w.signs.audit != Some(Ok(()))) {
            return;
        }
        let Some(status) = object.status.as_ref().filter(|status| status.observation > *audited) else {
            return;
        };
        let card = |c: &Card| CardSeen {
            uuid: c.uuid.clone(),
            model: c.model.clone(),
            memory_mib: u64::try_from(c.memory_mib).unwrap_or(0),
        };
        let event = AuditEvent::InventoryChanged {
            observation: u64::try_from(status.observation).unwrap_or(0),
            driver_version: status.driver_version.clone(),
            cards: status.cards.iter().map(card).collect(),
        };
        // Numbers begin anew with another object.
        let uid = object.metadata.uid.as_deref().unwrap_or_default();
        let key = format!("inventory/{uid}/{}", status.observation);
        match self.audit.append(Entry::from(event).keyed(key)).await {
            Ok(()) => *audited = status.observation,
            Err(error) => {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "inventory not audited");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::{CardHealth, Illness};
    use std::collections::BTreeMap;

    fn world() -> World {
        let card = |index: u32, uuid: &str| Known {
            card: Card {
                uuid: uuid.to_owned(),
                index,
                memory_mib: 81_920,
                model: "H100".to_owned(),
                ..Card::default()
            },
            present: true,
            health: CardHealth::default(),
            replaced_by: None,
        };
        let mut world = World {
            node: "n".into(),
            node_uid: "node-uid".to_owned(),
            boot_id: "boot".to_owned(),
            cards: Some(BTreeMap::from([("B".to_owned(), card(0, "B")), ("A".to_owned(), card(1, "A"))])),
            driver: Driver::Ready { version: "570".to_owned() },
            ..World::default()
        };
        world.signs.cdi = Some(Ok("/etc/cdi/nvidia.yaml".to_owned()));
        world.refold_node();
        world
    }

    fn status(world: &World) -> GPUNodeStatus {
        describe(world, Timestamp::UNIX_EPOCH)
    }

    fn condition(status: &GPUNodeStatus, kind: &str) -> (String, String) {
        let found = status.conditions.iter().find(|c| c.type_ == kind).unwrap();
        (found.status.clone(), found.reason.clone())
    }

    #[test]
    fn the_report_says_what_is_known() {
        let mut world = world();
        let seen = status(&world);
        assert_eq!(seen.cards.iter().map(|c| c.uuid.as_str()).collect::<Vec<_>>(), ["B", "A"], "by index");
        let summary = seen.summary.clone().unwrap();
        assert_eq!(
            (
                summary.gpus.as_str(),
                summary.free_memory.as_str(),
                summary.mig.as_str(),
                summary.health.as_str()
            ),
            ("2/2", "160Gi/160Gi", "off", "Healthy")
        );
        for (kind, want) in [
            ("DriverReady", "True"),
            ("PluginRegistered", "False"),
            ("CDISpecFound", "True"),
            ("TopologyAligned", "Unknown"),
            ("ResourceConflict", "False"),
            ("PodCgroupsSeen", "Unknown"),
            ("AuditWritable", "Unknown"),
            ("LibraryFound", "Unknown"),
        ] {
            assert_eq!(condition(&seen, kind).0, want, "{kind}");
        }
        world.signs.cgroups = Some(Err(("CgroupUnseen", "no kubelet".to_owned())));
        world.signs.audit = Some(Err(("AuditDiskFull", "no space".to_owned())));
        world.signs.library = Some(Err(("HookMissing", "no file".to_owned(), false)));
        assert_eq!(
            condition(&status(&world), "LibraryFound"),
            ("Unknown".to_owned(), "ReportOnly".to_owned())
        );
        world.signs.library = Some(Err(("HookMissing", "no file".to_owned(), true)));
        let seen = status(&world);
        assert_eq!(condition(&seen, "LibraryFound"), ("False".to_owned(), "HookMissing".to_owned()));
        assert_eq!(condition(&seen, "PodCgroupsSeen"), ("False".to_owned(), "CgroupUnseen".to_owned()));
        assert_eq!(condition(&seen, "AuditWritable"), ("False".to_owned(), "AuditDiskFull".to_owned()));
        let illness = Illness { xid: Some(79), message: "XID 79".to_owned() };
        let health = &mut world.cards.as_mut().unwrap().get_mut("A").unwrap().health;
        (health.illness, health.last_xid) = (Some(illness), Some(79));
        world.signs.topology = Some("single-numa-node".to_owned());
        world.signs.rivals = vec!["nvidia-gpu.sock".to_owned()];
        world.signs.registered = true;
        world.refold_node();
        let seen = status(&world);
        assert_eq!(seen.summary.clone().unwrap().health, "1 unhealthy (XID 79)");
        assert_eq!(seen.summary.clone().unwrap().free_memory, "80Gi/160Gi");
        assert_eq!(condition(&seen, "TopologyAligned"), ("False".to_owned(), "PolicyStrict".to_owned()));
        assert_eq!(condition(&seen, "ResourceConflict"), ("True".to_owned(), "OtherPlugin".to_owned()));
        assert_eq!(condition(&seen, "PluginRegistered").0, "True");
        world.driver = Driver::Down { code: "X", reason: "no library".to_owned() };
        let seen = status(&world);
        assert_eq!((condition(&seen, "DriverReady").0.as_str(), seen.driver_version), ("False", None));
        assert_eq!(seen.cards.len(), 2, "cards of a silent driver stay");
    }

    /// What the API server gives back is what was written, or every look would end in a write.
    #[test]
    fn a_report_survives_the_api_server() {
        let mut world = world();
        let health = &mut world.cards.as_mut().unwrap().get_mut("A").unwrap().health;
        health.illness = Some(Illness { xid: Some(79), message: "XID 79".to_owned() });
        health.since = Some(Timestamp::new(1_800_000_000, 123_456_789).unwrap());
        let written = status(&world);
        let mut text = serde_json::to_value(&written).unwrap();
        let since = text["cards"][1]["health"]["since"].as_str().unwrap().to_owned();
        let seconds = since.parse::<Timestamp>().unwrap().as_second();
        // metav1.Time prints whole seconds.
        text["cards"][1]["health"]["since"] = Timestamp::from_second(seconds).unwrap().to_string().into();
        let read: GPUNodeStatus = serde_json::from_value(text).unwrap();
        assert_eq!(difference(Some(&read), &written), Difference::None);
    }

    #[test]
    fn only_facts_raise_the_number_and_nothing_is_written_for_nothing() {
        let mut world = world();
        let old = status(&world);
        world.gpunode = Some(GPUNode { status: Some(old.clone()), ..GPUNode::default() });
        let later = describe(&world, Timestamp::now());
        assert_eq!(difference(Some(&old), &later), Difference::None, "time alone is nothing");
        assert_eq!(later.conditions, old.conditions, "times of conditions that hold are kept");
        let mut sums = old.clone();
        sums.summary.as_mut().unwrap().free_memory = "1Gi/160Gi".to_owned();
        assert_eq!(difference(Some(&old), &sums), Difference::Summary);
        let mut number = old.clone();
        number.observation = 9;
        assert_eq!(difference(Some(&old), &number), Difference::None);
        world.closed = true;
        assert_eq!(difference(Some(&old), &status(&world)), Difference::Facts);
        assert_eq!(difference(None, &old), Difference::Facts);
    }
}
