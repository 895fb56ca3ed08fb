-- One row per task: the fields of `Entry`, in their order.
CREATE TABLE IF NOT EXISTS entries (
    key TEXT NOT NULL, id TEXT NOT NULL, blob BLOB NOT NULL, priority INTEGER NOT NULL, deadline REAL,
    state TEXT NOT NULL, since REAL NOT NULL, seq INTEGER NOT NULL, due REAL,
    attempt INTEGER NOT NULL, prior INTEGER NOT NULL, losses INTEGER NOT NULL, handed_out INTEGER NOT NULL,
    receipt TEXT, worker TEXT, owner TEXT, settled TEXT, answer TEXT NOT NULL,
    tokens BLOB NOT NULL, history BLOB NOT NULL, reason TEXT, progress BLOB, result BLOB,
    PRIMARY KEY (key, id)
);

-- One index per question, over the rows that it is about: no receive and no settlement is a scan.
CREATE INDEX IF NOT EXISTS lanes ON entries (key, priority DESC, seq, since) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS agenda ON entries (key, due, seq) WHERE due IS NOT NULL;
CREATE INDEX IF NOT EXISTS leases ON entries (owner) WHERE state = 'in_flight';
CREATE INDEX IF NOT EXISTS graves ON entries (key, seq) WHERE state = 'dead';
CREATE INDEX IF NOT EXISTS memories ON entries (key, result IS NULL, since)
    WHERE state IN ('done', 'expired', 'cancelled', 'discarded');

-- One row per queue: its settings, and its ledger, which the triggers below keep.
CREATE TABLE IF NOT EXISTS queues (
    key TEXT PRIMARY KEY, settings TEXT,
    published INTEGER DEFAULT 0, waiting INTEGER DEFAULT 0, scheduled INTEGER DEFAULT 0,
    in_flight INTEGER DEFAULT 0, done INTEGER DEFAULT 0, dead INTEGER DEFAULT 0,
    expired INTEGER DEFAULT 0, cancelled INTEGER DEFAULT 0, discarded INTEGER DEFAULT 0,
    delivered INTEGER DEFAULT 0, redelivered INTEGER DEFAULT 0, retried INTEGER DEFAULT 0, lost INTEGER DEFAULT 0
) WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS entered AFTER INSERT ON entries BEGIN
    INSERT INTO queues (key) VALUES (new.key) ON CONFLICT DO NOTHING;
    UPDATE queues SET
        published = published + 1,
        waiting = waiting + (new.state = 'waiting'),
        scheduled = scheduled + (new.state = 'scheduled')
    WHERE key = new.key;
END;

-- What has ended stays counted where it ended: a retry, or a task published anew, is a new entry.
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF state ON entries BEGIN
    UPDATE queues SET
        published = published + (old.state IN ('done', 'expired', 'cancelled', 'discarded')),
        waiting = waiting + (new.state = 'waiting') - (old.state = 'waiting'),
        scheduled = scheduled + (new.state = 'scheduled') - (old.state = 'scheduled'),
        in_flight = in_flight + (new.state = 'in_flight') - (old.state = 'in_flight'),
        dead = dead + (new.state = 'dead') - (old.state = 'dead'),
        done = done + (new.state = 'done'),
        expired = expired + (new.state = 'expired'),
        cancelled = cancelled + (new.state = 'cancelled'),
        discarded = discarded + (new.state = 'discarded'),
        delivered = delivered + (new.state = 'in_flight'),
        redelivered = redelivered
            + (old.state = 'in_flight' AND (new.state = 'waiting' OR new.losses > old.losses)),
        retried = retried + (new.attempt > old.attempt),
        lost = lost + (new.losses > old.losses)
    WHERE key = new.key;
END;
