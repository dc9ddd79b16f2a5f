use std::path::Path;

use mullion_audit::{AuditReader, Head, Problem};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

use crate::given::{place, raw, rows, small_log, verify};

async fn sql(path: &Path, statement: &str) -> Result<(), sqlx::Error> {
    let mut connection = raw(path).await;
    let done = connection.execute(sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))).await.map(|_| ());
    connection.close().await.unwrap();
    done
}

#[tokio::test]
async fn sql_refuses_to_change_a_log() {
    let copy = "SELECT seq, time_ns, kind, node, pod_namespace, pod_name, pod_uid, container, allocation_uid, \
                grant_name, memory_mib, core_percent, code, detail, trace_id, dedup_key, prev_hash, hash FROM events";
    let behind = copy.replacen("seq", "6", 1);
    for (case, statement, want) in [
        ("update", "UPDATE events SET kind = 'x'".to_owned(), "append-only"),
        ("delete", "DELETE FROM events WHERE seq = 5".to_owned(), "append-only"),
        ("update of a card", "UPDATE event_cards SET card = 'x'".to_owned(), "append-only"),
        ("delete of a card", "DELETE FROM event_cards".to_owned(), "append-only"),
        // REPLACE removes rows without firing DELETE triggers.
        ("replace", format!("INSERT OR REPLACE INTO events {copy} WHERE seq = 3"), "behind the last one"),
        ("replace by key", format!("INSERT OR REPLACE INTO events {behind} WHERE seq = 2"), "dedup_key"),
        (
            "gap",
            format!("INSERT INTO events {} WHERE seq = 3", copy.replacen("seq", "8", 1)),
            "behind the last one",
        ),
        ("other predecessor", format!("INSERT INTO events {behind} WHERE seq = 3"), "hash of the last one"),
        (
            "replace of a card",
            "INSERT OR REPLACE INTO event_cards SELECT * FROM event_cards".to_owned(),
            "last row",
        ),
    ] {
        let at = place();
        small_log(&at.path).await;
        let error = sql(&at.path, &statement).await.expect_err(case).to_string();
        assert!(error.contains(want), "{case}: {error}");
        assert!(verify(&at.path).await.is_ok(), "{case}");
    }
}

#[tokio::test]
async fn changes_behind_the_triggers_are_found() {
    const UNGUARD: &str = "DROP TRIGGER events_no_update; DROP TRIGGER events_no_delete; \
                           DROP TRIGGER event_cards_no_update; DROP TRIGGER event_cards_no_delete; \
                           DROP TRIGGER event_cards_append; DROP TRIGGER events_append; ";
    for (case, statement, seq, problem) in [
        ("another pod", "UPDATE events SET pod_name = 'other' WHERE seq = 3", 3, Problem::Changed),
        ("an earlier time", "UPDATE events SET time_ns = time_ns - 1 WHERE seq = 2", 2, Problem::Changed),
        (
            "another reason",
            "UPDATE events SET detail = replace(detail, 'slot-0001', 'slot-0002') WHERE seq = 4",
            4,
            Problem::Changed,
        ),
        ("another card", "UPDATE event_cards SET card = 'GPU-x' WHERE seq = 3", 3, Problem::Changed),
        ("one card less", "DELETE FROM event_cards WHERE seq = 2", 2, Problem::Changed),
        (
            "one card more",
            "INSERT INTO event_cards VALUES (5, 0, 'GPU-x', NULL, NULL, 1, 1)",
            5,
            Problem::Changed,
        ),
        (
            "text moved to the next column",
            "UPDATE events SET pod_namespace = 'teamt', pod_name = 'rain' WHERE seq = 3",
            3,
            Problem::Changed,
        ),
        (
            "a row taken out",
            "DELETE FROM event_cards WHERE seq = 3; DELETE FROM events WHERE seq = 3",
            4,
            Problem::Gap { expected: 3 },
        ),
        ("the last row cut off", "DELETE FROM events WHERE seq = 5", 5, Problem::CutTail { highest: 5 }),
        (
            "all rows cut off",
            "DELETE FROM event_cards; DELETE FROM events",
            1,
            Problem::CutTail { highest: 5 },
        ),
        ("a hash written anew", "UPDATE events SET hash = prev_hash WHERE seq = 4", 4, Problem::Changed),
        ("another predecessor", "UPDATE events SET prev_hash = hash WHERE seq = 4", 4, Problem::Predecessor),
    ] {
        let at = place();
        small_log(&at.path).await;
        sql(&at.path, &format!("{UNGUARD}{statement}")).await.expect(case);
        let found = verify(&at.path).await;
        assert_eq!(found.findings[0].seq, Some(seq), "{case}: {found:?}");
        assert_eq!(found.findings[0].problem, problem, "{case}");
        assert!(
            found.findings.iter().any(|f| matches!(f.problem, Problem::Unguarded { .. })),
            "{case}: missing triggers are reported: {found:?}"
        );
    }
}

