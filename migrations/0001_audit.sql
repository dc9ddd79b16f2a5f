-- The audit log of one node: every fact its agent acted on or observed, in the order in which they became durable.
-- Rows are only ever added. Each row carries the hash of the one before it (see nodeagent/audit/src/chain.rs for what
-- is hashed and how).

-- "MULL": tells this file from other SQLite files.
PRAGMA application_id = 0x4D554C4C;

CREATE TABLE events (
    -- Without gaps from 1. AUTOINCREMENT keeps the highest number ever used in sqlite_sequence, which shows a tail
    -- that was cut off.
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    -- Nanoseconds since 1970-01-01T00:00:00Z by the node's clock when the row was written.
    time_ns        INTEGER NOT NULL,
    kind           TEXT    NOT NULL,
    node           TEXT    NOT NULL,
    pod_namespace  TEXT,
    pod_name       TEXT,
    pod_uid        TEXT,
    container      TEXT,
    allocation_uid TEXT,
    grant_name     TEXT,
    -- Sums over the row's cards; each card's own figures are in event_cards.
    memory_mib     INTEGER,
    core_percent   INTEGER,
    -- Why something was refused, voided or released; PascalCase.
    code           TEXT,
    -- The whole event as JSON: what the ledger is rebuilt from. The columns above are for queries.
    detail         TEXT    NOT NULL,
    trace_id       TEXT,
    -- Names a fact that can be true only once, so that a step repeated after a crash does not add it again.
    dedup_key      TEXT UNIQUE,
    prev_hash      BLOB    NOT NULL CHECK (length(prev_hash) = 32),
    hash           BLOB    NOT NULL CHECK (length(hash) = 32)
) STRICT;

CREATE TABLE event_cards (
    seq          INTEGER NOT NULL REFERENCES events (seq),
    ordinal      INTEGER NOT NULL,
    -- The card, also where a MIG instance of it was meant.
    card         TEXT    NOT NULL,
    mig_uuid     TEXT,
    container    TEXT,
    memory_mib   INTEGER,
    core_percent INTEGER,
    PRIMARY KEY (seq, ordinal)
) STRICT, WITHOUT ROWID;

CREATE INDEX events_time ON events (time_ns);
CREATE INDEX events_kind ON events (kind, seq);
CREATE INDEX events_pod ON events (pod_namespace, pod_name, seq);
CREATE INDEX events_allocation ON events (allocation_uid, seq) WHERE allocation_uid IS NOT NULL;
CREATE INDEX event_cards_card ON event_cards (card, seq);
CREATE INDEX event_cards_mig ON event_cards (mig_uuid, seq) WHERE mig_uuid IS NOT NULL;

-- INSERT OR REPLACE removes rows without firing DELETE triggers, so what it could replace is refused on the way in.
CREATE TRIGGER events_append BEFORE INSERT ON events
BEGIN
    SELECT RAISE(ABORT, 'the audit log takes a row only behind the last one')
    WHERE NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM events);
    SELECT RAISE(ABORT, 'the audit log already has this dedup_key')
    WHERE EXISTS (SELECT 1 FROM events WHERE dedup_key = NEW.dedup_key);
    SELECT RAISE(ABORT, 'the audit log takes a row only with the hash of the last one')
    WHERE NEW.prev_hash IS NOT
          coalesce((SELECT hash FROM events WHERE seq = NEW.seq - 1), zeroblob(32));
END;

CREATE TRIGGER events_no_update BEFORE UPDATE ON events
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

CREATE TRIGGER events_no_delete BEFORE DELETE ON events
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

CREATE TRIGGER event_cards_append BEFORE INSERT ON event_cards
BEGIN
    SELECT RAISE(ABORT, 'the audit log takes cards only for its last row')
    WHERE NEW.seq IS NOT (SELECT max(seq) FROM events);
    SELECT RAISE(ABORT, 'the audit log is append-only')
    WHERE EXISTS (SELECT 1 FROM event_cards WHERE seq = NEW.seq AND ordinal = NEW.ordinal);
END;

CREATE TRIGGER event_cards_no_update BEFORE UPDATE ON event_cards
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

CREATE TRIGGER event_cards_no_delete BEFORE DELETE ON event_cards
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
