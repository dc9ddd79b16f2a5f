//! Events and logs to test with.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jiff::Timestamp;
use mullion_audit::{
    AllocationRef, AuditLog, AuditReader, ContainerKind, ContainerShares, Event, Options, PodRef, Row, Share,
    Verification,
};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, SqliteConnection};

pub const CARD_A: &str = "GPU-aaaaaaaa-0000-4000-8000-000000000001";
pub const CARD_B: &str = "GPU-bbbbbbbb-0000-4000-8000-000000000002";

/// A folder that goes away with the test, and a log's path in it.
pub struct Place {
    _folder: tempfile::TempDir,
    pub path: PathBuf,
}

pub fn place() -> Place {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.db");
    Place { _folder: folder, path }
}

pub async fn open(path: &Path) -> AuditLog {
    AuditLog::open(Options::new(path, "node-a"), Timestamp::now).await.unwrap()
}

/// A clock that stands where it was set.
#[derive(Clone, Default)]
pub struct Hands(Arc<AtomicI64>);

impl Hands {
    pub fn set(&self, time: &str) {
        let time: Timestamp = time.parse().unwrap();
        self.0.store(time.as_second(), Ordering::SeqCst);
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0.load(Ordering::SeqCst)).unwrap()
    }
}

pub async fn verify(path: &Path) -> Verification {
    AuditReader::open(path).await.unwrap().verify(None).await.unwrap()
}

pub async fn rows(path: &Path) -> Vec<Row> {
    AuditReader::open(path).await.unwrap().list(&mullion_audit::Filter::default()).await.unwrap()
}

/// A plain SQLite connection, as somebody with the sqlite3 tool has.
pub async fn raw(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new().filename(path).connect().await.unwrap()
}

pub fn pod(name: &str) -> PodRef {
    PodRef { namespace: "team".to_owned(), name: name.to_owned(), uid: format!("uid-of-{name}") }
}

pub fn allocation(pod: &str) -> AllocationRef {
    AllocationRef { uid: format!("allocation-of-{pod}"), name: format!("{pod}-0123abcd") }
}

pub fn share(card: &str, memory_mib: u64) -> Share {
    Share { card: card.to_owned(), memory_mib, core_percent: 30, mig: None }
}

pub fn container(name: &str, kind: ContainerKind, devices: &[Share]) -> ContainerShares {
    ContainerShares { name: name.to_owned(), kind, devices: devices.to_vec() }
}

pub fn reserved(name: &str, containers: Vec<ContainerShares>) -> Event {
    Event::AllocationReserved {
        allocation: allocation(name),
        pod: pod(name),
        sequence: 1,
        created: 0,
        containers,
    }
}

pub fn prepared(name: &str, container: &str, devices: &[Share]) -> Event {
    Event::Prepared {
        allocation: allocation(name),
        pod: pod(name),
        container: container.to_owned(),
        container_kind: ContainerKind::App,
        grant: format!("{:0>16}", name.len()),
        device_ids: vec!["slot-0000".to_owned()],
        devices: devices.to_vec(),
    }
}

pub fn released(name: &str) -> Event {
    Event::Released {
        allocation: allocation(name),
        pod: pod(name),
        code: "PodFinished".to_owned(),
        observation: 1,
    }
}

pub fn refused(text: &str) -> Event {
    Event::PrepareRefused {
        allocation: None,
        pod: Some(pod("busy")),
        container: Some("main".to_owned()),
        device_ids: vec!["slot-0001".to_owned()],
        code: "NoAllocation".to_owned(),
        message: text.to_owned(),
    }
}

/// Events of the kinds that hold and free cards, on one log.
pub async fn small_log(path: &Path) {
    let log = open(path).await;
    for event in [
        Event::AgentStarted { boot_id: "boot".to_owned(), agent_version: "0.1.0".to_owned() },
        reserved("train", vec![container("main", ContainerKind::App, &[share(CARD_A, 3000)])]),
        prepared("train", "main", &[share(CARD_A, 3000)]),
        refused("no allocation for slot-0001"),
        released("train"),
    ] {
        log.append(event).await.unwrap();
    }
    log.close().await;
}
