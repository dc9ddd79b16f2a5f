//! All parts together, in the order in which they must come up: the kubelet first, from the state file; the audit log,
//! the driver and the API server after that.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kube::Client;
use mullion_audit::{Entry, Event as AuditEvent};
use mullion_core::request::COUNT;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::api::Watches;
use crate::audit::Audit;
use crate::checkpoint;
use crate::config::{Enforcement, Settings};
use crate::device_plugin::server::{Prepare, Service};
use crate::device_plugin::{self, slots};
use crate::error::Error;
use crate::events::Announcer;
use crate::health::Watcher;
use crate::inventory::Publisher;
use crate::metrics::{self, Metrics};
use crate::monitor::bounds::Bounds;
use crate::monitor::export::Exporter;
use crate::monitor::{Latest, Monitor};
use crate::nvml::{self, DriverHandle, EventThread};
use crate::prepare::driver_files::Finder;
use crate::prepare::library::Library;
use crate::prepare::{Preparer, files};
use crate::release::Releaser;
use crate::restore::{Restored, keep_card_pids, restore, start_log};
use crate::state::{Key, State};
use crate::status::Syncer;
use crate::wishes;
use crate::world::{Shared, World};

/// How often conditions that nobody announces are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How long a kubelet may be away before the node says so.
const KUBELET_RESTART: Duration = Duration::from_secs(3);
/// How long a planned stop waits for the API server.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs the agent until `stop` resolves, then closes the node for new pods and ends.
///
/// # Errors
/// What keeps an agent from starting at all: no folder for its state, no thread, its port.
pub async fn run(
    settings: Settings,
    client: Client,
    stop: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    files::folder(&settings.state_dir)?;
    let state = State::open(&settings.state_dir.join("state.db")).await?;
    let Restored { world, offered, rebuild } = restore(&settings, &state).await?;
    info!(node = %world.node, slots = offered.len(), allocations = world.allocations.len(), "starting");
    let (facts, received) = mpsc::unbounded_channel();
    let mut agent = Agent {
        library: Library::new(&settings),
        shared: Shared::new(world),
        metrics: Arc::new(Metrics::default()),
        audit: Audit::new(settings.state_dir.join("audit.db")),
        state,
        settings,
        facts,
        tasks: JoinSet::new(),
    };
    agent.serve_kubelet(offered);
    agent.library.announce().await;
    let log = start_log(agent.audit.clone(), Arc::clone(&agent.shared), agent.state.clone(), rebuild);
    agent.spawn(log.then(|()| std::future::pending()));
    agent.spawn(keep_card_pids(Arc::clone(&agent.shared), agent.state.clone()));
    agent.spawn(agent.audit.append_facts(received));
    let driver = DriverHandle::start(agent.settings.nvml_library.clone(), Arc::clone(&agent.metrics))?;
    let _events = agent.watch_cards(driver.clone(), &client)?;
    let publisher = agent.serve_cluster(driver, client);

    let result = tokio::select! {
        () = stop => Ok(()),
        ended = agent.tasks.join_next() => match ended {
            Some(Ok(result)) => result,
            // A task that panicked: the message is on stderr already.
            Some(Err(source)) => Err(Error::Broken { source }),
            None => Ok(()),
        },
    };
    info!("closing the node for new pods");
    agent.shared.change(|w| w.closed = true);
    match tokio::time::timeout(FAREWELL, publisher.publish()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "node not closed");
        }
        Err(_) => warn!("node not closed: the API server does not answer"),
    }
    agent.tasks.shutdown().await;
    agent.audit.close().await;
    agent.state.close().await;
    result
}

/// What all parts share.
struct Agent {
    settings: Settings,
    shared: Arc<Shared>,
    library: Arc<Library>,
    state: State,
    audit: Audit,
    metrics: Arc<Metrics>,
    facts: mpsc::UnboundedSender<Entry>,
    tasks: JoinSet<Result<(), Error>>,
}

