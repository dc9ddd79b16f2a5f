//! Crowds of pods: made at once, and watched.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};

/// How long a crowd may take to get somewhere.
pub const PATIENCE: Duration = Duration::from_mins(3);

/// Creates `pods` with at most `in_flight` requests at once; when each request was sent, by name.
///
/// # Errors
/// The first refusal.
pub async fn create(api: &Api<Pod>, pods: &[Pod], in_flight: usize) -> Result<BTreeMap<String, Instant>> {
    let requests = futures::stream::iter(pods.iter().map(|pod| async move {
        let sent = Instant::now();
        let name = pod.name_any();
        api.create(&PostParams::default(), pod).await.with_context(|| format!("create pod {name}"))?;
        anyhow::Ok((name, sent))
    }));
    requests.buffer_unordered(in_flight).try_collect().await
}

/// What a pod is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// It has a node.
    Bound,
    /// All its containers run.
    Running,
}

impl Goal {
    fn reached(self, pod: &Pod) -> bool {
        match self {
            Self::Bound => pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()),
            Self::Running => pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running"),
        }
    }
}

/// A watch on the pods of a namespace, opened before what is to be seen happens.
#[derive(Debug)]
pub struct Watch(tokio::task::JoinHandle<Result<BTreeMap<String, Instant>>>);

impl Watch {
    /// Watches until `count` pods have reached `goal`. Pods that have a node already are not looked at.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn open(api: &Api<Pod>, goal: Goal, count: usize) -> Result<Self> {
        // The version of an empty answer is as good as any; the list itself is not needed.
        let version = api.list_metadata(&ListParams::default().limit(1)).await?.metadata.resource_version;
        let version = version.context("a list without a resource version")?;
        // Only what is bound is sent: each pod comes when its binding does.
        let params = WatchParams::default().fields("spec.nodeName!=").disable_bookmarks();
        let api = api.clone();
        Ok(Self(tokio::spawn(async move {
            let (mut reached, mut version) = (BTreeMap::new(), version);
            while reached.len() < count {
                // The API server may end a watch at any time; the next one goes on where it was.
                let mut events = std::pin::pin!(api.watch(&params, &version).await?);
                while reached.len() < count
                    && let Some(event) = events.try_next().await?
                {
                    match event {
                        WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                            if goal.reached(&pod) {
                                reached.entry(pod.name_any()).or_insert_with(Instant::now);
                            }
                            version = pod.resource_version().unwrap_or(version);
                        }
                        WatchEvent::Error(error) => bail!("the watch failed: {error:?}"),
                        WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                    }
                }
            }
            Ok(reached)
        })))
    }

    /// When each pod got there.
    ///
    /// # Errors
    /// When the watch broke, or not all got there within [`PATIENCE`].
    pub async fn wait(mut self) -> Result<BTreeMap<String, Instant>> {
        let Ok(done) = tokio::time::timeout(PATIENCE, &mut self.0).await else {
            self.0.abort();
            bail!("not all pods got there within {PATIENCE:?}")
        };
        done.context("the watching task ended")?
    }
}

/// Milliseconds from `from` to `to`, by name, for the names in both.
pub fn between(from: &BTreeMap<String, Instant>, to: &BTreeMap<String, Instant>) -> Vec<f64> {
    let pairs = from.iter().filter_map(|(name, from)| Some((from, to.get(name)?)));
    pairs.map(|(from, to)| crate::stats::millis(to.saturating_duration_since(*from))).collect()
}