#[tokio::test]
async fn a_rewritten_log_shows_against_a_head_noted_elsewhere() {
    let at = place();
    small_log(&at.path).await;
    let noted = rows(&at.path).await[3].head();
    let mut reader = AuditReader::open(&at.path).await.unwrap();
    assert!(reader.verify(Some(noted)).await.unwrap().is_ok());
    assert!(reader.verify(Some(Head::EMPTY)).await.unwrap().is_ok());

    // The same events at other times: a valid chain, and not the one that was noted.
    let other = place();
    small_log(&other.path).await;
    assert!(verify(&other.path).await.is_ok());
    let mut reader = AuditReader::open(&other.path).await.unwrap();
    let found = reader.verify(Some(noted)).await.unwrap();
    assert_eq!(found.findings[0].problem, Problem::OtherHead { expected: noted });

    let beyond = Head { seq: 6, ..noted };
    let found = reader.verify(Some(beyond)).await.unwrap();
    assert_eq!(found.findings[0].problem, Problem::OtherHead { expected: beyond }, "a head behind the end");
}

#[tokio::test]
async fn a_damaged_file_is_reported_and_never_a_crash() {
    let at = place();
    small_log(&at.path).await;
    let good = std::fs::read(&at.path).unwrap();
    let mut found_damage = 0;
    // Every 512 bytes 64 are overwritten: page headers, b-tree cells, text, hashes, the schema.
    for start in (0..good.len()).step_by(512) {
        let mut bad = good.clone();
        let end = (start + 64).min(bad.len());
        for byte in &mut bad[start..end] {
            *byte ^= 0x5a;
        }
        let copy = place();
        std::fs::write(&copy.path, &bad).unwrap();
        match AuditReader::open(&copy.path).await {
            Ok(mut reader) => match reader.verify(None).await {
                Ok(found) => found_damage += usize::from(!found.is_ok()),
                Err(error) => {
                    assert!(
                        ["AuditCorrupt", "AuditNotALog", "AuditIo"].contains(&error.code()),
                        "{start}: {error}"
                    );
                    found_damage += 1;
                }
            },
            Err(error) => {
                assert!(
                    ["AuditCorrupt", "AuditNotALog", "AuditIo"].contains(&error.code()),
                    "{start}: {error}"
                );
                found_damage += 1;
            }
        }
    }
    // Free space inside pages may be overwritten without harm; rows and structures may not.
    assert!(found_damage > 10, "{found_damage} of {}", good.len() / 512);
}

#[tokio::test]
async fn a_flipped_byte_of_a_row_in_the_file_is_found() {
    let at = place();
    small_log(&at.path).await;
    let mut bytes = std::fs::read(&at.path).unwrap();
    let needle = b"no allocation for slot-0001";
    let place = bytes.windows(needle.len()).position(|w| w == needle).unwrap();
    bytes[place] ^= 0x01;
    std::fs::write(&at.path, bytes).unwrap();
    let found = verify(&at.path).await;
    assert_eq!((found.findings[0].seq, &found.findings[0].problem), (Some(4), &Problem::Changed));
    assert_eq!(found.rows, 3);
}