impl Agent {
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            Ok(())
        });
    }

    /// The device plugin, with the slots of the last run until the cards are known.
    fn serve_kubelet(&mut self, offered: Vec<String>) {
        let settings = &self.settings;
        let finder = Arc::new(Finder::new(
            settings.driver_cdi_dirs.clone(),
            settings.state_dir.join("nvidia-cdi.yaml"),
        ));
        let (offer, offered) = watch::channel(Arc::new(offered));
        let preparer = Arc::new(Preparer::new(
            settings.clone(),
            Arc::clone(&self.shared),
            self.state.clone(),
            self.audit.clone(),
            Arc::clone(&finder),
            Arc::clone(&self.library),
        ));
        let prepare: Prepare = Arc::new(move |ids| {
            let preparer = Arc::clone(&preparer);
            async move { preparer.prepare(ids).await }.boxed()
        });
        let service = Service::new(
            offered,
            prepare,
            Arc::clone(&self.shared),
            Arc::clone(&self.metrics),
            self.facts.clone(),
        );
        let (registered, is_registered) = watch::channel(false);
        self.tasks.spawn(device_plugin::run(settings.device_plugin_dir.clone(), service, registered));
        let slots = keep_slots(
            settings.clone(),
            Arc::clone(&self.shared),
            self.state.clone(),
            offer,
            is_registered.clone(),
            self.facts.clone(),
        );
        let signs = keep_signs(
            settings.clone(),
            Arc::clone(&self.shared),
            finder,
            Arc::clone(&self.library),
            self.audit.clone(),
            is_registered,
        );
        self.spawn(slots);
        self.spawn(signs);
    }

    /// Health, events and metrics of the cards.
    fn watch_cards(&mut self, driver: DriverHandle, client: &Client) -> Result<EventThread, Error> {
        let (events, xids) = nvml::listen(self.settings.nvml_library.clone(), Arc::clone(&self.metrics))?;
        let announcer = Announcer::new(
            client.clone(),
            Arc::clone(&self.shared),
            Arc::clone(&self.metrics),
            self.settings.node.clone(),
        );
        self.spawn(Bounds::new(self.settings.clone(), Arc::clone(&self.shared), announcer.clone()).keep());
        self.spawn(wishes::keep_told(Arc::clone(&self.shared), self.state.clone(), announcer.clone()));
        let latest = Latest::default();
        let monitor = Monitor {
            shared: Arc::clone(&self.shared),
            driver: driver.clone(),
            settings: self.settings.clone(),
            facts: self.facts.clone(),
            announcer: announcer.clone(),
            latest: latest.clone(),
        };
        self.tasks.spawn(monitor.run());
        let watcher = Watcher {
            driver,
            xids,
            shared: Arc::clone(&self.shared),
            audit: self.audit.clone(),
            state: self.state.clone(),
            settings: self.settings.health.clone(),
            announcer,
        };
        self.spawn(watcher.run());
        let exporter =
            Exporter { latest, node: self.settings.node.0.clone(), legacy: self.settings.legacy_metrics };
        let registry = metrics::registry(&self.metrics, &self.shared, self.audit.clone(), exporter);
        self.tasks.spawn(metrics::serve(self.settings.listen, registry, Arc::clone(&self.shared)));
        Ok(events)
    }

    /// Everything that needs the API server.
    fn serve_cluster(&mut self, driver: DriverHandle, client: Client) -> Publisher {
        let api = Watches {
            client: client.clone(),
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            facts: self.facts.clone(),
        };
        self.spawn(api.run());
        let publisher = Publisher {
            client: client.clone(),
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            audit: self.audit.clone(),
            metrics: Arc::clone(&self.metrics),
            turn: Arc::default(),
        };
        self.spawn(publisher.clone().run());
        let syncer = Syncer {
            client: client.clone(),
            shared: Arc::clone(&self.shared),
            settings: self.settings.clone(),
            metrics: Arc::clone(&self.metrics),
            facts: self.facts.clone(),
        };
        self.spawn(syncer.run());
        let releaser = Releaser {
            client,
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            audit: self.audit.clone(),
            driver,
            library: Arc::clone(&self.library),
            settings: self.settings.clone(),
            metrics: Arc::clone(&self.metrics),
        };
        self.spawn(releaser.run());
        publisher
    }
}

