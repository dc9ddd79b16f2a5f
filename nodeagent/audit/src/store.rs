//! Rows in and out of SQLite; the only place that knows column names.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection};

use crate::chain::{CardRow, GENESIS, Head, Row};

/// `PRAGMA application_id` of an audit log, "MULL"; set by the first migration.
pub(crate) const APPLICATION_ID: i32 = 0x4D55_4C4C;

/// All columns of `events`, for a WHERE and an ORDER BY to follow.
pub(crate) const SELECT_EVENTS: &str = "SELECT e.seq, e.time_ns, e.kind, e.node, e.pod_namespace, e.pod_name, \
     e.pod_uid, e.container, e.allocation_uid, e.grant_name, e.memory_mib, e.core_percent, e.code, e.detail, \
     e.trace_id, e.dedup_key, e.prev_hash, e.hash FROM events e ";

/// Cards are fetched for this many rows at a time; SQLite allows 32,766 parameters.
const CARDS_PER_QUERY: usize = 1000;

pub(crate) async fn head(connection: &mut SqliteConnection) -> Result<Head, sqlx::Error> {
    let row = sqlx::query("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")
        .fetch_optional(connection)
        .await?;
    row.map_or(Ok(Head::EMPTY), |row| Ok(Head { seq: number(&row, "seq")?, hash: hash(&row, "hash")? }))
}

/// The number and kind of the row that has `key`.
pub(crate) async fn keyed(
    connection: &mut SqliteConnection,
    key: &str,
) -> Result<Option<(u64, String)>, sqlx::Error> {
    let row = sqlx::query("SELECT seq, kind FROM events WHERE dedup_key = ?")
        .bind(key)
        .fetch_optional(connection)
        .await?;
    row.map(|row| Ok((number(&row, "seq")?, row.try_get("kind")?))).transpose()
}

/// Grants that were issued and neither filled nor withdrawn, with when their row was written.
pub(crate) async fn open_grants(
    connection: &mut SqliteConnection,
) -> Result<BTreeMap<String, Timestamp>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT grant_name, time_ns FROM events WHERE kind = 'GrantIssued' AND grant_name NOT IN \
         (SELECT grant_name FROM events WHERE kind IN ('Prepared', 'GrantWithdrawn') AND grant_name IS NOT NULL)",
    )
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok((row.try_get("grant_name")?, time(row)?))).collect()
}

