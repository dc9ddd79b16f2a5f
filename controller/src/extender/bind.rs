//! Bind: hold the capacity, create the allocation, create the binding. Two writes; whatever comes between is looked
//! up, never guessed.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use mullion_core::facts::Event;
use mullion_core::units::{NodeName, PodUid};
use mullion_crds::VGPUAllocation;
use mullion_telemetry::pod_span;
use mullion_telemetry::trace::{AdmissionStamp, record_admission};
use tokio::time::Instant;
use tracing::Instrument;

use super::turns::Turns;
use super::wire::BindingArgs;
use crate::cluster::{CALL_LIMIT, Cluster, full_name};
use crate::error::Error;
use crate::store::{Claim, PodRecord, Store};
use crate::undo;

/// How often an allocation is tried for: once, and again after a stale one was undone, and once more in case that
/// another decider created one in between.
const TRIES: usize = 3;

/// How long after the call's arrival a binding may still be begun. kube-scheduler gives up after 30 s, and so must we:
/// an allocation whose pod is unbound for longer than that is undone by whichever replica leads.
const LATEST: Duration = Duration::from_secs(30 - CALL_LIMIT.as_secs());

/// Binds pods. One per process.
#[derive(Debug)]
pub struct Binder {
    cluster: Cluster,
    store: Arc<Store>,
    turns: Arc<Turns<PodUid>>,
}

/// Capacity held in the ledger for a pod. Ends when dropped, unless the allocation itself has been seen by then.
struct Hold<'a> {
    store: &'a Store,
    pod: PodUid,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.store.write(|facts| facts.fold(&Event::HoldEnded(self.pod.clone())));
    }
}

impl Binder {
    /// Binds through `cluster`, decides from `store`; `turns` is shared with whoever else undoes allocations.
    #[must_use]
    pub const fn new(cluster: Cluster, store: Arc<Store>, turns: Arc<Turns<PodUid>>) -> Self {
        Self { cluster, store, turns }
    }

    /// Binds a pod to a node. Returns only when it is bound for certain.
    ///
    /// # Errors
    /// Why it is not, or may not be, bound; kube-scheduler tries again.
    pub async fn bind(&self, args: &BindingArgs) -> Result<(), Error> {
        let span = pod_span!("bind", args.pod_uid.as_str(), node = args.node, pod = args.pod_name);
        async {
            let result = self.serialised(args).await;
            match &result {
                Ok(()) => tracing::info!(namespace = args.pod_namespace, "bound pod"),
                Err(error) => {
                    let cause = mullion_telemetry::source_chain(error);
                    tracing::warn!(
                        namespace = args.pod_namespace,
                        code = error.code(),
                        error = cause,
                        "bind failed"
                    );
                }
            }
            result
        }
        .instrument(span)
        .await
    }

    async fn serialised(&self, args: &BindingArgs) -> Result<(), Error> {
        let begun = Instant::now();
        args.check()?;
        self.store.ready()?;
        let _turn = self.turns.of(args.pod_uid.as_str().into()).await;
        let node = NodeName::from(args.node.as_str());
        in_time(args, begun)?;
        let record = self.pod(args).await?;
        match &record.node {
            Some(bound) if *bound == node => return Ok(()),
            Some(bound) => {
                let (pod, bound) = (record.full_name(), bound.0.clone());
                return Err(Error::PodBoundElsewhere { pod, bound, node });
            }
            None if record.deleting => return Err(Error::PodDeleting { pod: record.full_name() }),
            None => {}
        }
        let request = match record.request.clone() {
            Ok(request) => request,
            Err(source) => return Err(Error::Request { pod: record.full_name(), source: Box::new(source) }),
        };
        let allocation = match request {
            Some(request) => {
                let now = jiff::Timestamp::now().as_second();
                Some(self.allocate(&record, &request, &node, now).await?)
            }
            // It asks for nothing of ours; we bind because we were asked to.
            None => None,
        };
        in_time(args, begun)?;
        match self.cluster.bind(&record.pod, &node).await {
            Ok(()) => {}
            Err(error) => self.settle(error, &record, &node, allocation.as_ref()).await?,
        }
        if let Some(stamp) = record.admission.as_ref().and_then(|text| text.parse::<AdmissionStamp>().ok()) {
            record_admission(&args.pod_uid, &stamp);
        }
        Ok(())
    }

    /// The pod as it was last seen; read from the API server where it was not seen yet.
    async fn pod(&self, args: &BindingArgs) -> Result<PodRecord, Error> {
        if let Some(record) = self.store.read(|facts| facts.pod(&args.pod_uid).cloned())
            && record.pod.name == args.pod_name
            && record.pod.namespace == args.pod_namespace
        {
            return Ok(record);
        }
        let found = self.cluster.pod(&args.pod_namespace, &args.pod_name).await?;
        let record = found.as_ref().and_then(|pod: &Pod| {
            let defaults = self.store.read(|facts| *facts.defaults());
            PodRecord::read(pod, &defaults)
        });
        record.filter(|record| record.pod.uid.as_str() == args.pod_uid).ok_or_else(|| Error::PodGone {
            pod: format!("{}/{}", args.pod_namespace, args.pod_name),
            uid: args.pod_uid.clone(),
        })
    }

