//! Watches into facts.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Config, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Client, Resource};
use mullion_crds::{GPUNode, VGPUAllocation, names};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Change, Source, Store};
use crate::guard::Guard;
use crate::metrics::{KindLabels, Metrics};

/// Starts every watch; they run until `stop`.
pub fn run(
    client: &Client,
    store: &Arc<Store>,
    metrics: &Metrics,
    stop: &CancellationToken,
    tasks: &mut JoinSet<()>,
) {
    let scheduler = names::SCHEDULER;
    let ours = Config::default().fields(&format!("spec.schedulerName={scheduler}"));
    let strangers =
        Config::default().fields(&format!("spec.schedulerName!={scheduler},status.phase=Pending"));
    let start = Start { client, store, metrics, stop };
    start.watch::<VGPUAllocation>(tasks, Source::Allocations, Config::default(), uid_of, fold_allocation);
    start.watch::<GPUNode>(
        tasks,
        Source::GpuNodes,
        Config::default(),
        name_of,
        |facts, change| match change {
            Change::Seen(object) => facts.gpu_node_seen(*object),
            Change::Gone(name, _) => facts.gpu_node_gone(&name),
            Change::Listing | Change::Unreadable { .. } => {}
            Change::Listed(names) => facts.gpu_nodes_listed(&names),
        },
    );
    start.watch::<Node>(tasks, Source::Nodes, Config::default(), name_of, |facts, change| match change {
        Change::Seen(object) => facts.node_seen(&object),
        Change::Gone(name, _) => facts.node_gone(&name),
        Change::Listing | Change::Unreadable { .. } => {}
        Change::Listed(names) => facts.nodes_listed(&names),
    });
    start.watch::<Pod>(tasks, Source::Pods, ours, uid_of, |facts, change| match change {
        Change::Seen(object) => facts.pod_seen(&object),
        Change::Gone(uid, last) => facts.pod_gone(uid, last.as_deref()),
        Change::Listing | Change::Unreadable { .. } => {}
        Change::Listed(uids) => facts.pods_listed(&uids),
    });
    start.watch::<Pod>(tasks, Source::Strangers, strangers, uid_of, |facts, change| match change {
        Change::Seen(object) => facts.stranger_seen(&object),
        Change::Gone(uid, _) => facts.stranger_gone(&uid),
        Change::Listing | Change::Unreadable { .. } => {}
        Change::Listed(uids) => facts.strangers_listed(&uids),
    });
}

fn fold_allocation(facts: &mut super::Facts, change: Change<VGPUAllocation>) {
    match change {
        Change::Seen(object) => facts.allocation_seen(*object),
        Change::Gone(uid, _) => facts.allocation_gone(&uid.into()),
        Change::Unreadable { uid, node } => facts.allocation_unreadable(uid, node),
        Change::Listing => facts.allocations_listing(),
        Change::Listed(uids) => facts.allocations_listed(&uids),
    }
}

/// Pauses between tries to resume a watch: doubled up to a few seconds, so that an API server that comes back after
/// minutes is seen at once. There are few controllers; they do not crowd it.
#[derive(Debug, Default)]
pub(crate) struct Resume {
    last: Option<Duration>,
}

/// First pause.
const FIRST: Duration = Duration::from_millis(200);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(5);

impl Iterator for Resume {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let next = self.last.map_or(FIRST, |last| (last * 2).min(LONGEST));
        self.last = Some(next);
        self.last
    }
}

impl Backoff for Resume {
    fn reset(&mut self) {
        self.last = None;
    }
}

fn uid_of<K: Resource>(object: &K) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

fn name_of<K: Resource>(object: &K) -> String {
    object.meta().name.clone().unwrap_or_default()
}

struct Start<'a> {
    client: &'a Client,
    store: &'a Arc<Store>,
    metrics: &'a Metrics,
    stop: &'a CancellationToken,
}

impl Start<'_> {
    fn watch<K>(
        &self,
        tasks: &mut JoinSet<()>,
        source: Source,
        config: Config,
        key: fn(&Guard<K>) -> String,
        fold: fn(&mut super::Facts, Change<K>),
    ) where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    {
        let api: Api<Guard<K>> = Api::all(self.client.clone());
        let stop = self.stop.clone();
        let (store, metrics) = (Arc::clone(self.store), self.metrics.clone());
        tasks.spawn(async move {
            let watch = watch(api, config).backoff(Resume::default());
            let mut feed = Feed { source, key, listing: BTreeSet::new(), metrics };
            let mut stream = std::pin::pin!(watch.take_until(stop.cancelled_owned()));
            while let Some(event) = stream.next().await {
                let Some(change) = feed.change(event) else { continue };
                let listed = matches!(change, Change::Listed(_));
                store.write(|facts| fold(facts, change));
                if listed {
                    store.synced(source);
                }
            }
        });
    }
}

/// Turns what a watch says into changes.
struct Feed<K> {
    source: Source,
    key: fn(&Guard<K>) -> String,
    listing: BTreeSet<String>,
    metrics: Metrics,
}

impl<K: Resource<DynamicType = ()> + Clone> Feed<K> {
    fn change(&mut self, event: Result<Event<Guard<K>>, watcher::Error>) -> Option<Change<K>> {
        match event {
            Ok(Event::Init) => {
                // This comes before the list is asked for.
                self.listing.clear();
                Some(Change::Listing)
            }
            Ok(Event::InitApply(object)) => {
                // One that cannot be read exists all the same: what was known of it stays.
                self.listing.insert((self.key)(&object));
                Some(self.seen(object))
            }
            Ok(Event::InitDone) => Some(Change::Listed(std::mem::take(&mut self.listing))),
            Ok(Event::Apply(object)) => Some(self.seen(object)),
            Ok(Event::Delete(object)) => Some(Change::Gone((self.key)(&object), object.0.ok())),
            Err(error) => {
                let kind = self.source.name();
                self.metrics.watch_errors.get_or_create(&KindLabels { kind }).inc();
                tracing::warn!(kind, error = %mullion_telemetry::source_chain(&error), "watch broke, resuming");
                None
            }
        }
    }