pub(crate) async fn insert(connection: &mut SqliteConnection, row: &Row) -> Result<(), sqlx::Error> {
    let seq = i64::try_from(row.seq).unwrap_or(i64::MAX);
    sqlx::query(
        "INSERT INTO events (seq, time_ns, kind, node, pod_namespace, pod_name, pod_uid, container, allocation_uid, \
         grant_name, memory_mib, core_percent, code, detail, trace_id, dedup_key, prev_hash, hash) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(seq)
    .bind(row.time_ns())
    .bind(&row.kind)
    .bind(&row.node)
    .bind(&row.pod_namespace)
    .bind(&row.pod_name)
    .bind(&row.pod_uid)
    .bind(&row.container)
    .bind(&row.allocation_uid)
    .bind(&row.grant)
    .bind(row.memory_mib)
    .bind(row.core_percent)
    .bind(&row.code)
    .bind(&row.detail)
    .bind(&row.trace_id)
    .bind(&row.dedup_key)
    .bind(row.prev_hash.as_slice())
    .bind(row.hash.as_slice())
    .execute(&mut *connection)
    .await?;
    for (ordinal, card) in (0_i64..).zip(&row.cards) {
        sqlx::query(
            "INSERT INTO event_cards (seq, ordinal, card, mig_uuid, container, memory_mib, core_percent) \
             VALUES (?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(seq)
        .bind(ordinal)
        .bind(&card.card)
        .bind(&card.mig_uuid)
        .bind(&card.container)
        .bind(card.memory_mib)
        .bind(card.core_percent)
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// Runs a query that starts with [`SELECT_EVENTS`] and adds each row's cards. A row and its cards were committed
/// together, so whoever sees the row sees its cards.
pub(crate) async fn fetch(
    connection: &mut SqliteConnection,
    mut query: QueryBuilder<Sqlite>,
) -> Result<Vec<Row>, sqlx::Error> {
    let found = query.build().fetch_all(&mut *connection).await?;
    let mut rows = found.iter().map(event_row).collect::<Result<Vec<_>, _>>()?;
    for part in rows.chunks_mut(CARDS_PER_QUERY) {
        let mut cards = cards_of(connection, part).await?;
        for row in part {
            row.cards = cards.remove(&row.seq).unwrap_or_default();
        }
    }
    Ok(rows)
}

async fn cards_of(
    connection: &mut SqliteConnection,
    rows: &[Row],
) -> Result<BTreeMap<u64, Vec<CardRow>>, sqlx::Error> {
    let mut query = QueryBuilder::<Sqlite>::new(
        "SELECT seq, card, mig_uuid, container, memory_mib, core_percent FROM event_cards WHERE seq IN (",
    );
    let mut numbers = query.separated(", ");
    for row in rows {
        numbers.push_bind(i64::try_from(row.seq).unwrap_or(i64::MAX));
    }
    query.push(") ORDER BY seq, ordinal");
    let mut cards: BTreeMap<u64, Vec<CardRow>> = BTreeMap::new();
    for row in query.build().fetch_all(connection).await? {
        cards.entry(number(&row, "seq")?).or_default().push(CardRow {
            card: row.try_get("card")?,
            mig_uuid: row.try_get("mig_uuid")?,
            container: row.try_get("container")?,
            memory_mib: row.try_get("memory_mib")?,
            core_percent: row.try_get("core_percent")?,
        });
    }
    Ok(cards)
}

fn event_row(row: &SqliteRow) -> Result<Row, sqlx::Error> {
    Ok(Row {
        seq: number(row, "seq")?,
        time: time(row)?,
        kind: row.try_get("kind")?,
        node: row.try_get("node")?,
        pod_namespace: row.try_get("pod_namespace")?,
        pod_name: row.try_get("pod_name")?,
        pod_uid: row.try_get("pod_uid")?,
        container: row.try_get("container")?,
        allocation_uid: row.try_get("allocation_uid")?,
        grant: row.try_get("grant_name")?,
        memory_mib: row.try_get("memory_mib")?,
        core_percent: row.try_get("core_percent")?,
        code: row.try_get("code")?,
        detail: row.try_get("detail")?,
        trace_id: row.try_get("trace_id")?,
        dedup_key: row.try_get("dedup_key")?,
        cards: Vec::new(),
        prev_hash: hash(row, "prev_hash")?,
        hash: hash(row, "hash")?,
    })
}

fn time(row: &SqliteRow) -> Result<Timestamp, sqlx::Error> {
    let time_ns: i64 = row.try_get("time_ns")?;
    Timestamp::from_nanosecond(time_ns.into()).map_err(|e| sqlx::Error::Decode(e.into()))
}

fn number(row: &SqliteRow, column: &str) -> Result<u64, sqlx::Error> {
    let number: i64 = row.try_get(column)?;
    u64::try_from(number).map_err(|e| sqlx::Error::Decode(e.into()))
}

fn hash(row: &SqliteRow, column: &str) -> Result<[u8; 32], sqlx::Error> {
    let bytes: &[u8] = row.try_get(column)?;
    let mut hash = GENESIS;
    let right = bytes.len() == hash.len();
    right.then(|| hash.copy_from_slice(bytes)).ok_or_else(|| {
        sqlx::Error::Decode(format!("{column} has {} bytes instead of 32", bytes.len()).into())
    })?;
    Ok(hash)
}