    /// The pod's allocation on `node`: the one that it has already, or a new one.
    async fn allocate(
        &self,
        record: &PodRecord,
        request: &mullion_core::request::PodRequest,
        node: &NodeName,
        now: i64,
    ) -> Result<VGPUAllocation, Error> {
        let mut stale = String::new();
        for _ in 0..TRIES {
            match self.store.claim(&record.pod, request, node, now)? {
                Claim::Existing(object) => {
                    if let Some(object) = self.take_up(&object).await? {
                        return Ok(object);
                    }
                    stale = full_name(&object);
                }
                Claim::Stale(object) => {
                    stale = full_name(&object);
                    undo::undo(&self.cluster, &self.store, &object).await?;
                }
                Claim::Held(object) => {
                    let _hold = Hold { store: &self.store, pod: record.pod.uid.clone() };
                    let made_now = if let Some((created, made_now)) = self.create(&object).await? {
                        // Seen before the hold ends: the capacity is never free in between.
                        self.store.write(|facts| facts.allocation_seen(created));
                        made_now
                    } else {
                        stale = full_name(&object);
                        false
                    };
                    let uid = record.pod.uid.as_str();
                    let made = self.store.read(|facts| {
                        let made = facts.allocation_of_pod(uid);
                        made.filter(|made| made.spec.node_name == node.0 && facts.usable(made)).cloned()
                    });
                    match made {
                        Some(made) if made_now => return Ok(made),
                        Some(made) => {
                            if let Some(made) = self.take_up(&made).await? {
                                return Ok(made);
                            }
                        }
                        None => {}
                    }
                }
            }
        }
        Err(Error::StaleAllocation { allocation: stale })
    }

    /// Makes an allocation that was there before ours for this bind: whichever replica leads may have judged it to lead
    /// nowhere, and be about to undo it. It does so by version, so a new version keeps it; and it waits longer after
    /// each new one than a bind takes. `None` when it came first: the allocation is looked at anew.
    async fn take_up(&self, seen: &VGPUAllocation) -> Result<Option<VGPUAllocation>, Error> {
        let now = match self.cluster.take_up(seen).await {
            Ok(Some(now)) => {
                tracing::info!(allocation = full_name(seen), "found the pod's allocation");
                self.store.write(|facts| facts.allocation_seen(now.clone()));
                return Ok(Some(now));
            }
            Ok(None) => None,
            Err(error) if error.status().is_some_and(kube::core::Status::is_conflict) => {
                let (namespace, name) = (seen.namespace().unwrap_or_default(), seen.name_any());
                self.cluster.allocation(&namespace, &name).await?
            }
            Err(error) => return Err(error),
        };
        self.store.write(|facts| match now.filter(|now| now.uid() == seen.uid()) {
            Some(now) => facts.allocation_seen(now),
            None => facts.allocation_gone(&crate::cluster::uid(seen)),
        });
        Ok(None)
    }

    /// Creates an allocation, or finds the one that bears its name; with whether it was surely made by this call. `None`
    /// when there is none after all.
    async fn create(&self, object: &VGPUAllocation) -> Result<Option<(VGPUAllocation, bool)>, Error> {
        let error = match self.cluster.create_allocation(object).await {
            Ok(created) => return Ok(Some((created, true))),
            Err(error) => error,
        };
        let exists = error.status().is_some_and(kube::core::Status::is_already_exists);
        if !exists && !error.outcome_unknown() {
            return Err(error);
        }
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        match self.cluster.allocation(namespace, name).await? {
            Some(found) if found.spec.pod.uid == object.spec.pod.uid => Ok(Some((found, false))),
            Some(found) => {
                let (allocation, uid) = (full_name(&found), found.spec.pod.uid);
                Err(Error::AllocationNameTaken { allocation, uid })
            }
            None if exists => Ok(None),
            None => Err(error),
        }
    }

    /// The binding was refused or its outcome is unknown: the pod itself says what happened.
    async fn settle(
        &self,
        error: Error,
        record: &PodRecord,
        node: &NodeName,
        allocation: Option<&VGPUAllocation>,
    ) -> Result<(), Error> {
        let found = self.cluster.pod(&record.pod.namespace, &record.pod.name).await?;
        let same = found.as_ref().filter(|pod| pod.metadata.uid.as_deref() == Some(record.pod.uid.as_str()));
        let bound = same.and_then(|pod| pod.spec.as_ref()).and_then(|spec| spec.node_name.as_deref());
        if bound == Some(node.as_str()) {
            tracing::info!(code = error.code(), "the pod is bound all the same");
            return Ok(());
        }
        if let Some(allocation) = allocation {
            undo::remove(&self.cluster, &self.store, allocation).await?;
        }
        Err(Error::BindUndone { pod: record.full_name(), node: node.clone(), source: Box::new(error) })
    }
}

fn in_time(args: &BindingArgs, begun: Instant) -> Result<(), Error> {
    if begun.elapsed() <= LATEST {
        return Ok(());
    }
    let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
    Err(Error::BindTooLate { pod, node: args.node.as_str().into(), limit: LATEST })
}

#[cfg(test)]
mod tests;
