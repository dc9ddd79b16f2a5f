use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::{Error, Event, Share};

/// Hash before the first row.
pub(crate) const GENESIS: [u8; 32] = [0; 32];
/// First bytes of what is hashed: another layout of columns gets another name.
const DOMAIN: &[u8] = b"mullion-audit-row-1";

/// A card that a row is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardRow {
    /// Uuid of the card.
    pub card: String,
    /// Uuid of the MIG instance on it.
    pub mig_uuid: Option<String>,
    /// Container that gets it.
    pub container: Option<String>,
    /// Memory limit in MiB.
    pub memory_mib: Option<i64>,
    /// Share of the SMs in percent.
    pub core_percent: Option<i64>,
}

/// A row of the log, as it is stored and hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Number, without gaps from 1.
    pub seq: u64,
    /// When it was written, by the node's clock.
    pub time: Timestamp,
    /// [`Event::kind`].
    pub kind: String,
    /// Name of the node.
    pub node: String,
    /// Namespace of the pod.
    pub pod_namespace: Option<String>,
    /// Name of the pod.
    pub pod_name: Option<String>,
    /// Uid of the pod.
    pub pod_uid: Option<String>,
    /// The container.
    pub container: Option<String>,
    /// Uid of the allocation.
    pub allocation_uid: Option<String>,
    /// 16 hex digits of the grant.
    pub grant: Option<String>,
    /// Sum over the cards in MiB.
    pub memory_mib: Option<i64>,
    /// Sum over the cards in percent.
    pub core_percent: Option<i64>,
    /// Why.
    pub code: Option<String>,
    /// The event as JSON.
    pub detail: String,
    /// Trace, 32 hex digits.
    pub trace_id: Option<String>,
    /// Key of a fact that is true once.
    pub dedup_key: Option<String>,
    /// The cards it is about.
    pub cards: Vec<CardRow>,
    /// Hash of the row before; zeros for the first.
    pub prev_hash: [u8; 32],
    /// [`Self::digest`] when it was written.
    pub hash: [u8; 32],
}

impl Row {
    /// The row for `event` behind `head`.
    pub(crate) fn next(
        head: Head,
        time: Timestamp,
        node: &str,
        event: &Event,
        key: Option<&str>,
        trace_id: Option<&str>,
    ) -> Result<Self, Error> {
        let detail = serde_json::to_string(event)
            .map_err(|e| Error::Encode { kind: event.kind(), source: Arc::new(e) })?;
        let cards = card_rows(event);
        let sum = |of: fn(&CardRow) -> Option<i64>| cards.iter().filter_map(of).reduce(i64::saturating_add);
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let pod = event.pod();
        let mut row = Self {
            seq: head.seq + 1,
            time,
            kind: event.kind().to_owned(),
            node: node.to_owned(),
            pod_namespace: pod.map(|p| p.namespace.clone()),
            pod_name: pod.map(|p| p.name.clone()),
            pod_uid: pod.map(|p| p.uid.clone()),
            container: owned(event.container()),
            allocation_uid: event.allocation().map(|a| a.uid.clone()),
            grant: owned(event.grant()),
            memory_mib: sum(|c| c.memory_mib),
            core_percent: sum(|c| c.core_percent),
            code: owned(event.reason()),
            detail,
            trace_id: owned(trace_id),
            dedup_key: owned(key),
            cards,
            prev_hash: head.hash,
            hash: GENESIS,
        };
        row.hash = row.digest();
        Ok(row)
    }

    /// Nanoseconds since the epoch, the stored form. An `i64` reaches to the year 2262; clocks beyond stay there.
    pub(crate) fn time_ns(&self) -> i64 {
        i64::try_from(self.time.as_nanosecond()).unwrap_or(i64::MAX)
    }

