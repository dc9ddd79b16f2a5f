//! The process: watches, servers, election, reconcilers, and an orderly end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use kube::{Client, Config as KubeConfig};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cluster::{CALL_LIMIT, Cluster};
use crate::config::{Args, Config};
use crate::error::Error;
use crate::extender::Extender;
use crate::extender::bind::Binder;
use crate::extender::turns::Turns;
use crate::health::Health;
use crate::lease::Elector;
use crate::metrics::Metrics;
use crate::reconcile::certificates::{Seen, follow};
use crate::reconcile::{self, Context};
use crate::store::{self, Store};
use crate::webhook::Webhook;
use crate::webhook::certificate::Held;
use crate::webhook::tls::{self, Identity};

/// Oldest API server taken: `matchConditions`, selectable fields and native sidecars are stable from there on, and
/// it is the oldest that this build's API types know.
const MINIMUM: (u32, u32) = (1, 33);
const MINIMUM_TEXT: &str = "1.33";

/// How often the ledger is compared with a fresh fold.
const CHECK: Duration = Duration::from_secs(30);
/// Pause between two tries to reach the API server at the start.
const RETRY: Duration = Duration::from_secs(2);

/// Runs the controller until SIGTERM or SIGINT.
///
/// # Errors
/// Settings that cannot be used, a cluster that is too old, a port that is taken, a server that broke.
pub async fn run(args: &Args) -> Result<(), Error> {
    let config = Arc::new(Config::load(args)?);
    // Two TLS providers may be in the build; the process uses this one. An error means that it is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let stop = CancellationToken::new();
    let listen = config.listen;
    let mut tasks: JoinSet<Result<(), Error>> = JoinSet::new();
    tasks.spawn(signals(stop.clone()));

    let client = connect().await?;
    tokio::select! {
        () = stop.cancelled() => return Ok(()),
        checked = check_version(&client) => checked?,
    }
    let me = identity(args.pod_name.as_deref());
    tracing::info!(identity = me, namespace = config.namespace, "controller starts");
    let metrics = Metrics::new();
    let store = Arc::new(Store::new(config.defaults.into()));
    metrics.watch_cards(Arc::clone(&store));
    let cluster = Cluster::new(client.clone(), &me);
    let turns = Arc::new(Turns::default());
    let certificate = Identity::default();

    let mut watches = JoinSet::new();
    store::run(&client, &store, &metrics, &stop, &mut watches);
    watches.spawn(load_certificates(client.clone(), Arc::clone(&config), certificate.clone(), stop.clone()));
    watches.spawn(check_ledger(Arc::clone(&store), metrics.clone(), stop.clone()));

    let health =
        Health { store: Arc::clone(&store), identity: certificate.clone(), metrics: metrics.clone() };
    tasks.spawn(serve("health", listen.health, health.routes(), stop.clone()));
    let binder = Arc::new(Binder::new(cluster.clone(), Arc::clone(&store), Arc::clone(&turns)));
    let extender = Extender::new(Arc::clone(&store), binder, metrics.clone());
    tasks.spawn(serve("extender", listen.extender, extender.routes(), stop.clone()));
    let webhook = Webhook { defaults: config.defaults.into(), metrics: metrics.clone() };
    tasks.spawn(tls::serve(listen.webhook, webhook.routes(), certificate, stop.clone()));

    let elector = Elector::new(cluster.clone(), config.namespace.clone(), config.lease.clone(), me);
    let context = Context { cluster, store, turns, metrics, config };
    tasks.spawn(lead(elector, context, stop.clone()));

    let outcome = supervise(&mut tasks, &mut watches, &stop).await;
    watches.shutdown().await;
    outcome
}

/// Waits for everything to end. Whatever ends first ends the process: by a signal all of it, by an error the rest.
///
/// `watches` run until `stop`: without one of them, decisions would be made for ever from what was known once.
async fn supervise(
    tasks: &mut JoinSet<Result<(), Error>>,
    watches: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let mut outcome = Ok(());
    loop {
        let ended = tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(ended) => ended.unwrap_or(Err(Error::TaskBroke { what: "a server" })),
                None => return outcome,
            },
            Some(_) = watches.join_next(), if !stop.is_cancelled() => {
                Err(Error::TaskBroke { what: "a watch" })
            }
        };
        stop.cancel();
        outcome = outcome.and(ended);
    }
}

