//! The shell around the cards' health: looks at the driver, listens to XIDs, tells the world.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use mullion_audit::{CardState, Entry, Event as AuditEvent};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::{Turn, hear, take_in};
use crate::audit::Audit;
use crate::config::HealthSettings;
use crate::error::Error;
use crate::events::Announcer;
use crate::nvml::{DriverHandle, XidSeen};
use crate::state::{Key, State};
use crate::world::{Driver, Shared};

/// Pause before the driver is asked a second time.
const HICCUP: std::time::Duration = std::time::Duration::from_millis(500);

/// Rows that wait for a log that takes none, at most.
const MOST_ROWS: usize = 256;

/// What is still to be written.
#[derive(Default)]
struct Due {
    /// Into the audit log.
    rows: Vec<Entry>,
    /// The cards, into the state file.
    cards: bool,
}

/// Looks at the driver, listens to XIDs, tells the world.
pub struct Watcher {
    /// The driver.
    pub driver: DriverHandle,
    /// XIDs as they come.
    pub xids: mpsc::UnboundedReceiver<XidSeen>,
    /// The world.
    pub shared: Arc<Shared>,
    /// The audit log.
    pub audit: Audit,
    /// The state file.
    pub state: State,
    /// How to judge.
    pub settings: HealthSettings,
    /// Who tells Kubernetes.
    pub announcer: Announcer,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Watcher {
    /// Looks and listens until dropped.
    pub async fn run(mut self) {
        let mut ticks = tokio::time::interval(self.settings.poll);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut listening = true;
        let mut due = Due::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => self.look(&mut due).await,
                xid = self.xids.recv(), if listening => match xid {
                    Some(seen) => self.xid(seen, &mut due).await,
                    None => listening = false,
                },
            }
        }
    }

    async fn look(&self, due: &mut Due) {
        let now = Timestamp::now();
        let mut result = self.driver.survey().await;
        if result.is_err() {
            // The driver was loaded anew; one failure is a hiccup.
            tokio::time::sleep(HICCUP).await;
            result = self.driver.survey().await;
        }
        let turns = match result {
            Ok(survey) => {
                let mut turns = BTreeMap::new();
                let mut changed = false;
                self.shared.change_if(|world| {
                    let before = (world.cards.clone(), world.driver.clone(), world.refused.len());
                    turns = take_in(world, &survey, &self.settings, now);
                    changed = before != (world.cards.clone(), world.driver.clone(), world.refused.len());
                    if changed {
                        world.refold_node();
                    }
                    changed
                });
                due.cards |= changed;
                turns
            }
            Err(error) => {
                self.driver_down(&error);
                BTreeMap::new()
            }
        };
        self.tell(turns, due).await;
    }

    /// Cards for the next run in this boot, once what happened to them is in the audit log: to that run it is nothing new.
    async fn keep(&self, due: &mut Due) {
        if !due.rows.is_empty() {
            if let Err(error) = self.audit.append_many(due.rows.clone()).await {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "health not audited");
                let surplus = due.rows.len().saturating_sub(MOST_ROWS);
                due.rows.drain(..surplus);
                return;
            }
            due.rows.clear();
        }
        let Some(cards) = self.shared.read(|w| w.cards.clone()).filter(|_| due.cards) else { return };
        match self.state.put(Key::Cards, &cards).await {
            Ok(()) => due.cards = false,
            Err(error) => {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "cards not kept");
            }
        }
    }

    fn driver_down(&self, error: &Error) {
        let reason = match error {
            Error::Driver { detail, .. } if !detail.is_empty() => format!("{error}: {detail}"),
            _ => error.to_string(),
        };
        let down = Driver::Down { code: error.code(), reason };
        self.shared.change_if(|world| {
            if world.driver == down {
                return false;
            }
            warn!(code = error.code(), %error, "the driver does not answer");
            world.driver = down;
            world.refold_node();
            true
        });
    }

    async fn xid(&self, seen: XidSeen, due: &mut Due) {
        let now = Timestamp::now();
        info!(card = seen.card, xid = seen.xid, "XID");
        let mut turns = BTreeMap::new();
        let mut changed = false;
        self.shared.change_if(|world| {
            let card = seen.card.clone();
            let (moved, turn) = hear(world, seen, &self.settings, now);
            turns.extend(turn.map(|turn| (card, turn)));
            changed = moved;
            if changed {
                world.refold_node();
            }
            changed
        });
        due.cards |= changed;
        self.tell(turns, due).await;
    }

    /// Each turn once to the log, the audit log and Kubernetes.
    async fn tell(&self, turns: BTreeMap<String, Turn>, due: &mut Due) {
        for (card, turn) in turns {
            let (state, xid, message) = match &turn {
                Turn::Failed(illness) => (CardState::Unhealthy, illness.xid, illness.message.clone()),
                Turn::Recovered => (CardState::Healthy, None, "it answers again".to_owned()),
            };
            warn!(card, ?state, reason = message, "health of a card changed");
            let event =
                AuditEvent::HealthChanged { card: card.clone(), state, xid, message: message.clone() };
            due.rows.push(event.into());
            self.announcer.card(&card, matches!(turn, Turn::Failed(_)), &message);
        }
        self.keep(due).await;
    }
}
