//! The scheduler extender: `/filter`, `/prioritize`, `/bind`, called by the kube-scheduler in the same pod.
//!
//! A refusal is an answer, not an error: `Error` is set only for faults of our own.

pub mod bind;
pub mod cache;
pub mod turns;
pub mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use mullion_core::request::{PodRequest, RequestError, parse_pod};
use mullion_core::units::NodeName;
use mullion_telemetry::pod_span;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;
use crate::guard::brief;
use crate::metrics::{CodeLabels, Metrics};
use crate::store::{PodRecord, Store};
use crate::weigh;
use bind::Binder;
use cache::{Verdict, VerdictCache};
use wire::{
    BindingArgs, BindingResult, ExtenderArgs, FailedNodes, FilterResult, HostPriority, PodKey, PodText,
};

/// Largest body taken: a pod of the API server's limit (1.5 MiB in etcd, up to 3 MiB as JSON) and the names of
/// 15,000 nodes, with room.
const BODY_LIMIT: usize = 16 << 20;

/// The highest score.
const BEST: i64 = 100;

/// What a pod is told whose request cannot be read here; the webhook refuses it, so it came around it.
const REQUEST_REFUSED: &str = "node(s) not tried, since the pod's GPU request is refused";

/// What the handlers share.
#[derive(Clone, Debug)]
pub struct Extender {
    store: Arc<Store>,
    cache: Arc<VerdictCache>,
    binder: Arc<Binder>,
    metrics: Metrics,
    /// Held while a pod is read whole: one may be far larger than its text ([`weigh`]).
    reader: Arc<Mutex<()>>,
}

impl Extender {
    /// Decides from `store`, binds through `binder`.
    #[must_use]
    pub fn new(store: Arc<Store>, binder: Arc<Binder>, metrics: Metrics) -> Self {
        Self { store, cache: Arc::default(), binder, metrics, reader: Arc::default() }
    }

    /// The three routes.
    pub fn routes(self) -> Router {
        Router::new()
            .route("/filter", post(filter))
            .route("/prioritize", post(prioritize))
            .route("/bind", post(bind))
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .with_state(self)
    }

    /// Which of the nodes fit the pod.
    #[must_use]
    pub fn filter(&self, args: &ExtenderArgs) -> FilterResult {
        match self.try_filter(args) {
            Ok(result) => result,
            Err(error) => FilterResult { error: said(&error), ..FilterResult::default() },
        }
    }

    fn try_filter(&self, args: &ExtenderArgs) -> Result<FilterResult, Error> {
        let (pod, names) = args.parts()?;
        self.store.ready()?;
        let request = match self.request(pod)? {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(FilterResult::all(names)),
            Err(error) => return Ok(unresolvable(names, &error)),
        };
        let verdicts = self.verdicts(&pod.key.uid, &request, names);
        let mut fitting = Vec::new();
        let (mut failed, mut unresolvable) = (FailedNodes::new(), FailedNodes::new());
        for (name, verdict) in names.iter().zip(verdicts) {
            match verdict {
                Verdict::Fits(_) => fitting.push(name.clone()),
                Verdict::Refused(code) => {
                    self.metrics.refusals.get_or_create(&CodeLabels { code: code.as_str() }).inc();
                    let into = if code.unresolvable() { &mut unresolvable } else { &mut failed };
                    into.insert(name.clone(), code.reason().into());
                }
            }
        }
        Ok(FilterResult {
            node_names: Some(fitting),
            failed_nodes: failed,
            failed_and_unresolvable_nodes: unresolvable,
            ..FilterResult::default()
        })
    }

    /// How good each of the nodes is, `0..=100`.
    ///
    /// kube-scheduler multiplies this by the extender's weight and by 10 (its own scale ends at 10, and it does not
    /// clamp), so at weight 1 our word counts up to 1,000: about as much as all of its own default plugins
    /// together, whose weights sum to 12. A lower say for Mullion is a scheduler profile with higher plugin
    /// weights.
    ///
    /// # Errors
    /// [`Error::NotReady`], or a call without a pod.
    pub fn prioritize(&self, args: &ExtenderArgs) -> Result<Vec<HostPriority>, Error> {
        let (pod, names) = args.parts()?;
        self.store.ready()?;
        let scores: Vec<i64> = match self.request(pod)? {
            Ok(Some(request)) => {
                self.verdicts(&pod.key.uid, &request, names).iter().map(Verdict::score).collect()
            }
            Ok(None) | Err(_) => vec![0; names.len()],
        };
        Ok(names.iter().zip(scores).map(|(host, score)| HostPriority { host: host.clone(), score }).collect())
    }

    /// What the pod asks for: as the watch has read this version of it, else read from the call itself.
    fn request(&self, pod: &PodText) -> Result<Result<Option<PodRequest>, RequestError>, Error> {
        let PodKey { name, namespace, uid, resource_version } = &pod.key;
        let (seen, defaults) = self.store.read(|facts| {
            let same = |seen: &&PodRecord| {
                seen.pod.name == *name
                    && seen.pod.namespace == *namespace
                    && seen.version == *resource_version
            };
            let seen = facts.pod(uid).filter(same);
            (seen.map(|seen| seen.request.clone()), *facts.defaults())
        });
        if let Some(request) = seen {
            return Ok(request);
        }
        let _one = self.reader.lock();
        Ok(parse_pod(&mullion_crds::pod::view(&pod.read()?), &defaults))
    }

