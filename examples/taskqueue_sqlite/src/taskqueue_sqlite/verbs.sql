-- add: an entry of a task that is not known
INSERT INTO entries (key, id, body, priority, deadline, state, since, at, seq, attempt)
VALUES (:key, :id, :body, :priority, :deadline, :state, now(), :at, next(), :attempt) RETURNING *;

-- forget: a task that is not known any more
DELETE FROM entries WHERE key = :key AND id = :id;

-- known: what is remembered of a task
SELECT * FROM known WHERE key = :key AND id = :id;

-- busy: which of some queues have something to do
SELECT busy.* FROM json_each(:keys) JOIN busy ON busy.key = value;

-- expire: what has reached its deadline
UPDATE entries SET state = 'expired', since = now(), reason = 'expired' WHERE n IN (
    SELECT n FROM json_each(:keys) JOIN entries ON entries.key = value
    WHERE deadline <= now() AND due NOTNULL LIMIT 1000) RETURNING *, TRUE AS revoked;

-- promote: what has reached its time
UPDATE entries SET state = 'waiting', since = now() WHERE n IN (
    SELECT n FROM json_each(:keys) JOIN entries ON entries.key = value
    WHERE due <= now() AND state = 'scheduled' LIMIT 1000) RETURNING *;

-- take: the first entry of a queue
UPDATE entries SET state = 'in_flight', since = now(), handed_out = attempt, progress = NULL,
    receipt = :receipt, worker = :worker, owner = :owner
WHERE n = (SELECT n FROM entries WHERE state = 'waiting' AND key = :key
    AND ifnull(deadline > now(), TRUE) ORDER BY priority DESC, at, seq LIMIT 1) RETURNING *;

-- ack: a delivery was executed
UPDATE entries SET state = 'done', since = now(), settled = :mark, answer = 'ok', result = :result
WHERE key = :key AND id = :id AND receipt = :receipt RETURNING *;

-- redeliver: a delivery comes back
UPDATE entries SET state = 'waiting', since = now(), settled = :mark, answer = 'ok'
WHERE key = :key AND id = :id AND receipt = :receipt RETURNING *;

-- lose: a delivery comes back because its consumer is gone; a trigger buries what is lost too often
UPDATE entries SET state = 'waiting', since = now(), settled = :mark, answer = 'ok',
    losses = losses + 1, error = 'lost with its consumer'
WHERE key = :key AND id = :id AND receipt = :receipt RETURNING *;

-- recover: the deliveries of an earlier process, as lost
UPDATE entries SET state = 'waiting', since = now(), losses = losses + 1, error = 'lost with its consumer'
WHERE state = 'in_flight' AND owner NOT IN (SELECT value FROM json_each(:open)) RETURNING *;

-- bury: a delivery is given up
UPDATE entries SET state = 'dead', since = now(), settled = :mark, answer = 'ok', seq = next(),
    reason = :reason, error = :error
WHERE key = :key AND id = :id AND receipt = :receipt RETURNING *;

-- settled: what a settlement was answered, now or before
SELECT answer FROM entries WHERE key = :key AND id = :id AND settled = :mark;

-- token: a retry that was not asked for before
INSERT OR IGNORE INTO tokens VALUES (:n, :token) RETURNING token;

-- retry: the next attempt; it is news to the holder if it does not settle the delivery
UPDATE entries SET state = 'scheduled', since = now(), at = :at, seq = next(), prior = iif(state = 'dead', attempt, prior),
    attempt = attempt + 1, losses = 0, progress = NULL, result = NULL, reason = NULL,
    error = :error, settled = ifnull(:mark, settled)
WHERE n = :n RETURNING *, :mark ISNULL AS revoked;

-- adopt: deliveries of the same worker
UPDATE entries SET owner = :owner WHERE state = 'in_flight' AND worker = :worker
    AND receipt IN (SELECT value FROM json_each(:receipts)) RETURNING *;

-- release: what consumers hold, when they close
UPDATE entries SET state = 'waiting', since = now()
WHERE state = 'in_flight' AND owner IN (SELECT value FROM json_each(:owners)) RETURNING *;

-- progress: of a delivery
UPDATE entries SET progress = :progress WHERE key = :key AND id = :id AND receipt = :receipt RETURNING n;

-- cancel: what lives
UPDATE entries SET state = 'cancelled', since = now(), reason = 'cancelled'
WHERE key = :key AND id = :id AND state IN ('waiting', 'scheduled', 'in_flight') RETURNING *, TRUE AS revoked;

-- purge: what nobody has
UPDATE entries SET state = 'cancelled', since = now(), reason = 'purged' WHERE n IN (
    SELECT n FROM entries WHERE key = :key AND state = 'waiting'
    UNION ALL SELECT n FROM entries WHERE key = :key AND state = 'scheduled' AND due NOTNULL) RETURNING n, state;

-- dead: a page of dead letters
SELECT *, since AS failed_at FROM entries WHERE key = :key AND state = 'dead'
    AND seq > ifnull((SELECT seq FROM entries WHERE key = :key AND id = :after AND state = 'dead'), 0) ORDER BY seq LIMIT :limit;

-- redrive: a dead letter
UPDATE entries SET state = 'waiting', since = now(), at = now(), seq = next(), prior = attempt - 1, losses = 0, reason = NULL
WHERE n = :n RETURNING *;

-- discard: a dead letter
UPDATE entries SET state = 'discarded', since = now() WHERE n = :n RETURNING *;

-- failures: the last ones of an entry
SELECT attempt, at, error FROM failures WHERE entry = :n ORDER BY rowid;

-- queue: settings and ledger
SELECT *, (SELECT min(since) FROM entries WHERE state = 'waiting' AND key = :key) AS oldest_waiting
FROM queues WHERE key = :key;

-- queues: their names
SELECT key FROM queues ORDER BY key;

-- configure: a queue
INSERT INTO queues (key, settings) VALUES (:key, :settings)
ON CONFLICT (key) DO UPDATE SET settings = excluded.settings;

-- held: by each worker
SELECT worker, count(*) AS held FROM entries WHERE state = 'in_flight' GROUP BY worker;

-- clean: what is to be forgotten
DELETE FROM entries WHERE n IN (SELECT n FROM forgettable LIMIT 1000) RETURNING n;