    fn seen(&self, object: Guard<K>) -> Change<K> {
        match object.0 {
            Ok(object) => Change::Seen(object),
            Err(remains) => {
                let kind = self.source.name();
                self.metrics.invalid_objects.get_or_create(&KindLabels { kind }).inc();
                let code =
                    if self.source == Source::Allocations { "AllocationUnreadable" } else { "Unreadable" };
                tracing::error!(
                    kind,
                    code,
                    namespace = remains.metadata.namespace.as_deref().unwrap_or_default(),
                    name = remains.metadata.name.as_deref().unwrap_or_default(),
                    node = remains.node.as_deref().unwrap_or_default(),
                    error = remains.error,
                    "object passed over: it cannot be read",
                );
                Change::Unreadable { uid: remains.metadata.uid.unwrap_or_default(), node: remains.node }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allocation(uid: &str) -> VGPUAllocation {
        let object = json!({
            "metadata": {"name": uid, "namespace": "ns", "uid": uid, "resourceVersion": "7"},
            "spec": {"pod": {"name": uid, "uid": uid}, "nodeName": "n", "sequence": 1,
                "summary": {"gpu": "-", "kind": "vgpu", "memoryMiB": 0, "corePercent": 0}, "containers": []},
        });
        serde_json::from_value(object).unwrap()
    }

    // FS-09: what a list does not name is gone, unless it may be younger than the list.
    #[test]
    fn an_answer_during_a_list_outlives_the_list() {
        let store = Store::new(mullion_core::request::Defaults::default());
        let mut feed: Feed<VGPUAllocation> = Feed {
            source: Source::Allocations,
            key: uid_of,
            listing: BTreeSet::new(),
            metrics: Metrics::new(),
        };
        let mut event = |event| {
            let change = feed.change(Ok(event));
            store.write(|facts| change.into_iter().for_each(|change| fold_allocation(facts, change)));
        };
        let answer = |uid: &str| store.write(|facts| facts.allocation_seen(allocation(uid)));
        let known = || -> Vec<String> {
            store.read(|facts| facts.allocations().map(|(fact, _)| fact.uid.0.clone()).collect())
        };
        let listed = |uid: &str| Event::InitApply(Guard(Ok(Box::new(allocation(uid)))));
        answer("before");
        answer("kept");
        event(Event::Init);
        event(listed("kept"));
        // Bound here while the list is under way, so that the list does not name it; and one that ended meanwhile
        // shows in an answer once more.
        answer("during");
        answer("before");
        event(Event::InitDone);
        assert_eq!(known(), ["during", "kept"]);
        event(Event::Delete(Guard(Ok(Box::new(allocation("during"))))));
        assert_eq!(known(), ["kept"], "the watch that follows reports its end");
        event(Event::Init);
        answer("between");
        event(Event::Init);
        event(Event::InitDone);
        assert!(known().is_empty(), "a list that failed half way leaves nothing exempt");
    }

    #[test]
    fn pauses_grow_and_start_anew() {
        let mut resume = Resume::default();
        let pauses: Vec<u128> = resume.by_ref().take(7).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 5000, 5000]);
        resume.reset();
        assert_eq!(resume.next(), Some(FIRST));
    }

    // An allocation of which nothing is known is not nothing: its node takes no new pods until it can be read.
    #[test]
    fn an_allocation_that_cannot_be_read_closes_its_node() {
        let store = Store::new(mullion_core::request::Defaults::default());
        let metrics = Metrics::new();
        let mut feed: Feed<VGPUAllocation> = Feed {
            source: Source::Allocations,
            key: uid_of,
            listing: BTreeSet::new(),
            metrics: metrics.clone(),
        };
        let mut event = |event| {
            let change = feed.change(Ok(event));
            store.write(|facts| change.into_iter().for_each(|change| fold_allocation(facts, change)));
        };
        let broken = |uid: &str, sequence: serde_json::Value| -> Guard<VGPUAllocation> {
            let mut object = serde_json::to_value(allocation(uid)).unwrap();
            object["spec"]["sequence"] = sequence;
            serde_json::from_str(&object.to_string()).unwrap()
        };
        let closed = || store.read(|facts| facts.ledger().unaccounted(&"n".into()).count());
        event(Event::Init);
        event(Event::InitApply(broken("a", json!("one"))));
        event(Event::InitApply(broken("b", json!("two"))));
        event(Event::InitDone);
        assert_eq!(closed(), 2, "it is in the list, and what it says is not known");
        assert_eq!(metrics.invalid_objects.get_or_create(&KindLabels { kind: "VGPUAllocation" }).get(), 2);
        event(Event::Apply(broken("a", json!(1))));
        assert_eq!(closed(), 1, "it can be read again");
        event(Event::Apply(broken("a", json!("one"))));
        assert_eq!(closed(), 1, "what was known of it stays");
        store.take_gained();
        event(Event::Delete(broken("b", json!("two"))));
        assert_eq!(closed(), 0);
        assert!(store.take_gained().contains(&"n".into()), "pods that wait for the node are woken");
        event(Event::Apply(broken("c", json!("three"))));
        event(Event::Init);
        event(Event::InitDone);
        assert_eq!(closed(), 0, "gone between two lists");
    }
}