/// Keeps the offer to the kubelet right.
async fn keep_slots(
    settings: Settings,
    shared: Arc<Shared>,
    state: State,
    offer: watch::Sender<Arc<Vec<String>>>,
    mut registered: watch::Receiver<bool>,
    facts: mpsc::UnboundedSender<Entry>,
) {
    let mut bell = shared.bell();
    loop {
        bell.borrow_and_update();
        if let Some(cards) = shared.read(World::offer) {
            // Hiding needs to know what is in use; the kubelet's word may be newer than ours. So does offering more than
            // there is.
            let held = shared.read(|w| w.slots_in_use().len());
            if cards.usable < cards.total || held > usize::try_from(cards.usable).unwrap_or(usize::MAX) {
                read_checkpoint(&settings.checkpoint(), &shared);
            }
            let slots = slots::plan(cards, &shared.read(World::slots_in_use));
            if slots != **offer.borrow() {
                info!(slots = slots.len(), usable = cards.usable, total = cards.total, "slots changed");
                if let Err(error) = state.put(Key::Slots, &slots).await {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "slots not kept");
                }
                offer.send_replace(Arc::new(slots));
            }
        }
        tokio::select! {
            rung = bell.changed() => if rung.is_err() { return },
            turned = registered.changed() => {
                if turned.is_err() {
                    return;
                }
                if *registered.borrow_and_update() {
                    let slots = u32::try_from(offer.borrow().len()).unwrap_or(u32::MAX);
                    let event = AuditEvent::PluginRegistered { resource: COUNT.to_owned(), slots };
                    let _ = facts.send(event.into());
                }
            }
        }
    }
}

fn read_checkpoint(path: &Path, shared: &Shared) {
    let Ok(bytes) = std::fs::read(path) else { return };
    let Ok(owners) = checkpoint::parse(&bytes, COUNT) else { return };
    let ids: BTreeSet<String> = owners.into_iter().flat_map(|o| o.ids).collect();
    shared.change_if(|world| {
        let changed = world.kubelet_ids != ids;
        world.kubelet_ids = ids;
        changed
    });
}

/// Keeps the conditions right that nobody announces.
async fn keep_signs(
    settings: Settings,
    shared: Arc<Shared>,
    finder: Arc<Finder>,
    library: Arc<Library>,
    audit: Audit,
    mut registered: watch::Receiver<bool>,
) {
    loop {
        let specs = finder.find().await;
        let takes_rows = audit.check().await;
        let cdi = if specs.is_empty() {
            Err(format!("no CDI spec of kind nvidia.com/gpu {}", finder.missing()))
        } else {
            let files: Vec<_> = specs.iter().map(|s| s.file.display().to_string()).collect();
            let unread = finder.unread();
            let beside =
                if unread.is_empty() { String::new() } else { format!("; not read: {}", unread.join("; ")) };
            Ok(files.join(", ") + &beside)
        };
        let found = match library.current().await {
            Ok(Ok(library)) => Ok(library.display().to_string()),
            Ok(Err(unusable)) => Err(match settings.enforcement {
                Enforcement::Required => (unusable.code(), unusable.to_string(), true),
                Enforcement::Report => (unusable.code(), unusable.in_report_mode(), false),
            }),
            Err(error) => Err((error.code(), mullion_telemetry::source_chain(&error), true)),
        };
        let topology = topology_policy(&settings.kubelet_config);
        let rivals = device_plugin::rivals(&settings.device_plugin_dir);
        let mut is_registered = *registered.borrow_and_update();
        if !is_registered && shared.read(|w| w.signs.registered) {
            // A kubelet that restarts is back in a moment: that is not worth two reports.
            let back = tokio::time::timeout(KUBELET_RESTART, registered.wait_for(|r| *r)).await;
            is_registered = matches!(back, Ok(Ok(_)));
        }
        shared.change_if(|world| {
            let before = world.signs.clone();
            world.signs.cdi = Some(cdi);
            world.signs.library = Some(found);
            world.signs.topology = topology;
            world.signs.rivals = rivals;
            world.signs.registered = is_registered;
            if takes_rows.is_some() {
                world.signs.audit = takes_rows;
            }
            before != world.signs
        });
        if matches!(tokio::time::timeout(LOOK, registered.changed()).await, Ok(Err(_))) {
            return;
        }
    }
}

/// The kubelet's `topologyManagerPolicy`; `None` where its configuration cannot be read.
fn topology_policy(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let config: serde_json::Value = serde_saphyr::from_str(&text).ok()?;
    Some(config.get("topologyManagerPolicy").and_then(|p| p.as_str()).unwrap_or("none").to_owned())
}
