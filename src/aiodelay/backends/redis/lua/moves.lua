-- moves: the common steps of commands, claims and settlements. They follow the same rules as core/transitions.py.
local SUSPECT_LAPSES, KILLS_TO_DEATH = 2, 3
local MAX_LEASE = 60000
local TOKEN_EPOCH, COUNTERS = 1735689600000, 4096
-- A script reads no more records after this many bytes. The last record may exceed the limit.
local MOST_BYTES = 1048576

local loaded = {}
local function load(id)
  local e = loaded[id]
  if e == nil then
    local value = call('HGET', MSG, id)
    e = value and parse(id, value) or false
    loaded[id] = e
  end
  return e or nil
end

local function token_of(e)
  if e.token == nil then e.token = tonumber(call('ZSCORE', leased_key(e.lane), e.id)) or false end
  return e.token
end

local function is_due_to_expire(e) return late_of(e) ~= 0 and not has(e, RECURRING) end
local function ends_by_itself(e) return is_due_to_expire(e) and now > e.expires end

local function store(e)
  e.value = head_bytes(e) .. record_bytes(e)
  e.body_at = #e.value - #e.body + 1
  call('HSET', MSG, e.id, e.value)
end

local function parked_key(e) return TAG .. 'parked:' .. e.lane .. ':' .. address_of(e) end

local function park(e)
  call('SADD', PARKED, text(e.lane) .. ':' .. address_of(e))
  call('ZADD', parked_key(e), e.place, member(e))
end

-- The blocked addresses of lane n. The sorted set `blocked:<n>` maps an address to the time of its next try, epoch ms.
-- The hash `why:<n>` maps an address to the last wait in ms and the reason.
local function blocked_key(n) return TAG .. 'blocked:' .. n end
local function why_key(n) return TAG .. 'why:' .. n end

local function unblock(n, address)
  call('ZREM', blocked_key(n), address)
  call('HDEL', why_key(n), address)
end

local function insert(e, place, keeps_sequence)
  if not keeps_sequence then e.sequence = next_sequence(place ~= e.due) end
  e.place, e.token = place, false
  loaded[e.id] = e
  store(e)
  if any_holds() and is_held(e.lane, address_of(e)) then
    park(e)
  else
    earlier(e.lane, place)
    call('ZADD', due_key(e.lane), place, member(e))
  end
  if is_due_to_expire(e) then call('ZADD', LATE, math.max(place, e.expires + 1), e.id) end
end

local function leave_lane(e)
  if call('ZREM', due_key(e.lane), member(e)) == 0 then call('ZREM', parked_key(e), member(e)) end
  if is_due_to_expire(e) then
    call('ZREM', LATE, e.id)
    call('ZREM', LATE_HELD, e.id)
  end
end

-- Trials of suspects. A trial finds the *killer*: the message that ends its process. The hash `trials` maps the id of a
-- suspect to four values with spaces between them:
--   'a' if the suspect is tried alone, 'g' if it is tried in a group
--   the length of the lease in ms
--   the last time at which the process recorded that it holds the suspect, epoch ms
--   the worker
local trials = { KEY = TAG .. 'trials', MOST = 500, FIRST = 1000, LONGEST = 60000, SILENT_LEASES = 4, DEAD_LEASES = 2 }

function trials.write(id, kind, lease, worker)
  call('HSET', trials.KEY, id, string.format('%s %d %.0f %s', kind, lease, now, worker))
end

-- Two fields of META belong to the search for a killer. `tried` is the size of the last group of suspects, or 0 after
-- the process of the group has ended. `hot` is the number of suspects that contain a killer, counted from the heads of
-- their lanes.
--
-- Returns `hot` without the group of the last trial, which did not end its process.
function trials.hot()
  local known = call('HMGET', META, 'tried', 'hot')
  return math.max(tonumber(known[2] or 0) - tonumber(known[1] or 0), 0)
end

-- Returns the largest size of the next group. It is half of the suspects that contain a killer. If no killer is known,
-- it is trials.MOST.
function trials.most()
  local hot = trials.hot()
  return hot > 0 and floor((hot + 1) / 2) or trials.MOST
