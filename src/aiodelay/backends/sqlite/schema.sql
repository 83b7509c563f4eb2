-- The tables of aiodelay's SQLite store, schema version 1. docs/formats.md, "SQLite", describes them. Other programs
-- use the view `schedule`, not the tables. Times are epoch ms. The numbers `ns`, `lane` and `n` are the keys of
-- namespaces, lanes and messages. SQLite keeps a table WITHOUT ROWID in the order of its primary key, so such a table
-- is its own index.

CREATE TABLE namespaces (n INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

-- The features that a namespace uses, each with the version of aiodelay that switched it on. A process that does not
-- know one of these features claims nothing.
CREATE TABLE features (
    ns INTEGER NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL, PRIMARY KEY (ns, name)
) WITHOUT ROWID;

CREATE TABLE lanes (n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, name TEXT NOT NULL, UNIQUE (ns, name));

-- The messages. A row stays until its message has ended and the store may forget its op. A claim or a plain settlement
-- does not rewrite the row. The `n` of each message is in exactly one of the tables `queue`, `parked`, `leases` and
-- `ended`. The table that contains the `n` shows the state of the message.
CREATE TABLE messages (
    n INTEGER PRIMARY KEY,  -- scheduling order: a new one, the highest, whenever the message enters its lane
    ns INTEGER NOT NULL,
    id TEXT NOT NULL,
    lane INTEGER NOT NULL,
    address TEXT NOT NULL DEFAULT '',
    type TEXT NOT NULL DEFAULT '',
    encoding TEXT NOT NULL DEFAULT '',
    key BLOB,
    headers TEXT,  -- JSON object of base64
    trace TEXT,  -- JSON object of text
    version INTEGER,
    rule TEXT,  -- JSON object
    revision INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL DEFAULT 0,
    late INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0,
    lapses INTEGER NOT NULL DEFAULT 0,
    kills INTEGER NOT NULL DEFAULT 0,
    alone INTEGER NOT NULL DEFAULT 0,
    no_retry INTEGER NOT NULL DEFAULT 0,
    op BLOB NOT NULL,
    live TEXT,  -- JSON array
    first_error TEXT,
    last_error TEXT,
    earlier_errors TEXT,  -- JSON array; files of older versions have this column and the next one as their last
    put_due_ms INTEGER,  -- if the message was rescheduled or fired since
    debounced_ms INTEGER,  -- of a debounced message: the first call of its burst
    appended BLOB,  -- of a message in flight: the items that came since its claim
    appended_due_ms INTEGER,  -- their due time, if they become a message of their own
    place_ms INTEGER NOT NULL,  -- time of the next attempt: its place in the lane
    payload BLOB NOT NULL  -- last, so that a large one is not read past
);
CREATE UNIQUE INDEX messages_id ON messages (ns, id);
CREATE INDEX messages_series ON messages (ns, id) WHERE rule IS NOT NULL;
CREATE INDEX messages_appended ON messages (n) WHERE appended IS NOT NULL;
CREATE INDEX messages_late ON messages (ns, expires_ms) WHERE late > 0;

-- Pending messages that are not in flight and not parked, in the order of delivery.
CREATE TABLE queue (
    lane INTEGER NOT NULL, place_ms INTEGER NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (lane, place_ms, n)
) WITHOUT ROWID;

-- Pending messages of paused addresses. A message moves here when it reaches the head of its lane. It returns to
-- `queue` when its address is resumed.
CREATE TABLE parked (
    lane INTEGER NOT NULL, address TEXT NOT NULL, place_ms INTEGER NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (lane, address, place_ms, n)
) WITHOUT ROWID;

-- Messages in flight. `token` contains the end of the lease. The store refuses settlements with an older token.
CREATE TABLE leases (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, lane INTEGER NOT NULL, token INTEGER NOT NULL,
    holder INTEGER  -- the number in the name of the file that the worker has locked; NULL: only the lease ends the claim
);
CREATE INDEX leases_token ON leases (ns, token);

-- Claims of suspects: the length of the lease, and when the process last recorded that it holds the suspect.
CREATE TABLE trials (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, worker TEXT NOT NULL, lease_ms INTEGER NOT NULL, beat_ms INTEGER NOT NULL
);

-- The search for a message that ends its process. `tried` is the size of the last group of suspects, or 0 after the
-- process of the group has ended. `hot` is the size of the group that contains such a message.
CREATE TABLE searches (ns INTEGER PRIMARY KEY, tried INTEGER NOT NULL, hot INTEGER NOT NULL);

-- `suspected_ms` is the time at which a message last became a suspect. `killed_ms` is the last sign of life of the
-- process that a message ended last.
CREATE TABLE doubts (ns INTEGER PRIMARY KEY, suspected_ms INTEGER NOT NULL, killed_ms INTEGER NOT NULL);

-- Superseded claims: claims of messages that were replaced while they were in flight. A row stays until its claim is
-- settled or its lease has ended.
CREATE TABLE superseded (
    ns INTEGER NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL, token INTEGER NOT NULL,
    PRIMARY KEY (ns, id, revision)
) WITHOUT ROWID;
CREATE INDEX superseded_token ON superseded (ns, token);

-- The time at which the store first saw a lease that ends too late. Such a lease exists if the clock has stepped back.
CREATE TABLE clock_steps (ns INTEGER PRIMARY KEY, ahead_since_ms INTEGER NOT NULL);

-- Ended messages whose op must still be remembered. After `until_ms`, this row and the row in `messages` are deleted.
CREATE TABLE ended (
    ns INTEGER NOT NULL, n INTEGER NOT NULL, until_ms INTEGER NOT NULL, PRIMARY KEY (ns, n)
) WITHOUT ROWID;

-- Answers to commands that no row of `messages` remembers: cancel, reschedule, fire, and replaced puts.
CREATE TABLE ops (
    n INTEGER PRIMARY KEY, ns INTEGER NOT NULL, op BLOB NOT NULL, answer TEXT NOT NULL, detail TEXT NOT NULL,
    revision INTEGER, due_ms INTEGER, until_ms INTEGER NOT NULL
);
CREATE INDEX ops_op ON ops (ns, op);

-- The versions of ended messages, for messages that had a version.
CREATE TABLE tombstones (
    ns INTEGER NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, until_ms INTEGER NOT NULL, PRIMARY KEY (ns, id)
) WITHOUT ROWID;
CREATE INDEX tombstones_until ON tombstones (ns, until_ms);

-- Dead letters. `record` is a record in format 1 (docs/formats.md, "Record").
CREATE TABLE dead (
    ns INTEGER NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL, lane INTEGER NOT NULL, reason TEXT NOT NULL,
    at_ms INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE UNIQUE INDEX dead_key ON dead (ns, id, revision);
CREATE INDEX dead_time ON dead (ns, at_ms, id, revision);
CREATE INDEX dead_lane ON dead (lane, at_ms, id, revision);

-- Paused lanes (`address` is NULL) and paused addresses.
CREATE TABLE holds (lane INTEGER NOT NULL, address TEXT);

-- The limits of lanes. `limits` and `declared` are JSON. A lane whose limits have ended keeps its row; `limits` is NULL.
CREATE TABLE limits (
    lane INTEGER PRIMARY KEY,
    ns INTEGER NOT NULL,
    limits TEXT,
    declared TEXT,  -- what code declared last
    queue INTEGER NOT NULL,  -- the lane's number in the next tables: another one whenever `counts` changes
    counts TEXT NOT NULL,  -- what the limit of each key counts: 'key', 'address', or '' if there is no such limit
    most INTEGER NOT NULL,  -- messages of one key in flight
    version INTEGER NOT NULL,  -- counts the changes of this row's limits
    filled_ms INTEGER,  -- messages up to this place and number are in `limited`; NULL: all messages are
    filled_n INTEGER,
    claimed_ms INTEGER NOT NULL DEFAULT 0,  -- the last claim
    turn INTEGER NOT NULL DEFAULT 0,  -- above the turns that claims have given
    in_bulk INTEGER NOT NULL DEFAULT 0  -- 1 within a transaction that counts many messages at once, without the triggers
);

-- The rows of `queue` of limited lanes, again, with a queue for each key. Triggers in limits.sql write them.
CREATE TABLE limited (
    queue INTEGER NOT NULL, key BLOB NOT NULL, place_ms INTEGER NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (queue, key, place_ms, n)
) WITHOUT ROWID;

-- The keys of limited lanes. The row with the text 'lane' in the place of a key counts the whole lane. A key with a
-- ticket may begin its first message at `ticket_ms`. A place or a ticket may be too early. The claim that finds such a
-- row repairs it.
CREATE TABLE limited_keys (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    running INTEGER NOT NULL DEFAULT 0,  -- messages in flight
    marks TEXT,  -- JSON array of [ms, number]: the beginnings that a rate counts
    most INTEGER NOT NULL,
    version INTEGER NOT NULL,
    place_ms INTEGER,  -- of the first message that waits
    served_ms INTEGER NOT NULL DEFAULT 0,  -- the last claim that took a message of the key
    free_ms INTEGER NOT NULL DEFAULT 0,  -- when the rate has room
    turn INTEGER NOT NULL,  -- orders the keys with the same ticket
    ticket_ms INTEGER AS (CASE WHEN running < most AND place_ms IS NOT NULL THEN max(place_ms, served_ms, free_ms) END),
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
CREATE INDEX limited_tickets ON limited_keys (queue, ticket_ms, turn) WHERE ticket_ms IS NOT NULL;

-- What limits need to know of superseded claims.
CREATE TABLE superseded_keys (
    ns INTEGER NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL,
    lane INTEGER NOT NULL, address TEXT NOT NULL, key BLOB,
    PRIMARY KEY (ns, id, revision)
) WITHOUT ROWID;

-- The messages of limited lanes, each with the key under which it counts.
CREATE VIEW counted AS
SELECT
    m.n, m.ns, m.lane, l.queue, l.most, l.version,
    CASE
        WHEN l.counts = 'address' AND m.address <> '' THEN CAST(m.address AS BLOB)
        WHEN l.counts <> '' THEN coalesce(CAST(m.key AS BLOB), x'')
        ELSE x''
    END AS key
FROM messages AS m JOIN limits AS l ON l.lane = m.lane
WHERE l.limits IS NOT NULL;

-- The superseded claims of limited lanes, each with the key under which it counts.
CREATE VIEW counted_superseded AS
SELECT
    s.ns, s.id, s.revision, l.queue,
    CASE
        WHEN l.counts = 'address' AND s.address <> '' THEN CAST(s.address AS BLOB)
        WHEN l.counts <> '' THEN coalesce(CAST(s.key AS BLOB), x'')
        ELSE x''
    END AS key
FROM superseded_keys AS s JOIN limits AS l ON l.lane = s.lane
WHERE l.limits IS NOT NULL;

-- The workers, and the lanes that they serve (JSON array of names).
CREATE TABLE workers (
    ns INTEGER NOT NULL, worker TEXT NOT NULL, lanes TEXT NOT NULL, seen_ms INTEGER NOT NULL, PRIMARY KEY (ns, worker)
) WITHOUT ROWID;

-- The position up to which each intake has read its source.
CREATE TABLE positions (
    ns INTEGER NOT NULL, source TEXT NOT NULL, position INTEGER NOT NULL, PRIMARY KEY (ns, source)
) WITHOUT ROWID;

-- The journal, if the store was opened with `?journal=`.
CREATE TABLE journal (
    ns INTEGER NOT NULL, number INTEGER NOT NULL, at_ms INTEGER NOT NULL, event TEXT NOT NULL, id TEXT NOT NULL,
    revision INTEGER NOT NULL, lane TEXT NOT NULL, due_ms INTEGER NOT NULL, attempt INTEGER NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (ns, number)
) WITHOUT ROWID;
CREATE INDEX journal_id ON journal (ns, id);

-- The view for programs other than aiodelay. An INSERT schedules a message, a DELETE cancels it.
CREATE VIEW schedule AS
SELECT
    s.name AS namespace, m.id, l.name AS lane, m.address, m.type, m.encoding, m.payload, m.key, m.headers, m.version,
    m.due_ms, m.expires_ms, m.late, m.attempt, m.revision, m.place_ms, m.rule, m.first_error, m.last_error,
    CASE WHEN c.n IS NULL THEN 'pending' ELSE 'in_flight' END AS state, m.n
FROM messages AS m
JOIN namespaces AS s ON s.n = m.ns
JOIN lanes AS l ON l.n = m.lane
LEFT JOIN leases AS c ON c.n = m.n
WHERE NOT EXISTS (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n);

-- The retries of earlier occurrences of a series. The series is the message itself, or an earlier one with the same id.
-- `token` is NULL unless the retry is in flight.
CREATE VIEW retries AS
SELECT s.name AS namespace, m.id AS series, r.n, r.ns, r.id, r.revision, r.lane, r.address, r.place_ms, l.token
FROM namespaces AS s
JOIN messages AS m ON m.ns = s.n
JOIN messages AS r ON r.ns = m.ns AND r.id > m.id || '~' AND r.id < m.id || '~:'  -- ':' follows the digits
LEFT JOIN leases AS l ON l.n = r.n
WHERE length(r.id) > length(m.id) + 10 AND substr(r.id, length(m.id) + 2) NOT GLOB '*[^0-9]*'
    AND NOT EXISTS (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n);

-- Schedule a message, as a put with `Conflict.replace()`. 30000 is RETRY_WINDOW_MS. julianday() is the most precise
-- clock of SQLite 3.35.
CREATE TRIGGER schedule_insert INSTEAD OF INSERT ON schedule
BEGIN
    SELECT RAISE(ABORT, 'schedule: id must be text of 1 to 255 characters')
    WHERE typeof(NEW.id) <> 'text' OR length(NEW.id) NOT BETWEEN 1 AND 255;
    SELECT RAISE(ABORT, 'schedule: id must not end in ~ and ten or more digits, which names an occurrence of a series')
    WHERE rtrim(NEW.id, '0123456789') LIKE '%~' AND length(NEW.id) - length(rtrim(NEW.id, '0123456789')) >= 10;
    SELECT RAISE(ABORT, 'schedule: lane must be text')
    WHERE typeof(NEW.lane) <> 'text' OR NEW.lane = '';
    SELECT RAISE(ABORT, 'schedule: due_ms must be an integer, epoch milliseconds')
    WHERE typeof(NEW.due_ms) <> 'integer' OR NEW.due_ms < 0;
    SELECT RAISE(ABORT, 'schedule: payload must be a blob or text')
    WHERE typeof(NEW.payload) NOT IN ('blob', 'text');
    SELECT RAISE(ABORT, 'schedule: encoding must be json, msgpack or empty')
    WHERE coalesce(NEW.encoding, '') NOT IN ('', 'json', 'msgpack');
    SELECT RAISE(ABORT, 'schedule: headers must be a JSON object of base64 text')
    WHERE NEW.headers IS NOT NULL AND NOT json_valid(NEW.headers);
    SELECT RAISE(ABORT, 'schedule: version must be an integer, 0 or more')
    WHERE NEW.version IS NOT NULL AND (typeof(NEW.version) <> 'integer' OR NEW.version < 0);
    SELECT RAISE(ABORT, 'schedule: late must be 0, 1 or 2; unless it is 0, expires_ms must be an integer')
    WHERE coalesce(NEW.late, 0) NOT IN (0, 1, 2)
        OR typeof(NEW.expires_ms) NOT IN ('integer', iif(coalesce(NEW.late, 0) = 0, 'null', 'integer'));

    -- No OR clauses here: the clause of the outer statement, such as INSERT OR REPLACE INTO schedule, would win.
    INSERT INTO namespaces (name) VALUES (coalesce(NEW.namespace, 'default')) ON CONFLICT (name) DO NOTHING;
    INSERT INTO lanes (ns, name)
    SELECT n, NEW.lane FROM namespaces WHERE name = coalesce(NEW.namespace, 'default')
    ON CONFLICT (ns, name) DO NOTHING;

    INSERT INTO superseded (ns, id, revision, token)
    SELECT ns, id, revision, token FROM retries
    WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id AND token IS NOT NULL
    ON CONFLICT (ns, id, revision) DO UPDATE SET token = excluded.token;
    DELETE FROM trials WHERE n IN (
        SELECT n FROM retries WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id);
    DELETE FROM leases WHERE n IN (
        SELECT n FROM retries WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id);
    DELETE FROM queue WHERE (lane, place_ms, n) IN (
        SELECT lane, place_ms, n FROM retries
        WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id);
    DELETE FROM parked WHERE (lane, address, place_ms, n) IN (
        SELECT lane, address, place_ms, n FROM retries
        WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id);
    DELETE FROM messages WHERE n IN (
        SELECT n FROM retries WHERE namespace = coalesce(NEW.namespace, 'default') AND series = NEW.id);

    INSERT INTO ops (ns, op, answer, detail, revision, due_ms, until_ms)
    SELECT m.ns, m.op, 'stored', '', m.revision, m.due_ms, m.revision + 30000
    FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
    WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id;
    DELETE FROM queue WHERE (lane, place_ms, n) IN (
        SELECT m.lane, m.place_ms, m.n FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
        WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id);
    DELETE FROM parked WHERE (lane, address, place_ms, n) IN (
        SELECT m.lane, m.address, m.place_ms, m.n FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
        WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id);
    DELETE FROM ended WHERE (ns, n) IN (
        SELECT m.ns, m.n FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
        WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id);
    INSERT INTO superseded (ns, id, revision, token)
    SELECT m.ns, m.id, m.revision, l.token
    FROM leases AS l JOIN messages AS m ON m.n = l.n JOIN namespaces AS s ON s.n = m.ns
    WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id
    ON CONFLICT (ns, id, revision) DO UPDATE SET token = excluded.token;
    DELETE FROM trials WHERE n IN (
        SELECT m.n FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
        WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id);
    DELETE FROM leases WHERE n IN (
        SELECT m.n FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
        WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id);
    INSERT INTO tombstones (ns, id, version, until_ms)
    SELECT m.ns, m.id, m.version, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + 86400000
    FROM messages AS m JOIN namespaces AS s ON s.n = m.ns
    WHERE s.name = coalesce(NEW.namespace, 'default') AND m.id = NEW.id AND m.version IS NOT NULL
    ON CONFLICT (ns, id) DO UPDATE SET version = max(version, excluded.version), until_ms = excluded.until_ms;

    INSERT INTO messages (n, ns, id, lane, address, type, encoding, key, headers, version, revision, due_ms, expires_ms,
                          late, op, place_ms, payload)
    SELECT
        (SELECT coalesce(max(n), 0) + 1 FROM messages), s.n, NEW.id, l.n, coalesce(NEW.address, ''),
        coalesce(NEW.type, ''), coalesce(NEW.encoding, ''), CAST(NEW.key AS BLOB), NEW.headers, NEW.version,
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), NEW.due_ms, coalesce(NEW.expires_ms, 0),
        coalesce(NEW.late, 0), randomblob(8), NEW.due_ms, CAST(NEW.payload AS BLOB)
    FROM namespaces AS s JOIN lanes AS l ON l.ns = s.n
    WHERE s.name = coalesce(NEW.namespace, 'default') AND l.name = NEW.lane
    ON CONFLICT (ns, id) DO UPDATE SET
        n = excluded.n, lane = excluded.lane, address = excluded.address, type = excluded.type,
        encoding = excluded.encoding, key = excluded.key, headers = excluded.headers, trace = NULL,
        version = excluded.version, rule = NULL, revision = max(excluded.revision, revision + 1),
        due_ms = excluded.due_ms, expires_ms = excluded.expires_ms, late = excluded.late, attempt = 0, lapses = 0,
        kills = 0, alone = 0, no_retry = 0, op = excluded.op, live = NULL, first_error = NULL, last_error = NULL,
        earlier_errors = NULL, put_due_ms = NULL, debounced_ms = NULL, appended = NULL, appended_due_ms = NULL,
        place_ms = excluded.place_ms, payload = excluded.payload;
    INSERT INTO queue SELECT lane, place_ms, n FROM messages WHERE n = (SELECT max(n) FROM messages);
END;

-- Cancel a message. If it is not in flight, it ends. If it is in flight, the attempt continues and has no retry.
CREATE TRIGGER schedule_delete INSTEAD OF DELETE ON schedule
BEGIN
    UPDATE messages SET no_retry = 1 WHERE n IN (
        SELECT n FROM retries WHERE namespace = OLD.namespace AND series = OLD.id AND token IS NOT NULL);
    DELETE FROM queue WHERE (lane, place_ms, n) IN (
        SELECT lane, place_ms, n FROM retries WHERE namespace = OLD.namespace AND series = OLD.id);
    DELETE FROM parked WHERE (lane, address, place_ms, n) IN (
        SELECT lane, address, place_ms, n FROM retries WHERE namespace = OLD.namespace AND series = OLD.id);
    DELETE FROM messages WHERE n IN (
        SELECT n FROM retries WHERE namespace = OLD.namespace AND series = OLD.id AND token IS NULL);

    UPDATE messages SET no_retry = 1, appended = NULL, appended_due_ms = NULL WHERE n = OLD.n AND EXISTS (SELECT 1 FROM leases WHERE n = OLD.n);
    DELETE FROM queue WHERE (lane, place_ms, n) IN (SELECT lane, place_ms, n FROM messages WHERE n = OLD.n);
    DELETE FROM parked
    WHERE (lane, address, place_ms, n) IN (SELECT lane, address, place_ms, n FROM messages WHERE n = OLD.n);
    -- A retry of a series, whose id ends in ~ and the due time, leaves its series.
    UPDATE messages SET live = (
        SELECT nullif(json_group_array(value), '[]') FROM json_each(messages.live)
        WHERE value <> CAST(substr(OLD.id, length(rtrim(OLD.id, '0123456789')) + 1) AS INTEGER))
    WHERE ns = (SELECT n FROM namespaces WHERE name = OLD.namespace)
        AND id || '~' = rtrim(OLD.id, '0123456789') AND length(OLD.id) - length(id) > 10 AND live IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM leases WHERE n = OLD.n);
    DELETE FROM messages
    WHERE n = OLD.n AND rtrim(OLD.id, '0123456789') LIKE '%~'
        AND length(OLD.id) - length(rtrim(OLD.id, '0123456789')) >= 10
        AND NOT EXISTS (SELECT 1 FROM leases WHERE n = OLD.n);
    INSERT INTO ended (ns, n, until_ms)
    SELECT ns, n, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + 30000
    FROM messages WHERE n = OLD.n AND NOT EXISTS (SELECT 1 FROM leases WHERE n = OLD.n);
    INSERT INTO tombstones (ns, id, version, until_ms)
    SELECT ns, id, version, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + 86400000
    FROM messages
    WHERE n = OLD.n AND version IS NOT NULL AND NOT EXISTS (SELECT 1 FROM leases WHERE n = OLD.n)
    ON CONFLICT (ns, id) DO UPDATE SET version = max(version, excluded.version), until_ms = excluded.until_ms;
END;
