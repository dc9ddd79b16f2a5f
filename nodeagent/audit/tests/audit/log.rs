use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use mullion_audit::{AuditLog, AuditReader, Entry, Event, Filter, Options};
use sqlx::{Connection as _, Executor as _};

use crate::given::{open, place, prepared, raw, refused, released, rows, share, small_log, verify};

#[tokio::test]
async fn what_was_appended_is_read_back_and_chained() {
    let at = place();
    small_log(&at.path).await;
    let rows = rows(&at.path).await;
    let kinds: Vec<&str> = rows.iter().map(|row| row.kind.as_str()).collect();
    assert_eq!(kinds, ["AgentStarted", "AllocationReserved", "Prepared", "PrepareRefused", "Released"]);
    let third = &rows[2];
    assert_eq!(third.event().unwrap(), prepared("train", "main", &[share(crate::given::CARD_A, 3000)]));
    assert_eq!((third.memory_mib, third.core_percent), (Some(3000), Some(30)));
    assert_eq!(third.prev_hash, rows[1].hash);
    assert_eq!(third.cards[0].card, crate::given::CARD_A);
    let found = verify(&at.path).await;
    assert!(found.is_ok(), "{found:?}");
    assert_eq!((found.rows, found.head), (5, rows[4].head()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_appends_at_once_are_numbered_without_gaps() {
    let at = place();
    let log = open(&at.path).await;
    let tasks: Vec<_> = (0..1000)
        .map(|i| {
            let log = log.clone();
            tokio::spawn(async move { (i, log.append(refused(&format!("try {i}"))).await.unwrap()) })
        })
        .collect();
    let mut numbers = BTreeSet::new();
    for task in tasks {
        let (i, seq) = task.await.unwrap();
        numbers.insert((seq, format!("try {i}")));
    }
    log.close().await;
    let rows = rows(&at.path).await;
    let written: BTreeSet<_> = rows
        .iter()
        .map(|row| match row.event().unwrap() {
            Event::PrepareRefused { message, .. } => (row.seq, message),
            other => unreachable!("{other:?}"),
        })
        .collect();
    assert_eq!(written, numbers);
    assert_eq!(written.first().map(|w| w.0), Some(1));
    assert_eq!(written.last().map(|w| w.0), Some(1000));
    assert!(verify(&at.path).await.is_ok());
}

#[tokio::test]
async fn a_log_goes_on_where_it_ended() {
    let at = place();
    small_log(&at.path).await;
    let log = open(&at.path).await;
    assert_eq!(log.health().head.seq, 5);
    assert_eq!(log.append(refused("again")).await.unwrap(), 6);
    log.close().await;
    assert!(verify(&at.path).await.is_ok());
}

#[tokio::test]
async fn a_fact_that_is_true_once_is_written_once() {
    let at = place();
    let log = open(&at.path).await;
    let first = log.append(released("train")).await.unwrap();
    assert_eq!(log.append(released("train")).await.unwrap(), first, "same fact");
    let both = log.append_many(vec![released("other").into(), released("other").into()]).await.unwrap();
    assert_eq!(both, [2, 2], "same fact in one request");
    assert_eq!(log.append(refused("x")).await.unwrap(), 3);
    assert_eq!(log.append(refused("x")).await.unwrap(), 4, "what can happen again is written again");

    let reused = Entry::from(refused("y")).keyed("allocation/allocation-of-train/released");
    let error = log.append_many(vec![refused("z").into(), reused]).await.unwrap_err();
    assert_eq!(error.code(), "AuditKeyReused", "{error}");
    assert_eq!(log.append(refused("w")).await.unwrap(), 5, "a refused request leaves nothing");
    assert!(log.health().is_ok());
    log.close().await;
    assert_eq!(rows(&at.path).await.len(), 5);
}

#[tokio::test]
async fn a_second_writer_is_kept_out_until_the_first_ends() {
    let at = place();
    let first = open(&at.path).await;
    let options = || Options { busy_timeout: Duration::from_millis(60), ..Options::new(&at.path, "node-a") };
    let error = AuditLog::open(options(), Timestamp::now).await.unwrap_err();
    assert_eq!(error.code(), "AuditBusy", "{error}");
    first.close().await;
    let second = AuditLog::open(options(), Timestamp::now).await.unwrap();
    assert_eq!(second.append(refused("x")).await.unwrap(), 1);
}

#[tokio::test]
async fn a_foreign_lock_is_reported_and_survived() {
    let at = place();
    let options = Options { busy_timeout: Duration::from_millis(100), ..Options::new(&at.path, "node-a") };
    let log = AuditLog::open(options, Timestamp::now).await.unwrap();
    let mut other = raw(&at.path).await;
    other.execute("BEGIN IMMEDIATE").await.unwrap();
    let error = log.append(refused("while locked")).await.unwrap_err();
    assert_eq!(error.code(), "AuditBusy", "{error}");
    assert_eq!(log.health().failure.map(|f| (f.code, f.refused)), Some(("AuditBusy", 1)));
    other.execute("ROLLBACK").await.unwrap();
    other.close().await.unwrap();
    // The gap itself is a row.
    assert_eq!(log.append(refused("after")).await.unwrap(), 2);
    assert!(log.health().is_ok());
    log.close().await;
    let rows = rows(&at.path).await;
    assert_eq!((rows[0].kind.as_str(), rows[0].code.as_deref()), ("AuditGap", Some("AuditBusy")));
    assert!(verify(&at.path).await.is_ok());
}

#[tokio::test]
async fn a_live_log_can_be_read() {
    let at = place();
    let log = open(&at.path).await;
    let mut reader = AuditReader::open(&at.path).await.unwrap();
    for round in 1..=3 {
        log.append(refused("x")).await.unwrap();
        assert_eq!(reader.head().await.unwrap().seq, round);
        assert!(reader.verify(None).await.unwrap().is_ok());
        assert_eq!(reader.list(&Filter::default()).await.unwrap().len() as u64, round);
    }
    log.close().await;
}

#[tokio::test]
async fn appends_to_a_closed_log_are_refused() {
    let at = place();
    let log = open(&at.path).await;
    let clone = log.clone();
    log.close().await;
    assert_eq!(clone.append(refused("late")).await.unwrap_err().code(), "AuditClosed");
}

/// Rows in a file without a name would be acknowledged and lost.
#[tokio::test]
async fn a_log_that_is_taken_from_under_its_writer_takes_no_row_until_it_is_back() {
    let at = place();
    let log = open(&at.path).await;
    log.append(refused("before")).await.unwrap();
    let aside = at.path.with_extension("aside");
    for (case, other) in [("removed", None), ("replaced", Some(b"another".as_slice()))] {
        std::fs::rename(&at.path, &aside).unwrap();
        if let Some(bytes) = other {
            std::fs::write(&at.path, bytes).unwrap();
        }
        assert_eq!(log.append(refused(case)).await.unwrap_err().code(), "AuditReplaced", "{case}");
        assert!(!log.health().is_ok(), "{case}");
        std::fs::rename(&aside, &at.path).unwrap();
        log.append(refused("back")).await.unwrap();
        assert!(log.health().is_ok(), "{case}");
    }
    log.close().await;
    let kinds: Vec<String> = rows(&at.path).await.into_iter().map(|row| row.kind).collect();
    assert_eq!(kinds, ["PrepareRefused", "AuditGap", "PrepareRefused", "AuditGap", "PrepareRefused"]);
    assert!(verify(&at.path).await.is_ok());
}

#[tokio::test]
async fn files_that_are_no_log_are_left_alone() {
    let at = place();
    std::fs::write(&at.path, b"this is not a database, whatever its name says").unwrap();
    let error = AuditLog::open(Options::new(&at.path, "node-a"), Timestamp::now).await.unwrap_err();
    assert_eq!(error.code(), "AuditNotALog", "{error}");
    assert_eq!(std::fs::read(&at.path).unwrap(), b"this is not a database, whatever its name says");

    let other = place();
    let mut state = raw_new(&other.path).await;
    state.execute("CREATE TABLE grants (name TEXT)").await.unwrap();
    state.close().await.unwrap();
    let error = AuditLog::open(Options::new(&other.path, "node-a"), Timestamp::now).await.unwrap_err();
    assert_eq!(error.code(), "AuditNotALog", "another database: {error}");

    let missing = at.path.with_file_name("absent").join("audit.db");
    let error = AuditLog::open(Options::new(&missing, "node-a"), Timestamp::now).await.unwrap_err();
    assert_eq!(error.code(), "AuditIo", "no folder: {error}");
}

async fn raw_new(path: &std::path::Path) -> sqlx::SqliteConnection {
    std::fs::File::create(path).unwrap();
    raw(path).await
}

#[tokio::test]
async fn a_log_of_a_newer_release_is_not_written_to() {
    let at = place();
    small_log(&at.path).await;
    let mut newer = raw(&at.path).await;
    newer
        .execute("INSERT INTO _sqlx_migrations VALUES (99, 'newer', datetime(), TRUE, x'00', 0)")
        .await
        .unwrap();
    newer.close().await.unwrap();
    let error = AuditLog::open(Options::new(&at.path, "node-a"), Timestamp::now).await.unwrap_err();
    assert_eq!(error.code(), "AuditSchema", "{error}");
    assert!(verify(&at.path).await.is_ok(), "it can still be read");
}
