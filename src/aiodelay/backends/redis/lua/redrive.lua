-- redrive: schedules dead letters again so that they are due now, or deletes them.
--@ base record moves
-- ARGV[4] 'redrive' or 'purge'
-- From ARGV[5] on, 2 arguments for each dead letter: id, revision.
-- Returns one answer for each dead letter, in order. redrive: 's' + revision u48 + due u48; 'N' not found; 'E' the id
-- exists; 'F' this version cannot read the format. purge: 's' deleted; 'N' not found. If the dead letters are large,
-- there are fewer answers. The caller then sends the other dead letters again.
local answers, bytes = {}, 0

local function unearth(key, lane)
  call('HDEL', DEAD, key)
  call('ZREM', GRAVES, key)
  call('ZREM', dead.BY_ID, dead.by_id(key))
  call('HINCRBY', META, 'dead:' .. text(lane), -1)
end

local function record_at(value) return LETTER.REASON_FIRST + byte(value) end -- The record follows the reason.

local function lane_of(value)
  local is_raw = byte(value) == UNREADABLE_LETTER.MARK
  return (unpack_bytes('>H', value, is_raw and UNREADABLE_LETTER.LANE_FIRST or record_at(value) + RECORD.LANE_OFFSET))
end

local function redrive(id, revision)
  local key = id .. u48(revision)
  local value = call('HGET', DEAD, key)
  if not value then return 'N' end
  bytes = bytes + #value
  if ARGV[4] == 'purge' then
    unearth(key, lane_of(value))
    return 's'
  end
  local series, due = occurrences.series(id)
  if load(id) or (series and series.due == due) then return 'E' end
  local e = byte(value) ~= UNREADABLE_LETTER.MARK and parse(id, u48(0) .. sub(value, record_at(value))) or nil
  if not e then return 'F' end
  local known = memory.recall_revision(id)
  if known and known > revision then revision = known end
  if e.expires ~= 0 then e.expires = e.expires - e.due + now end
  e.revision, e.due, e.op = memory.next_revision(revision), now, NO_OP
  e.attempt, e.lapses, e.kills = 0, 0, 0
  unset(e, ALONE)
  unset(e, NO_RETRY)
  fields.rewrite(e, { [BODY.FIRST_ERROR] = false, [BODY.LAST_ERROR] = false, [BODY.EARLIER_ERRORS] = false,
    [BODY.TRACEBACK] = false, [BODY.PUT_DUE_MS] = false, [BODY.LIVE] = false, [BODY.DEBOUNCED_MS] = false })
  if series then
    local live = fields.live_of(series)
    live[#live + 1] = due
    occurrences.list(series, live)
  elseif byte(id) == OCCURRENCE then
    occurrences.list_apart(id)
  end
  insert(e, now)
  unearth(key, e.lane)
  note('redriven', e)
  return 's' .. u48(e.revision) .. u48(e.due)
end

if ARGV[4] == 'purge' then open_gate() end
for a = 5, #ARGV, 2 do
  if bytes >= MOST_BYTES then break end
  answers[#answers + 1] = redrive(ARGV[a], tonumber(ARGV[a + 1]))
end
finish(true)
return answers
