-- The triggers that count the messages of limited lanes, whichever program or version of aiodelay writes. A file has
-- them from its first limit on. They use no OR clauses, because the clause of the outer statement would win.

-- A message enters the queue of its key.
CREATE TRIGGER limited_enter AFTER INSERT ON queue
WHEN EXISTS (SELECT 1 FROM limits WHERE lane = NEW.lane AND limits IS NOT NULL)
BEGIN
    INSERT INTO limited (queue, key, place_ms, n)
    SELECT queue, key, NEW.place_ms, NEW.n FROM counted WHERE n = NEW.n
    ON CONFLICT DO NOTHING;
    INSERT INTO limited_keys (queue, key, most, version, place_ms, turn)
    SELECT queue, key, most, version, NEW.place_ms, NEW.n FROM counted WHERE n = NEW.n
    ON CONFLICT (queue, key) DO UPDATE SET
        most = excluded.most, version = excluded.version,
        place_ms = min(coalesce(place_ms, excluded.place_ms), excluded.place_ms),
        free_ms = iif(version = excluded.version, free_ms, 0),
        turn = iif(place_ms IS NULL OR place_ms > excluded.place_ms, excluded.turn, turn)
    WHERE place_ms IS NULL OR place_ms > excluded.place_ms OR version <> excluded.version;
END;

-- A message leaves the queue of its key.
CREATE TRIGGER limited_leave AFTER DELETE ON queue
WHEN EXISTS (SELECT 1 FROM limits WHERE lane = OLD.lane AND limits IS NOT NULL AND NOT in_bulk)
BEGIN
    DELETE FROM limited
    WHERE queue = (SELECT queue FROM limits WHERE lane = OLD.lane)
        AND key = (SELECT key FROM counted WHERE n = OLD.n) AND place_ms = OLD.place_ms AND n = OLD.n;
END;

-- A claim ends.
CREATE TRIGGER limited_end AFTER DELETE ON leases
WHEN EXISTS (SELECT 1 FROM limits WHERE lane = OLD.lane AND limits IS NOT NULL AND NOT in_bulk)
BEGIN
    UPDATE limited_keys SET running = max(running - 1, 0)
    WHERE queue = (SELECT queue FROM limits WHERE lane = OLD.lane) AND key = (SELECT key FROM counted WHERE n = OLD.n);
    UPDATE limited_keys SET running = max(running - 1, 0)
    WHERE queue = (SELECT queue FROM limits WHERE lane = OLD.lane) AND key = 'lane';
END;

-- A message is about to be replaced in flight: its claim goes on, and its lease is deleted next.
CREATE TRIGGER limited_supersede AFTER INSERT ON superseded
WHEN NOT EXISTS (SELECT 1 FROM superseded_keys WHERE ns = NEW.ns AND id = NEW.id AND revision = NEW.revision)
BEGIN
    INSERT INTO superseded_keys (ns, id, revision, lane, address, key)
    SELECT ns, id, NEW.revision, lane, address, key FROM messages WHERE ns = NEW.ns AND id = NEW.id;
    UPDATE limited_keys SET running = running + 1
    WHERE queue = (SELECT queue FROM counted_superseded WHERE ns = NEW.ns AND id = NEW.id AND revision = NEW.revision)
        AND key IN ((SELECT key FROM counted_superseded WHERE ns = NEW.ns AND id = NEW.id AND revision = NEW.revision), 'lane');
END;

-- The claim of a replaced message ends.
CREATE TRIGGER limited_superseded_end AFTER DELETE ON superseded
BEGIN
    UPDATE limited_keys SET running = max(running - 1, 0)
    WHERE queue = (SELECT queue FROM counted_superseded WHERE ns = OLD.ns AND id = OLD.id AND revision = OLD.revision)
        AND key IN ((SELECT key FROM counted_superseded WHERE ns = OLD.ns AND id = OLD.id AND revision = OLD.revision), 'lane');
    DELETE FROM superseded_keys WHERE ns = OLD.ns AND id = OLD.id AND revision = OLD.revision;
END;
