-- The file belongs to one process. A commit is safe from its crash at once, and from a power cut once it is flushed.
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;

CREATE TABLE IF NOT EXISTS entries (
    n INTEGER PRIMARY KEY, key TEXT NOT NULL, id TEXT NOT NULL,
    body BLOB NOT NULL,             -- the whole task, as MessagePack
    priority INTEGER NOT NULL, deadline REAL,
    state TEXT NOT NULL,
    since REAL NOT NULL,            -- when it came into this state
    error TEXT,                     -- what failed last; a trigger keeps some more
    at REAL, seq INTEGER NOT NULL,  -- its place: when it became available or will, and the order of equal times
    attempt INTEGER NOT NULL, prior INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,
    handed_out INTEGER NOT NULL DEFAULT 0,
    receipt TEXT, worker TEXT, owner TEXT,  -- the delivery that it is in, and whose: worker and subscription
    settled TEXT, answer TEXT,              -- verb and receipt of the last settlement, and what was answered
    reason TEXT, progress BLOB, result BLOB,
    due REAL AS (CASE state         -- when it leaves its state by itself: it is promoted, or expires
        WHEN 'scheduled' THEN min(at, ifnull(deadline, at))
        WHEN 'waiting' THEN deadline WHEN 'in_flight' THEN deadline END),
    over INTEGER AS (state IN ('done', 'expired', 'cancelled', 'discarded')),
    UNIQUE (key, id)
);
CREATE TABLE IF NOT EXISTS failures (
    entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE,
    attempt INTEGER NOT NULL, at REAL NOT NULL, error TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tokens (
    entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE,
    token TEXT NOT NULL,
    PRIMARY KEY (entry, token)
) WITHOUT ROWID;

-- One index per question, over the rows that it is about: no receive and no settlement is a scan.
CREATE INDEX IF NOT EXISTS lanes ON entries (key, priority DESC, at, seq, since) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS agenda ON entries (key, due) WHERE due NOTNULL;
CREATE INDEX IF NOT EXISTS deadlines ON entries (key, deadline) WHERE deadline NOTNULL AND due NOTNULL;
CREATE INDEX IF NOT EXISTS leases ON entries (owner, worker) WHERE state = 'in_flight';
CREATE INDEX IF NOT EXISTS graves ON entries (key, seq) WHERE state = 'dead';
CREATE INDEX IF NOT EXISTS memories ON entries (key, result ISNULL, since) WHERE over;
CREATE INDEX IF NOT EXISTS history ON failures (entry);

-- One row per queue: its settings, and its ledger, which the triggers below keep.
CREATE TABLE IF NOT EXISTS queues (
    key TEXT PRIMARY KEY, settings TEXT NOT NULL DEFAULT '{}', published INTEGER NOT NULL DEFAULT 0,
    waiting INTEGER NOT NULL DEFAULT 0, scheduled INTEGER NOT NULL DEFAULT 0, in_flight INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0, dead INTEGER NOT NULL DEFAULT 0, expired INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0, discarded INTEGER NOT NULL DEFAULT 0,
    delivered INTEGER NOT NULL DEFAULT 0, redelivered INTEGER NOT NULL DEFAULT 0,
    retried INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0
);
CREATE TRIGGER IF NOT EXISTS entered AFTER INSERT ON entries BEGIN
    INSERT INTO queues (key) VALUES (new.key) ON CONFLICT DO NOTHING;
    UPDATE queues SET published = published + 1, waiting = waiting + (new.state = 'waiting'),
        scheduled = scheduled + (new.state = 'scheduled') WHERE key = new.key;
END;
-- What is over stays counted where it ended: a retry after that is a new entry.
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF state ON entries BEGIN
    UPDATE queues SET
        published = published + old.over,
        waiting = waiting + (new.state = 'waiting') - (old.state = 'waiting'),
        scheduled = scheduled + (new.state = 'scheduled') - (old.state = 'scheduled'),
        in_flight = in_flight + (new.state = 'in_flight') - (old.state = 'in_flight'),
        dead = dead + (new.state = 'dead') - (old.state = 'dead'),
        done = done + (new.state = 'done'), expired = expired + (new.state = 'expired'),
        cancelled = cancelled + (new.state = 'cancelled'), discarded = discarded + (new.state = 'discarded'),
        delivered = delivered + (new.state = 'in_flight'),
        redelivered = redelivered + (old.state = 'in_flight' AND new.state = 'waiting'),
        retried = retried + (new.attempt > old.attempt),
        lost = lost + (new.losses > old.losses)
    WHERE key = new.key;
END;
CREATE TRIGGER IF NOT EXISTS released AFTER UPDATE OF state ON entries WHEN old.state = 'in_flight' BEGIN
    UPDATE entries SET receipt = NULL, worker = NULL, owner = NULL WHERE n = new.n;
END;
CREATE TRIGGER IF NOT EXISTS failed AFTER UPDATE OF error ON entries WHEN new.error NOTNULL BEGIN
    INSERT INTO failures VALUES (new.n, old.attempt, new.since, new.error);
    DELETE FROM failures WHERE entry = new.n
        AND rowid <= (SELECT rowid FROM failures WHERE entry = new.n ORDER BY rowid DESC LIMIT 1 OFFSET 20);
END;

-- Questions about the time, now(), and settings of a queue, setting(). They are asked of this process only.
CREATE TEMP VIEW known AS  -- tasks that are not to be forgotten yet; the fresh ones make a publish a duplicate
    SELECT entries.*, id AS task_id, since AS updated_at, NOT over OR now() < since + setting(settings, 'dedupe_window') AS fresh,
        result NOTNULL AND now() < since + setting(settings, 'result_ttl') AS has_result
    FROM entries JOIN queues USING (key) WHERE fresh OR has_result;
CREATE TEMP VIEW forgettable AS
    SELECT n FROM queues CROSS JOIN entries USING (key) WHERE over AND (result ISNULL) = TRUE
        AND since <= now() - setting(settings, 'dedupe_window')
    UNION ALL SELECT n FROM queues CROSS JOIN entries USING (key) WHERE over AND (result ISNULL) = FALSE
        AND since <= now() - max(setting(settings, 'dedupe_window'), setting(settings, 'result_ttl'));
CREATE TEMP VIEW busy AS   -- queues where something waits, or leaves its state by itself
    SELECT key, waiting, (SELECT min(due) FROM entries WHERE key = queues.key AND due NOTNULL) AS due
    FROM queues WHERE waiting + scheduled + in_flight > 0 AND (waiting > 0 OR due NOTNULL);
CREATE TEMP TRIGGER poisoned AFTER UPDATE OF losses ON entries
WHEN new.losses > (SELECT setting(settings, 'max_losses') FROM queues WHERE key = new.key) BEGIN
    UPDATE entries SET state = 'dead', since = now(), seq = next(), reason = 'max_losses_exceeded', answer = 'dead'
    WHERE n = new.n;
END;