end

-- Two more fields of META are times. `suspected` is the time at which a message last became a suspect. `killed` is the
-- last sign of life of the process that ended last during a trial. If `suspected` is later than `killed`, the new
-- suspect may have ended that process. The function then returns true, because the suspect that was tried is not to
-- blame.
function trials.are_kills_void()
  local known = call('HMGET', META, 'suspected', 'killed')
  return tonumber(known[1] or 0) > tonumber(known[2] or 0)
end

function trials.begin(taken, lease, worker)
  local kind = #taken == 1 and 'a' or 'g'
  if taken[1].kills == 0 then call('HSET', META, 'tried', #taken, 'hot', trials.hot()) end
  for _, e in ipairs(taken) do
    trials.write(e.id, kind, lease, worker)
    if kind == 'a' then
      set(e, ALONE)
      if trials.are_kills_void() then e.kills = 0 end
      store(e)
    end
  end
end

-- Records that the lease of a group has ended. The group then contains a killer.
function trials.note_death()
  if call('HGET', META, 'tried') == '0' then return end
  local left = 0
  for _, value in ipairs(call('HVALS', trials.KEY)) do
    if sub(value, LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST) == 'g' then left = left + 1 end
  end
  call('HSET', META, 'tried', 0, 'hot', left)
end

function trials.stop(e)
  if e.lapses >= SUSPECT_LAPSES then call('HDEL', trials.KEY, e.id) end
end

-- Returns the last sign of life of a worker in epoch ms, or nil if the worker is not registered.
function trials.seen(worker)
  local is_read, serves = pcall(cmsgpack.unpack, call('HGET', WORKERS, worker) or '')
  return is_read and type(serves) == 'table' and tonumber(serves[1]) or nil
end

function trials.parse(value)
  local kind, lease, beat, worker = string.match(value, '^(%l) (%d+) (%d+) (.*)$')
  return kind, tonumber(lease), tonumber(beat), worker
end

function trials.of(id) return trials.parse(call('HGET', trials.KEY, id) or '') end

-- Returns true if the process of a suspect may still hold it, although its lease has ended. This is so if the suspect
-- is tried alone, and its process is registered and has recorded recently that it holds the suspect.
function trials.is_in_doubt(id)
  local kind, lease, beat, worker = trials.of(id)
  return kind == 'a' and trials.seen(worker) and math.abs(now - beat) < trials.SILENT_LEASES * lease
end

-- Returns true if the process that tried this suspect has ended.
function trials.has_died(id)
  local _, lease, _, worker = trials.of(id)
  local seen = lease and trials.seen(worker)
  return not seen or math.abs(now - seen) >= trials.DEAD_LEASES * lease
end

function trials.without_doubt(ids, limit)
  local found = {}
  for _, id in ipairs(ids) do
    if #found < limit and not trials.is_in_doubt(id) then found[#found + 1] = id end
  end
  return found
end

local function take_out(e)
  if token_of(e) then
    call('ZREM', leased_key(e.lane), e.id)
    trials.stop(e)
  else
    leave_lane(e)
  end
  e.token = false
end

-- Functions for hash fields whose values are lists. Such a value is a row of parts with the same length.
local parts = {}

function parts.add(key, field, part)
  call('HSET', key, field, (call('HGET', key, field) or '') .. part)
end

function parts.remove(key, field, part)
  local known, left = call('HGET', key, field), ''
  if not known then return end
  for at = 1, #known, #part do
    local each = sub(known, at, at + #part - 1)
    if each ~= part then left = left .. each end
  end
  if left == '' then call('HDEL', key, field) else call('HSET', key, field, left) end
end

-- Retries of occurrences of a series. The body of a series lists the due times of its retries. After the series has
-- ended, the hash LEFT lists them: id of the series -> due times, each u48.
local occurrences = { LEFT = TAG .. 'retries' }

-- Returns the id of an occurrence. `due` is its due time as u48.
function occurrences.id(series_id, due)
  return string.char(OCCURRENCE) .. series_id .. due
end

-- Returns two values: the series of an occurrence, or nil if the series no longer exists; and the occurrence's due
-- time.
function occurrences.series(id)
  if byte(id) ~= OCCURRENCE then return nil end
  local series = load(sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST))
  return series and has(series, RECURRING) and series or nil, (unpack_bytes('>I6', sub(id, OCCURRENCE_ID.DUE_FIRST)))
end

function occurrences.list(series, live)
  rewrite(series, { [BODY.LIVE] = written_list(live) })
  store(series)
end

-- Removes an occurrence that has ended from the lists of retries.
function occurrences.strike(id)
  parts.remove(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
  local series, due = occurrences.series(id)
  if not series then return end
  local live, left = live_of(series), {}
  for _, each in ipairs(live) do if each ~= due then left[#left + 1] = each end end
  if #left < #live then occurrences.list(series, left) end
end

-- Adds the retry of an occurrence to LEFT. Call this if no series lists the retry.
function occurrences.list_apart(id)
  parts.add(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
end

-- Adds the retries of a series that has ended to LEFT.
function occurrences.leave(series)
  local is_readable, live = pcall(live_of, series)
  for _, due in ipairs(is_readable and live or {}) do parts.add(occurrences.LEFT, series.id, u48(due)) end
end

-- Returns the due times of all retries of a series, each u48. Retries of an earlier series with the same id count too.
function occurrences.of(e)
  local dues, left = {}, call('HGET', occurrences.LEFT, e.id) or ''
  for at = 1, #left, OCCURRENCE_ID.DUE_SIZE do dues[#dues + 1] = sub(left, at, at + OCCURRENCE_ID.DUE_SIZE - 1) end
  for _, due in ipairs(has(e, RECURRING) and live_of(e) or {}) do dues[#dues + 1] = u48(due) end
  return dues
end

-- Ends a message after its removal from its lane. Do not call this for a message that is replaced.
local function forget(e)
  call('HDEL', MSG, e.id)
  loaded[e.id] = false
  if byte(e.id) == OCCURRENCE then occurrences.strike(e.id) else remember_end(e) end
  if has(e, RECURRING) then occurrences.leave(e) end
end

local function finish_off(e)
  take_out(e)
  forget(e)
end

local function copy(e)
  local c = {}
  for key, value in pairs(e) do c[key] = value end
  return c
end

local function as_occurrence(e)
  local o = copy(e)
  o.id, o.op = occurrences.id(e.id, u48(e.due)), NO_OP
  unset(o, RECURRING)
  body_of(o)
  -- If the body is unreadable, it stays unchanged. The message then becomes a dead letter.
  pcall(rewrite, o, { [BODY.RULE] = false, [BODY.LIVE] = false })
  return o
end

-- Functions for dead letters. They are in one table, because a script may have at most 200 local variables.
local graves = { BY_ID = TAG .. 'graves:ids' }

-- Returns the member of the index BY_ID. The size of the key comes first. So all keys of one id are neighbours in the
-- index, because they have the same size.
function graves.by_id(key) return pack('>H', #key) .. key end

function graves.add(key)
  call('ZADD', GRAVES, now, key)
  call('ZADD', graves.BY_ID, 0, graves.by_id(key))
end

local function bury(e, reason)
  if has(e, RECURRING) then e = as_occurrence(e) end
  local key = e.id .. u48(e.revision)
  local value = string.char(#reason) .. reason .. record_bytes(e)
  if call('HSET', DEAD, key, value) == 1 then call('HINCRBY', META, 'dead:' .. text(e.lane), 1) end
  graves.add(key)
  note('dead', e, reason)
end

-- Makes a dead letter of an unreadable value. The dead letter is a mark, the lane number u16, and the whole value. It
-- has no reason.
local function set_aside(lane, id, value)
  local key = id .. u48(0)
  if call('HSET', DEAD, key, string.char(UNREADABLE_LETTER.MARK) .. pack('>H', lane) .. value) == 1 then
    call('HINCRBY', META, 'dead:' .. text(lane), 1)
  end
  graves.add(key)
  call('HDEL', MSG, id)
  loaded[id] = false
end

local function expire(e)
  if late_of(e) == 2 then bury(e, 'late') else note('dropped', e, 'late') end
  finish_off(e)
end

local function contains(list, value)
  for _, each in ipairs(list) do if each == value then return true end end
  return false
end

-- Keeps the first due time of a message for its delivery id. A series does not need it, because the due time of each
-- occurrence is already in the occurrence's delivery id.
local function keep_put_due(e)
  if has(e, RECURRING) or field(e, BODY.PUT_DUE_MS) then return end
  rewrite(e, { [BODY.PUT_DUE_MS] = pack('>BI8', 0xcf, e.due) })
end

-- Changes the due time of a message. The time after which the message is late moves by the same amount.
local function move(e, due)
  pcall(keep_put_due, e) -- An unreadable body stays: the message becomes a dead letter later.
  local live = has(e, RECURRING) and live_of(e) or {}
  while contains(live, due) do due = due + 1 end
  if e.expires ~= 0 then e.expires = e.expires - e.due + due end
  e.due = due
end

local count_attempt
do
  local EARLIER_ERRORS = 4

  -- Returns the encoded list of earlier errors, with the last error `last` added at its end.
  local function earlier_errors(e, last)
    local written, kept = field(e, BODY.EARLIER_ERRORS), {}
    if written then
      local count, at = items(written, 1)
      for i = 1, count do
        local ends = skip(written, at)
        kept[i], at = sub(written, at, ends - 1), ends
      end
    end
    kept[#kept + 1] = last
    local first = math.max(1, #kept - EARLIER_ERRORS + 1)
    return string.char(0x90 + #kept - first + 1) .. table.concat(kept, '', first)
  end

  local function written_end(e, error_text, trace, traceback)
    local changes, last = {}, field(e, BODY.LAST_ERROR)
    if error_text ~= '' then
      local told = sub(error_text, LETTERED.REST_FIRST)
      changes[BODY.LAST_ERROR] = cmsgpack.pack(told)
      if not field(e, BODY.FIRST_ERROR) then changes[BODY.FIRST_ERROR] = changes[BODY.LAST_ERROR] end
      if last and cmsgpack.unpack(last) ~= told then changes[BODY.EARLIER_ERRORS] = earlier_errors(e, last) end
    end
    if trace ~= '' then changes[BODY.TRACE] = trace end
    if traceback ~= '' then changes[BODY.TRACEBACK] = cmsgpack.pack(traceback) end
    return changes
  end

  function count_attempt(e, attempt, error_text, trace, traceback, has_run)
    e.attempt = math.min(tonumber(attempt), MOST_ATTEMPTS)
    if has_run then e.lapses, e.kills = 0, 0 end
    unset(e, ALONE)
    local is_readable, changes = pcall(written_end, e, error_text, trace, traceback)
    if is_readable then rewrite(e, changes) end -- An unreadable body stays: the message becomes a dead letter later.
  end
end

local function rearm(e, due, retrying)
  remember_answer(e)
  local live = live_of(e)
  if retrying then live[#live + 1] = e.due end
  local changes = { [BODY.FIRST_ERROR] = false, [BODY.LAST_ERROR] = false, [BODY.EARLIER_ERRORS] = false }
  changes[BODY.LIVE] = written_list(live)
  rewrite(e, changes)
  move(e, due)
  e.attempt, e.lapses, e.kills = 0, 0, 0
  unset(e, ALONE)
  insert(e, e.due)
end

local function lapse(e)
  local kind, _, beat
  if e.lapses >= SUSPECT_LAPSES then kind, _, beat = trials.of(e.id) end
  if kind == 'g' then trials.note_death() end
  local kills = has(e, ALONE) and trials.has_died(e.id) and math.min(e.kills + 1, MOST_LAPSES) or e.kills
  take_out(e)
  unset(e, ALONE)
  if kills >= KILLS_TO_DEATH and not has(e, RECURRING) and not has(e, NO_RETRY) then
    e.kills = KILLS_TO_DEATH
    bury(e, 'killed_worker')
    forget(e)
    return
  end
  if kills > e.kills then call('HSET', META, 'killed', text(beat or now)) end
  e.kills, e.lapses = kills, kind and e.lapses or math.min(e.lapses + 1, MOST_LAPSES)
  if not kind and e.lapses == SUSPECT_LAPSES then call('HSET', META, 'suspected', text(now)) end
  if has(e, NO_RETRY) then
    note('dropped', e, 'cancelled in flight')
    forget(e)
  else
    insert(e, e.place, kind)
    note('lapsed', e)
  end
end

local tokens = { RIGHTING = 20000 } -- A table, because a script may have at most 200 local variables.

function tokens.at(deadline, counter) return (deadline - TOKEN_EPOCH) * COUNTERS + counter % COUNTERS end

-- LEAST is the smallest token of a lease that has not ended. TOO_LONG is the smallest token of a lease that is too
-- long: it ends later than any new lease. Such a lease exists only if the clock has stepped back.
tokens.LEAST, tokens.TOO_LONG = tokens.at(now + 1, 0), tokens.at(now + MAX_LEASE + 1, 0)

-- Returns true if the script may now return the messages whose leases are too long. Live workers have then had time to
-- renew these leases with a correct end. The first call starts this time, so call the function only if such a lease
-- exists.
function tokens.is_righting_over()
  local since = tonumber(call('HGET', META, 'ahead') or 0)
  if since > now or now > since + 2 * tokens.RIGHTING then
    since = now
    open_gate()
    call('HSET', META, 'ahead', text(now))
  end
  return since + tokens.RIGHTING <= now
end

-- Returns members of a sorted set of tokens: those whose leases have ended, and perhaps those whose leases are too
-- long.
function tokens.over(key, limit)
  local found = call('ZRANGEBYSCORE', key, '-inf', '(' .. text(tokens.LEAST), 'LIMIT', 0, limit)
  local ahead = call('ZRANGEBYSCORE', key, text(tokens.TOO_LONG), '+inf', 'LIMIT', 0, limit - #found)
  if #ahead > 0 and tokens.is_righting_over() then
    for _, member in ipairs(ahead) do found[#found + 1] = member end
  end
  return found
end

-- Returns true if a trial is in progress. The trial of a single suspect counts only until its lease ends, even if its
-- process may still hold the suspect. An entry that is older than the longest trial remains from a failover. The
-- function deletes such an entry.
function trials.are_on()
  local known, are_on = call('HGETALL', trials.KEY), false
  for i = 1, #known, 2 do
    local kind, _, beat = trials.parse(known[i + 1])
    local e = kind == 'a' and load(known[i])
    if not kind or math.abs(now - beat) >= trials.LONGEST + MAX_LEASE then
      call('HDEL', trials.KEY, known[i])
    elseif kind == 'g' or (e and (token_of(e) or 0) >= tokens.LEAST) then
      are_on = true
    end
  end
  return are_on
end

local LAPSED_AT_ONCE = 60 -- The return of this many messages takes as long as all other work of a claim.

-- Superseded claims: claims of messages that were replaced while they were in flight. The sorted set CLAIMS holds the
-- token of each claim until the claim is settled or its lease has ended. The hash VERSIONS lists the claims by id. It
-- lists the claim of a retry under the id of the series, with the due time of the occurrence.
local superseded = { CLAIMS = TAG .. 'superseded', VERSIONS = TAG .. 'superseded:ids', ITSELF = string.rep('\255', OCCURRENCE_ID.DUE_SIZE) }

-- Returns two values: the id under which VERSIONS lists a message; and the due time of an occurrence, or ITSELF for any
-- other message.
function superseded.split(id)
  if byte(id) ~= OCCURRENCE then return id, superseded.ITSELF end
  return sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
end

-- Records the claim of a message that a command replaces. Call this before the message leaves `leased`.
function superseded.add(e)
  if not token_of(e) then return end
  local id, due = superseded.split(e.id)
  call('ZADD', superseded.CLAIMS, text(e.token), u48(e.revision) .. e.id)
  parts.add(superseded.VERSIONS, id, u48(e.revision) .. due)
end

function superseded.is_any(id)
  local listed, wanted = superseded.split(id)
  local known = call('HGET', superseded.VERSIONS, listed) or ''
  for at = 0, #known - 1, SUPERSEDED_VERSION.SIZE do
    local revision = sub(known, at + SUPERSEDED_VERSION.REVISION_FIRST, at + SUPERSEDED_VERSION.REVISION_LAST)
    local due = sub(known, at + SUPERSEDED_VERSION.DUE_FIRST, at + SUPERSEDED_VERSION.DUE_LAST)
    local of = due == superseded.ITSELF and listed or occurrences.id(listed, due)
    local token = tonumber(call('ZSCORE', superseded.CLAIMS, revision .. of))
    if token and token >= tokens.LEAST and (wanted == superseded.ITSELF or wanted == due) then return true end
  end
  return false
end

-- Forgets a superseded claim. `name` is its member of CLAIMS: a revision u48 and an id.
function superseded.forget(name)
  local id, due = superseded.split(sub(name, SUPERSEDED.ID_FIRST))
  call('ZREM', superseded.CLAIMS, name)
  parts.remove(superseded.VERSIONS, id, sub(name, SUPERSEDED.REVISION_FIRST, SUPERSEDED.REVISION_LAST) .. due)
end

-- Ends a superseded claim. Returns true if the claim existed and had this token.
function superseded.settle(id, revision, token)
  local name = u48(revision) .. id
  local is_held = tonumber(call('ZSCORE', superseded.CLAIMS, name)) == token
  if is_held then superseded.forget(name) end
  return is_held
end

-- Renews a superseded claim. Returns true if the claim existed and had this token.
function superseded.renew(id, revision, token, to)
  local name = u48(revision) .. id
  local held = tonumber(call('ZSCORE', superseded.CLAIMS, name))
  if held ~= token and held ~= to then return false end
  call('ZADD', superseded.CLAIMS, text(to), name)
  return true
end

function superseded.forget_lapsed(limit)
  for _, name in ipairs(tokens.over(superseded.CLAIMS, limit)) do superseded.forget(name) end
end

-- Returns lapsed messages of a lane to the lane, at most `limit`. Returns the number of messages that
-- it has handled.
local function return_lapsed(n, limit)
  local key = leased_key(n)
  local suspects = call('HLEN', trials.KEY)
  local ids = tokens.over(key, limit + suspects)
  if suspects > 0 then ids = trials.without_doubt(ids, limit) end
  if #ids > 0 then open_gate() end
  local bytes = 0
  for i, id in ipairs(ids) do
    if bytes >= MOST_BYTES then return i - 1 end
    local e = load(id)
    bytes = bytes + (e and #e.value or 0)
    if e and e.lane == n then
      lapse(e)
    else
      call('ZREM', key, id)
      local value = call('HGET', MSG, id)
      if not e and value then set_aside(n, id, value) end
    end
  end
  return #ids
end

-- Ends the retries of a series that a command replaces or cancels. Returns true if a retry is in flight. A replacement
-- supersedes the claim of that retry. After a cancel, that retry runs for the last time.
local function end_retries(e, is_replaced)
  local in_flight = false
  for _, due in ipairs(occurrences.of(e)) do
    local retry = load(occurrences.id(e.id, due))
    local is_held = retry and token_of(retry)
    if is_held and not is_replaced then
      set(retry, NO_RETRY)
      store(retry)
    elseif retry then
      superseded.add(retry)
      finish_off(retry)
    end
    in_flight = in_flight or (is_held and true)
  end
  return in_flight
end

-- Returns the place of the first message of a lane that is not paused, or nil if there is none. Parks the paused
-- messages before it. After `most_parked` parked messages, it stops and returns now, so that the caller comes back.
local function head_of(n, most_parked)
  if is_held(n) then return nil end
  local key = due_key(n)
  for _ = 0, most_parked do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if not first[1] then return nil end
    local e = any_holds() and load(sub(first[1], MEMBER.ID_FIRST)) or nil
    if not (e and is_held(n, address_of(e))) then return tonumber(first[2]) end
    open_gate()
    call('ZREM', key, first[1])
    park(e)
  end
  return now
end