    fn verdicts(&self, uid: &str, request: &PodRequest, nodes: &[NodeName]) -> Vec<Verdict> {
        let (mut verdicts, remembered, own) = self.store.read(|facts| {
            let (verdicts, remembered) = self.cache.verdicts(request, nodes, facts.ledger());
            let own = facts.allocation_of_pod(uid).filter(|object| facts.usable(object));
            (verdicts, remembered, own.map(|object| object.spec.node_name.clone()))
        });
        self.metrics.cache_hits.inc_by(remembered as u64);
        self.metrics.cache_misses.inc_by((nodes.len() - remembered) as u64);
        // A bind that was cut short left its allocation: the pod has its place there, and what takes it up is itself.
        let there = nodes.iter().position(|node| own.as_deref() == Some(node.as_str()));
        if let Some(verdict) = there.and_then(|at| verdicts.get_mut(at))
            && !matches!(verdict, Verdict::Refused(code) if code.unresolvable())
        {
            *verdict = Verdict::Fits(BEST);
        }
        verdicts
    }
}

/// Every node is out, and taking pods off them would not help.
fn unresolvable(names: &[NodeName], error: &RequestError) -> FilterResult {
    let reason = format!("{REQUEST_REFUSED} ({})", error.code());
    let out = names.iter().map(|name| (name.clone(), reason.clone().into()));
    FilterResult {
        node_names: Some(Vec::new()),
        failed_and_unresolvable_nodes: out.collect(),
        ..FilterResult::default()
    }
}

/// An error as kube-scheduler shows it: code, then words. A refusal keeps its numbers to our log: kube-scheduler writes
/// the text into the pod's condition, and writes again when it changes.
fn said(error: &Error) -> String {
    if let Error::NoFit { refusal } = error {
        return format!("{}: {}", refusal.code(), refusal.code.reason());
    }
    format!("{}: {}", error.code(), mullion_telemetry::source_chain(error))
}

async fn filter(State(extender): State<Extender>, body: Bytes) -> Response {
    let begun = Instant::now();
    let args: ExtenderArgs = match read(&body) {
        Ok(args) => args,
        Err(refused) => return *refused,
    };
    let span = pod_span!("filter", args.pod_uid(), nodes = args.node_count());
    let result = span.in_scope(|| {
        let result = extender.filter(&args);
        let fitting = result.node_names.as_ref().map_or(0, Vec::len);
        tracing::debug!(fitting, error = result.error, "filtered");
        result
    });
    let outcome = if result.error.is_empty() { "ok" } else { "error" };
    extender.metrics.call("filter", outcome, begun.elapsed().as_secs_f64());
    answer(&result)
}

async fn prioritize(State(extender): State<Extender>, body: Bytes) -> Response {
    let begun = Instant::now();
    let args: ExtenderArgs = match read(&body) {
        Ok(args) => args,
        Err(refused) => return *refused,
    };
    let span = pod_span!("prioritize", args.pod_uid(), nodes = args.node_count());
    let result = span.in_scope(|| extender.prioritize(&args));
    let outcome = result.as_ref().map_or_else(Error::code, |_| "ok");
    extender.metrics.call("prioritize", outcome, begun.elapsed().as_secs_f64());
    match result {
        Ok(scores) => answer(&scores),
        // This verb has no error field: any other status makes kube-scheduler log it and score without us.
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, said(&error)).into_response(),
    }
}

async fn bind(State(extender): State<Extender>, body: Bytes) -> Response {
    let begun = Instant::now();
    let args: BindingArgs = match read(&body) {
        Ok(args) => args,
        Err(refused) => return *refused,
    };
    // In a task of its own: a scheduler that hangs up must not leave a bind half done.
    let binder = Arc::clone(&extender.binder);
    let work = tokio::spawn(async move { binder.bind(&args).await });
    let result = work.await.unwrap_or(Err(Error::TaskBroke { what: "bind" }));
    let outcome = result.as_ref().map_or_else(Error::code, |()| "ok");
    extender.metrics.call("bind", outcome, begun.elapsed().as_secs_f64());
    answer(&BindingResult { error: result.err().map(|error| said(&error)).unwrap_or_default() })
}

fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, Box<Response>> {
    let weighed = weigh::weigh(body).map_err(|refusal| format!("{}: {refusal}", refusal.code()));
    let read = weighed.and_then(|()| {
        serde_json::from_slice(body).map_err(|error| {
            format!("MalformedBody: not what kube-scheduler sends to an extender: {}", brief(&error))
        })
    });
    read.map_err(|text| {
        tracing::warn!(error = text, "call refused");
        Box::new((StatusCode::BAD_REQUEST, text).into_response())
    })
}

/// A JSON answer in one piece: it carries Content-Length.
fn answer<T: Serialize>(value: &T) -> Response {
    axum::Json(value).into_response()
}

#[cfg(test)]
mod tests;