async fn signals(stop: CancellationToken) -> Result<(), Error> {
    let listen = |source| Error::Listen { what: "signal", address: "SIGTERM".to_owned(), source };
    let mut term = signal(SignalKind::terminate()).map_err(listen)?;
    let mut int = signal(SignalKind::interrupt()).map_err(listen)?;
    tokio::select! {
        _ = term.recv() => tracing::info!("SIGTERM: stopping"),
        _ = int.recv() => tracing::info!("SIGINT: stopping"),
        () = stop.cancelled() => {}
    }
    Ok(())
}

async fn connect() -> Result<Client, Error> {
    let source = |error: kube::Error| Error::Kubeconfig { source: Box::new(error) };
    let mut settings = KubeConfig::infer().await.map_err(|error| source(kube::Error::InferConfig(error)))?;
    // A write that failed is looked up, not repeated.
    settings.default_retry = false;
    Client::try_from(settings).map_err(source)
}

/// Waits for the API server and looks at its version (DP-07).
async fn check_version(client: &Client) -> Result<(), Error> {
    loop {
        match tokio::time::timeout(CALL_LIMIT, client.apiserver_version()).await {
            Ok(Ok(version)) => {
                tracing::info!(version = version.git_version, "API server");
                return supported(&version.major, &version.minor, &version.git_version);
            }
            Ok(Err(error)) => {
                tracing::warn!(error = %mullion_telemetry::source_chain(&error), "API server not reached, trying again");
            }
            Err(_) => tracing::warn!("API server does not answer, trying again"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn supported(major: &str, minor: &str, version: &str) -> Result<(), Error> {
    // Some vendors write "33+".
    let number = |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().ok();
    match (number(major), number(minor)) {
        (Some(major), Some(minor)) if (major, minor) >= MINIMUM => Ok(()),
        _ => Err(Error::ApiServerTooOld { found: version.to_owned(), minimum: MINIMUM_TEXT }),
    }
}

/// Unique per process: the pod's or the host's name, as people look for it, and a random part.
fn identity(pod: Option<&str>) -> String {
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = pod.map_or_else(host, str::to_owned);
    format!("{}_{}", name.trim(), uuid::Uuid::new_v4())
}

async fn serve(
    what: &'static str,
    address: SocketAddr,
    routes: Router,
    stop: CancellationToken,
) -> Result<(), Error> {
    let shown = || address.to_string();
    let listener = TcpListener::bind(address).await.map_err(|source| Error::Listen {
        what,
        address: shown(),
        source,
    })?;
    tracing::info!(what, %address, "listening");
    axum::serve(listener, routes)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .map_err(|source| Error::Served { what, address: shown(), source })
}

/// Shows whatever certificate the Secret holds: on every replica, at once.
async fn load_certificates(client: Client, config: Arc<Config>, identity: Identity, stop: CancellationToken) {
    let secrets: Api<Secret> = Api::namespaced(client, &config.namespace);
    let (sender, mut seen) = watch::channel::<Seen<Secret>>(None);
    let name = config.webhook.secret.clone();
    let shown = format!("{}/{name}", config.namespace);
    let load = async {
        while seen.changed().await.is_ok() {
            let Some(Some(secret)) = seen.borrow_and_update().clone() else { continue };
            let pair = Held::read(&secret).current;
            match identity.load(&shown, &pair.certificate, &pair.key) {
                Ok(()) => tracing::info!(secret = shown, "certificate loaded"),
                Err(error) => tracing::error!(code = error.code(), %error, "certificate not loaded"),
            }
        }
    };
    tokio::join!(follow(secrets, name, sender, stop), load);
}

/// Compares the ledger with a fresh fold now and then (FS-09).
async fn check_ledger(store: Arc<Store>, metrics: Metrics, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(CHECK) => {}
        }
        let (drift, over, unaccounted) = store.read(|facts| {
            let ledger = facts.ledger();
            let unaccounted = ledger.nodes().flat_map(|node| ledger.unaccounted(node)).count();
            (facts.drift(), ledger.overcommitted(), unaccounted + ledger.unplaced())
        });
        metrics.unaccounted.set(i64::try_from(unaccounted).unwrap_or(i64::MAX));
        metrics.ledger_drift.set(i64::try_from(drift).unwrap_or(i64::MAX));
        metrics.overcommitted_cards.set(i64::try_from(over.len()).unwrap_or(i64::MAX));
        if drift > 0 {
            tracing::error!(drift, "the ledger differs from a fresh fold of the same objects");
        }
        for card in over {
            tracing::error!(node = %card.node, gpu = %card.uuid, used = ?card.used, capacity = ?card.capacity, "card is over-given");
        }
    }
}

/// Takes part in the election, and reconciles while it is won.
async fn lead(elector: Elector, context: Context, stop: CancellationToken) -> Result<(), Error> {
    let (sender, mut leading) = watch::channel(false);
    let elect = async {
        elector.run(&sender, &stop).await;
        drop(sender);
    };
    let work = async {
        while leading.wait_for(|leads| *leads).await.is_ok() {
            context.metrics.leader.set(1);
            let term = stop.child_token();
            let reconcile = async {
                if ready(&context, &term).await {
                    Box::pin(reconcile::run(&context, &term)).await;
                }
            };
            tokio::select! {
                () = reconcile => {}
                _ = leading.wait_for(|leads| !*leads) => {}
            }
            term.cancel();
            context.metrics.leader.set(0);
            if stop.is_cancelled() {
                return;
            }
        }
    };
    tokio::join!(elect, work);
    Ok(())
}

/// Waits until everything is listed; false when `stop` came first.
async fn ready(context: &Context, stop: &CancellationToken) -> bool {
    let mut changes = context.store.changes();
    // The certificate does not need the lists, but a replica without them serves nothing anyway.
    while context.store.ready().is_err() {
        tokio::select! {
            () = stop.cancelled() => return false,
            seen = changes.changed() => if seen.is_err() { return false },
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_ends_first_ends_the_rest() {
        type Ending = fn() -> Result<(), Error>;
        let cases: [(&str, Ending, bool, Result<(), &str>); 4] = [
            ("a signal", || Ok(()), false, Ok(())),
            (
                "a server that broke",
                || Err(Error::TaskBroke { what: "x" }),
                false,
                Err("the task for x broke: see the log, the caller tries again"),
            ),
            ("a task that panicked", || panic!("on purpose"), false, Err("a server")),
            ("a watch that ended", || Ok(()), true, Err("a watch")),
        ];
        for (case, ending, watch_ends, want) in cases {
            let stop = CancellationToken::new();
            let (mut tasks, mut watches) = (JoinSet::new(), JoinSet::new());
            let (until, as_long) = (stop.clone(), stop.clone());
            tasks.spawn(async move {
                until.cancelled().await;
                Ok(())
            });
            if watch_ends {
                watches.spawn(async {});
            } else {
                tasks.spawn(async move { ending() });
            }
            watches.spawn(async move { as_long.cancelled().await });
            let outcome = supervise(&mut tasks, &mut watches, &stop).await;
            assert!(stop.is_cancelled(), "{case}");
            match want {
                Ok(()) => assert!(outcome.is_ok(), "{case}: {outcome:?}"),
                Err(part) => assert!(outcome.unwrap_err().to_string().contains(part), "{case}"),
            }
        }
    }

    // DP-07: an API server that is too old is refused by name.
    #[test]
    fn versions() {
        for (major, minor, good) in [
            ("1", "33", true),
            ("1", "34+", true),
            ("2", "0", true),
            ("1", "32", false),
            ("1", "20", false),
            ("", "", false),
        ] {
            let result = supported(major, minor, "v1.20.0");
            assert_eq!(result.is_ok(), good, "{major}.{minor}");
            if let Err(error) = result {
                assert!(error.to_string().contains("1.33"), "{error}");
                assert_eq!(error.code(), "ApiServerTooOld");
            }
        }
    }
}
