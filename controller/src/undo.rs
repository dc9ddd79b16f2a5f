//! Undoing an allocation whose pod never got its node: the controller's alone, since no agent has a part in it.

use kube::ResourceExt;
use mullion_crds::{VGPUAllocation, names};

use crate::cluster::{Cluster, full_name, uid};
use crate::error::Error;
use crate::store::Store;

/// What has become of a pod, read from the API server itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodState {
    /// No pod of that uid.
    Gone,
    /// It has no node.
    Unbound,
    /// It has this node.
    Bound(String),
}

/// Reads what has become of the pod of `allocation`.
///
/// # Errors
/// See [`Cluster::call`].
pub async fn pod_state(cluster: &Cluster, allocation: &VGPUAllocation) -> Result<PodState, Error> {
    let namespace = allocation.namespace().unwrap_or_default();
    let found = cluster.pod(&namespace, &allocation.spec.pod.name).await?;
    let Some(pod) = found.filter(|pod| pod.uid().as_deref() == Some(allocation.spec.pod.uid.as_str())) else {
        return Ok(PodState::Gone);
    };
    let node = pod.spec.and_then(|spec| spec.node_name).filter(|node| !node.is_empty());
    Ok(node.map_or(PodState::Unbound, PodState::Bound))
}

/// Removes `allocation` if its node has not acted on it and its pod is not bound there: reads the pod, strips our
/// finalizer, deletes. Every write names the version that was judged, so that what has changed since is kept.
///
/// # Errors
/// [`Error::AllocationInUse`] when it is not ours to undo; else see [`Cluster::call`].
pub async fn undo(cluster: &Cluster, store: &Store, allocation: &VGPUAllocation) -> Result<(), Error> {
    not_bound(cluster, allocation).await?;
    remove(cluster, store, allocation).await
}

/// Its node has not acted on it, or has released it since.
fn untouched(allocation: &VGPUAllocation) -> Result<(), Error> {
    let fact = mullion_crds::facts::allocation(allocation);
    if fact.prepared && !fact.released { Err(in_use(allocation)) } else { Ok(()) }
}

async fn not_bound(cluster: &Cluster, allocation: &VGPUAllocation) -> Result<(), Error> {
    match pod_state(cluster, allocation).await? {
        PodState::Bound(node) if node == allocation.spec.node_name => Err(in_use(allocation)),
        _ => Ok(()),
    }
}

/// Like [`undo`], for a caller that knows about the pod already.
///
/// # Errors
/// See [`undo`].
pub async fn remove(cluster: &Cluster, store: &Store, allocation: &VGPUAllocation) -> Result<(), Error> {
    untouched(allocation)?;
    let mut seen = allocation.clone();
    let mut tries = 0;
    loop {
        match strip_and_delete(cluster, store, &seen).await {
            Ok(()) => break,
            Err(error) if error.status().is_some_and(kube::core::Status::is_conflict) && tries == 0 => {
                tries += 1;
                match cluster.allocation(&seen.namespace().unwrap_or_default(), &seen.name_any()).await? {
                    Some(now) if now.uid() == seen.uid() => {
                        store.write(|facts| facts.allocation_seen(now.clone()));
                        untouched(&now)?;
                        // Whoever changed it may have bound the pod to it, too.
                        not_bound(cluster, &now).await?;
                        seen = now;
                    }
                    _ => break,
                }
            }
            Err(error) => return Err(error),
        }
    }
    store.write(|facts| facts.allocation_gone(&uid(allocation)));
    tracing::info!(allocation = full_name(allocation), node = allocation.spec.node_name, "undid allocation");
    Ok(())
}

async fn strip_and_delete(cluster: &Cluster, store: &Store, seen: &VGPUAllocation) -> Result<(), Error> {
    let stripped = if seen.finalizers().iter().any(|f| f == names::FINALIZER) {
        match cluster.strip_finalizer(seen).await? {
            Some(stripped) => {
                // From here on nobody may be bound to it, whatever becomes of the deletion.
                store.write(|facts| facts.allocation_seen(stripped.clone()));
                stripped
            }
            None => return Ok(()),
        }
    } else {
        seen.clone()
    };
    if stripped.metadata.deletion_timestamp.is_some() {
        // It was only waiting for our finalizer.
        return Ok(());
    }
    cluster.delete_allocation(&stripped).await
}

fn in_use(allocation: &VGPUAllocation) -> Error {
    Error::AllocationInUse { allocation: full_name(allocation), node: allocation.spec.node_name.clone() }
}
