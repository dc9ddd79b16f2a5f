//! A namespace of its own for a test, and questions that wait for their answer.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Client, ResourceExt};
use mullion_crds::vgpuallocation::Phase;
use mullion_crds::{GPUNode, VGPUAllocation};

use crate::Lab;

/// How long an ordinary step may take on a busy two-core machine.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Asks until the answer is `Some`.
///
/// # Errors
/// After `patience`, naming `what` and the last error.
pub async fn eventually<T, F, Fut>(what: &str, patience: Duration, mut ask: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let start = Instant::now();
    let mut last = None;
    while start.elapsed() < patience {
        match ask().await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => last = None,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    match last {
        Some(error) => Err(error.context(format!("{what}: not within {patience:?}"))),
        None => bail!("{what}: not within {patience:?}"),
    }
}

/// A test's namespace.
#[derive(Clone)]
pub struct Scope {
    /// Client with the rights of the lab's administrator.
    pub client: Client,
    /// Name of the namespace.
    pub namespace: String,
    /// The lab.
    pub lab: Lab,
}

impl std::fmt::Debug for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Scope {
    /// Makes the namespace `e2e-<name>`, after ending what an earlier run may have left in it.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn new(name: &str) -> Result<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_default().await.context("KUBECONFIG: run the tests with `lab enter`")?;
        let scope = Self { client, namespace: format!("e2e-{name}"), lab: Lab };
        let namespaces: Api<Namespace> = Api::all(scope.client.clone());
        // A test that failed leaves its pods for people to look at; the next one needs the cards.
        for left in namespaces.list(&ListParams::default()).await?.items {
            if left.name_any().starts_with("e2e-") {
                Self { namespace: left.name_any(), ..scope.clone() }.remove().await?;
            }
        }
        let object = Namespace {
            metadata: ObjectMeta { name: Some(scope.namespace.clone()), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        namespaces.create(&PostParams::default(), &object).await.context("create the namespace")?;
        // The test before may have ended in an outage.
        scope.lab.revive()?;
        // The controller manager makes the default service account; pods are refused before that.
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(scope.client.clone(), &scope.namespace);
        eventually("default service account", PATIENCE, || async { Ok(accounts.get_opt("default").await?) })
            .await?;
        Ok(scope)
    }

    /// Pods of the namespace.
    #[must_use]
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Allocations of the namespace.
    #[must_use]
    pub fn allocations(&self) -> Api<VGPUAllocation> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// All `GPUNode`s.
    #[must_use]
    pub fn gpu_nodes(&self) -> Api<GPUNode> {
        Api::all(self.client.clone())
    }

    /// Creates a pod.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn create(&self, pod: &Pod) -> Result<Pod> {
        Ok(self.pods().create(&PostParams::default(), pod).await?)
    }

    /// Creates a pod that must be refused, and gives the refusal's text.
    ///
    /// # Errors
    /// When it is accepted.
    pub async fn refusal(&self, pod: &Pod) -> Result<String> {
        match self.pods().create(&PostParams::default(), pod).await {
            Ok(_) => bail!("pod {} was accepted", pod.name_any()),
            Err(error) => Ok(error.to_string()),
        }
    }

    /// Waits until the pod is in `phase`.
    ///
    /// # Errors
    /// With the pod's conditions and Events when it is not within [`PATIENCE`].
    pub async fn phase(&self, name: &str, phase: &str) -> Result<Pod> {
        let pods = self.pods();
        let seen = eventually(&format!("pod {name} {phase}"), PATIENCE, || async {
            let pod = pods.get(name).await?;
            let is = pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some(phase);
            Ok(is.then_some(pod))
        })
        .await;
        match seen {
            Ok(pod) => Ok(pod),
            Err(error) => Err(error.context(self.story(name).await)),
        }
    }

    /// Creates a `ReplicaSet` whose pods are like `pod` and carry the label `app: <name>`.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn create_set(&self, name: &str, replicas: i32, pod: &Pod) -> Result<()> {
        let set: ReplicaSet = serde_json::from_value(serde_json::json!({
            "metadata": {"name": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}},
                     "template": {"metadata": {"labels": {"app": name}}, "spec": pod.spec}}}))?;
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &self.namespace);
        sets.create(&PostParams::default(), &set).await?;
        Ok(())
    }

    /// Waits until the scheduler has found no node for the pod, and gives its message.
    ///
    /// # Errors
    /// With the pod's conditions and Events when it is not within [`PATIENCE`].
    pub async fn unschedulable(&self, name: &str) -> Result<String> {
        let seen = eventually(&format!("pod {name} refused"), PATIENCE, || async {
            let conditions =
                self.pods().get(name).await?.status.and_then(|s| s.conditions).unwrap_or_default();
            let refused = conditions.into_iter().find(|c| c.reason.as_deref() == Some("Unschedulable"));
            Ok(refused.map(|c| c.message.unwrap_or_default()))
        })
        .await;
        match seen {
            Ok(message) => Ok(message),
            Err(error) => Err(error.context(self.story(name).await)),
        }
    }

    /// Waits until the pod runs with all its containers.
    ///
    /// # Errors
    /// As [`Self::phase`].
    pub async fn running(&self, name: &str) -> Result<Pod> {
        self.phase(name, "Running").await
    }

    /// Status and Events of a pod, for people.
    pub async fn story(&self, name: &str) -> String {
        let status = self.pods().get(name).await.ok().and_then(|p| p.status);
        let events = self.events_of(name).await.unwrap_or_default();
        format!("pod {name}: {status:?}; Events: {events:#?}")
    }

    /// `reason: message` of every Event about an object of that name.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn events_of(&self, name: &str) -> Result<Vec<String>> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let list = events.list(&ListParams::default().fields(&format!("involvedObject.name={name}"))).await?;
        Ok(list
            .items
            .into_iter()
            .map(|e| format!("{}: {}", e.reason.unwrap_or_default(), e.message.unwrap_or_default()))
            .collect())
    }

    /// Waits for an Event about `name` whose text contains `needle`.
    ///
    /// # Errors
    /// With all its Events when none does.
    pub async fn event(&self, name: &str, needle: &str) -> Result<String> {
        let found = eventually(&format!("an Event about {name} with {needle:?}"), PATIENCE, || async {
            Ok(self.events_of(name).await?.into_iter().find(|e| e.contains(needle)))
        })
        .await;
        match found {
            Ok(event) => Ok(event),
            Err(error) => Err(error.context(self.story(name).await)),
        }
    }

    /// The allocation of a pod.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub async fn allocation(&self, pod: &Pod) -> Result<VGPUAllocation> {
        let uid = pod.uid().unwrap_or_default();
        let mut found: Vec<_> = self
            .allocations()
            .list(&ListParams::default())
            .await?
            .items
            .into_iter()
            .filter(|a| a.spec.pod.uid == uid)
            .collect();
        let one = found.pop().with_context(|| format!("no allocation of pod {}", pod.name_any()))?;
        if found.is_empty() { Ok(one) } else { bail!("several allocations of pod {}", pod.name_any()) }
    }

    /// Waits until the pod's allocation is in `phase`.
    ///
    /// # Errors
    /// With the allocation as it stands when it is not.
    pub async fn allocation_phase(&self, pod: &Pod, phase: Phase) -> Result<VGPUAllocation> {
        eventually(&format!("allocation of {} {phase:?}", pod.name_any()), PATIENCE, || async {
            let allocation = self.allocation(pod).await?;
            let now = allocation.status.as_ref().map(|s| s.phase).unwrap_or_default();
            if now == phase { Ok(Some(allocation)) } else { bail!("it is {now:?}: {:?}", allocation.status) }
        })
        .await
    }

    /// Runs a command in a container and gives its standard output.
    ///
    /// # Errors
    /// When it fails.
    pub fn exec(&self, pod: &str, container: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["-n", &self.namespace, "exec", pod, "-c", container, "--"];
        args.extend_from_slice(command);
        self.lab.kubectl(&args)
    }

    /// What the agent of a node tells Prometheus.
    ///
    /// # Errors
    ///
    /// It does not answer.
    pub fn metrics_of(&self, node: &str) -> Result<String> {
        self.lab.on_node(node, &["curl", "-sf", "http://127.0.0.1:9394/metrics"])
    }

    /// Deletes a pod and waits until it and its allocation are gone.
    ///
    /// # Errors
    /// When they stay.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let pods = self.pods();
        let uid = pods.get_opt(name).await?.and_then(|p| p.uid());
        match pods.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => drop(other?),
        }
        eventually(&format!("pod {name} and its allocation gone"), PATIENCE, || async {
            let pod = pods.get_opt(name).await?;
            let left = self.allocations().list(&ListParams::default()).await?;
            let holds = left.items.iter().any(|a| Some(&a.spec.pod.uid) == uid.as_ref());
            Ok((pod.is_none_or(|p| p.uid() != uid) && !holds).then_some(()))
        })
        .await
    }

    /// Ends the namespace and waits until it and everything in it is gone.
    ///
    /// # Errors
    /// With what is left.
    pub async fn remove(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let grace = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        if namespaces.get_opt(&self.namespace).await?.is_none() {
            return Ok(());
        }
        let quick = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
        self.pods().delete_collection(&quick, &ListParams::default()).await?;
        let _ = namespaces.delete(&self.namespace, &grace).await;
        eventually(&format!("namespace {} gone", self.namespace), PATIENCE, || async {
            match namespaces.get_opt(&self.namespace).await? {
                None => Ok(Some(())),
                Some(left) => bail!("{:?}", left.status),
            }
        })
        .await
    }

    /// The `GPUNode` of a node.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn gpu_node(&self, name: &str) -> Result<GPUNode> {
        Ok(self.gpu_nodes().get(name).await?)
    }
}