    /// SHA-256 over a fixed name, then each column in the table's order and each card's columns. A column is one byte
    /// for its type (0 null, 1 integer, 2 text, 3 blob), its length as a little-endian `u64`, and its bytes (integers
    /// as 8 little-endian bytes), so no two different rows give the same input. `prev_hash` is the last column;
    /// `hash` itself is left out.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut columns = Columns(Sha256::new_with_prefix(DOMAIN));
        columns.integer(Some(i64::try_from(self.seq).unwrap_or(i64::MAX)));
        columns.integer(Some(self.time_ns()));
        columns.text(Some(&self.kind));
        columns.text(Some(&self.node));
        columns.text(self.pod_namespace.as_deref());
        columns.text(self.pod_name.as_deref());
        columns.text(self.pod_uid.as_deref());
        columns.text(self.container.as_deref());
        columns.text(self.allocation_uid.as_deref());
        columns.text(self.grant.as_deref());
        columns.integer(self.memory_mib);
        columns.integer(self.core_percent);
        columns.text(self.code.as_deref());
        columns.text(Some(&self.detail));
        columns.text(self.trace_id.as_deref());
        columns.text(self.dedup_key.as_deref());
        columns.integer(i64::try_from(self.cards.len()).ok());
        for card in &self.cards {
            columns.text(Some(&card.card));
            columns.text(card.mig_uuid.as_deref());
            columns.text(card.container.as_deref());
            columns.integer(card.memory_mib);
            columns.integer(card.core_percent);
        }
        columns.value(3, &self.prev_hash);
        columns.0.finalize().into()
    }

    /// The event that the row holds.
    ///
    /// # Errors
    /// [`Error::UnknownEvent`] for a kind of a newer release.
    pub fn event(&self) -> Result<Event, Error> {
        serde_json::from_str(&self.detail).map_err(|e| Error::UnknownEvent {
            seq: self.seq,
            kind: self.kind.clone(),
            source: Arc::new(e),
        })
    }

    /// The row's place in the chain.
    #[must_use]
    pub fn head(&self) -> Head {
        Head { seq: self.seq, hash: self.hash }
    }
}

struct Columns(Sha256);

impl Columns {
    fn value(&mut self, kind: u8, bytes: &[u8]) {
        self.0.update([kind]);
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn text(&mut self, text: Option<&str>) {
        match text {
            Some(text) => self.value(2, text.as_bytes()),
            None => self.value(0, &[]),
        }
    }

    fn integer(&mut self, number: Option<i64>) {
        match number {
            Some(number) => self.value(1, &number.to_le_bytes()),
            None => self.value(0, &[]),
        }
    }
}

fn card_rows(event: &Event) -> Vec<CardRow> {
    let share = |container: &str, share: &Share| CardRow {
        card: share.card.clone(),
        mig_uuid: share.mig.as_ref().and_then(|mig| mig.uuid.clone()),
        container: Some(container.to_owned()),
        memory_mib: Some(i64::try_from(share.memory_mib).unwrap_or(i64::MAX)),
        core_percent: Some(share.core_percent.into()),
    };
    match event {
        Event::AllocationReserved { containers, .. } => {
            containers.iter().flat_map(|c| c.devices.iter().map(move |d| share(&c.name, d))).collect()
        }
        Event::Prepared { container, devices, .. } => devices.iter().map(|d| share(container, d)).collect(),
        Event::HealthChanged { card, .. } => vec![bare(card)],
        Event::UsageMinute { container, cards, .. } => cards.iter().map(|c| of(container, &c.card)).collect(),
        Event::LimitBypassed { container, card, .. } => vec![of(container, card)],
        Event::InventoryChanged { cards, .. } => cards.iter().map(|card| bare(&card.uuid)).collect(),
        _ => Vec::new(),
    }
}

fn bare(card: &str) -> CardRow {
    CardRow { card: card.to_owned(), mig_uuid: None, container: None, memory_mib: None, core_percent: None }
}

fn of(container: &str, card: &str) -> CardRow {
    CardRow { container: Some(container.to_owned()), ..bare(card) }
}

/// The last row of a log: noted elsewhere, it proves that nothing before it changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Number of the row; 0 for an empty log.
    pub seq: u64,
    /// Its hash.
    pub hash: [u8; 32],
}

impl Head {
    /// Head of an empty log.
    pub const EMPTY: Self = Self { seq: 0, hash: GENESIS };
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seq, hex::encode(self.hash))
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Head {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = text.split_once(':').and_then(|(seq, hash)| {
            let mut bytes = GENESIS;
            hex::decode_to_slice(hash, &mut bytes).ok()?;
            Some(Self { seq: seq.parse().ok()?, hash: bytes })
        });
        parsed.ok_or_else(|| Error::Argument {
            flag: "--expect",
            value: text.to_owned(),
            want: "SEQ:HASH as `audit verify` prints it",
        })
    }
}
