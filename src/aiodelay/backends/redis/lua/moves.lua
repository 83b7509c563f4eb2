-- moves: the steps that everything else is made of; the decisions are those of aiodelay/transitions.py.
local SUSPECT_LAPSES, KILLS_TO_DEATH = 2, 3
local MAX_LEASE = 60000
local TOKEN_EPOCH, COUNTERS = 1735689600000, 4096
-- So much of records a script reads, and one record more.
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

-- An address that its sink finds full or broken, by the lane's number: when it is tried next, and why it takes nothing.
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

-- Trials of suspects: id -> 'a' alone or 'g' in a group, how long a lease lasts in ms, when the process told last that it
-- holds it, and the worker.
local trials = { KEY = TAG .. 'trials', MOST = 500, FIRST = 1000, LONGEST = 60000, SILENT_LEASES = 4, DEAD_LEASES = 2 }

function trials.write(id, kind, lease, worker)
  call('HSET', trials.KEY, id, string.format('%s %d %.0f %s', kind, lease, now, worker))
end

-- META holds how large the last group was, 0 once its process has ended, and how many, the first of their lanes when it
-- was taken, hold a killer.
function trials.hot() -- the suspects that hold a killer, without the group that came through the last trial
  local known = call('HMGET', META, 'tried', 'hot')
  return math.max(tonumber(known[2] or 0) - tonumber(known[1] or 0), 0)
end

function trials.most() -- half of the suspects that hold a killer, or all if none is known to
  local hot = trials.hot()
  return hot > 0 and floor((hot + 1) / 2) or trials.MOST
end

-- META also holds when a message last became a suspect, and when the process of the last kill was last heard of. If that
-- message became a suspect later, it may have ended the process.
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

function trials.note_death() -- a lease of the group has ended: the group holds a killer
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

function trials.seen(worker) -- when anything was heard of a worker, nil if it is not known
  local is_read, serves = pcall(cmsgpack.unpack, call('HGET', WORKERS, worker) or '')
  return is_read and type(serves) == 'table' and tonumber(serves[1]) or nil
end

function trials.parse(value)
  local kind, lease, beat, worker = string.match(value, '^(%l) (%d+) (%d+) (.*)$')
  return kind, tonumber(lease), tonumber(beat), worker
end

function trials.of(id) return trials.parse(call('HGET', trials.KEY, id) or '') end

function trials.is_in_doubt(id) -- its process may hold it still: it is known, and was heard of not long ago
  local kind, lease, beat, worker = trials.of(id)
  return kind == 'a' and trials.seen(worker) and math.abs(now - beat) < trials.SILENT_LEASES * lease
end

function trials.has_died(id) -- the process that had claimed it has ended
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

-- Fields of hashes that hold parts of one length, side by side.
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

-- Occurrences of series that are tried again. A series lists its own. LEFT: those that no series lists: its id -> their
-- due times, u48 each.
local occurrences = { LEFT = TAG .. 'retries' }

function occurrences.id(series_id, due) -- the due time as u48
  return string.char(OCCURRENCE) .. series_id .. due
end

-- Returns an occurrence's series, nil if there is none any more, and the occurrence's due time.
function occurrences.series(id)
  if byte(id) ~= OCCURRENCE then return nil end
  local series = load(sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST))
  return series and has(series, RECURRING) and series or nil, (unpack_bytes('>I6', sub(id, OCCURRENCE_ID.DUE_FIRST)))
end

function occurrences.list(series, live)
  rewrite(series, { [BODY.LIVE] = written_list(live) })
  store(series)
end

function occurrences.strike(id) -- one has ended: it is listed no more
  parts.remove(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
  local series, due = occurrences.series(id)
  if not series then return end
  local live, left = live_of(series), {}
  for _, each in ipairs(live) do if each ~= due then left[#left + 1] = each end end
  if #left < #live then occurrences.list(series, left) end
end

function occurrences.list_apart(id) -- one is tried again that no series lists
  parts.add(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
end

function occurrences.leave(series) -- it has ended
  local is_readable, live = pcall(live_of, series)
  for _, due in ipairs(is_readable and live or {}) do parts.add(occurrences.LEFT, series.id, u48(due)) end
end

function occurrences.of(e) -- the due times, u48, of those that go on beside a message
  local dues, left = {}, call('HGET', occurrences.LEFT, e.id) or ''
  for at = 1, #left, OCCURRENCE_ID.DUE_SIZE do dues[#dues + 1] = sub(left, at, at + OCCURRENCE_ID.DUE_SIZE - 1) end
  for _, due in ipairs(has(e, RECURRING) and live_of(e) or {}) do dues[#dues + 1] = u48(due) end
  return dues
end

local function forget(e) -- it was taken out, and nothing takes its place
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
  pcall(rewrite, o, { [BODY.RULE] = false, [BODY.LIVE] = false }) -- else it is given up because its body cannot be read
  return o
end

-- Of dead letters: one table, as a script may have no more than 200 locals.
local graves = { BY_ID = TAG .. 'graves:ids' }

-- All keys of one id, which have one length, stand side by side.
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

-- A value that cannot be read is set aside whole, under reason '?': the mark, lane u16, then the value.
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

local function keep_put_due(e) -- for its delivery id; the occurrences of a series are told by their due times
  if has(e, RECURRING) or field(e, BODY.PUT_DUE_MS) then return end
  rewrite(e, { [BODY.PUT_DUE_MS] = pack('>BI8', 0xcf, e.due) })
end

local function move(e, due) -- its due time, and the time from which it is late with it
  pcall(keep_put_due, e) -- else it is given up because its body cannot be read
  local live = has(e, RECURRING) and live_of(e) or {}
  while contains(live, due) do due = due + 1 end
  if e.expires ~= 0 then e.expires = e.expires - e.due + due end
  e.due = due
end

local count_attempt
do
  local EARLIER_ERRORS = 4

  local function earlier_errors(e, last) -- as they are written, with the last one so far at their end
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

  function count_attempt(e, attempt, error_text, trace, traceback)
    e.attempt = math.min(tonumber(attempt), MOST_ATTEMPTS)
    e.lapses, e.kills = 0, 0
    unset(e, ALONE)
    local is_readable, changes = pcall(written_end, e, error_text, trace, traceback)
    if is_readable then rewrite(e, changes) end -- else it is given up because its body cannot be read
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

local tokens = { RIGHTING = 20000 } -- one table, as a script may have no more than 200 locals

function tokens.at(deadline, counter) return (deadline - TOKEN_EPOCH) * COUNTERS + counter % COUNTERS end

-- The first token of a lease that is not over, and the first of one that is too long: the clock has stepped back since.
tokens.LEAST, tokens.TOO_LONG = tokens.at(now + 1, 0), tokens.at(now + MAX_LEASE + 1, 0)

-- Says whether holders of leases that are too long, of which there are some, have had the time to set them right.
function tokens.is_righting_over()
  local since = tonumber(call('HGET', META, 'ahead') or 0)
  if since > now or now > since + 2 * tokens.RIGHTING then
    since = now
    open_gate()
    call('HSET', META, 'ahead', text(now))
  end
  return since + tokens.RIGHTING <= now
end

function tokens.over(key, limit) -- the members of a zset of tokens whose leases are over
  local found = call('ZRANGEBYSCORE', key, '-inf', '(' .. text(tokens.LEAST), 'LIMIT', 0, limit)
  local ahead = call('ZRANGEBYSCORE', key, text(tokens.TOO_LONG), '+inf', 'LIMIT', 0, limit - #found)
  if #ahead > 0 and tokens.is_righting_over() then
    for _, member in ipairs(ahead) do found[#found + 1] = member end
  end
  return found
end

-- Says whether suspects are being tried; a lone one whose lease is over, and which is in doubt, keeps none waiting.
-- A failover has left an entry that is older than any trial.
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

local LAPSED_AT_ONCE = 60 -- so many cost a claim as much as all else that it does

-- Claims on versions that were replaced while they were in flight, each until it is settled or its lease is over. Those on
-- retries are listed under the id of their series, with the due time of the occurrence.
local superseded = { CLAIMS = TAG .. 'superseded', VERSIONS = TAG .. 'superseded:ids', ITSELF = string.rep('\255', OCCURRENCE_ID.DUE_SIZE) }

function superseded.split(id) -- the id under which it is listed, and the due time of an occurrence
  if byte(id) ~= OCCURRENCE then return id, superseded.ITSELF end
  return sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
end

function superseded.add(e) -- before it is taken out
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

function superseded.forget(name) -- a revision and an id
  local id, due = superseded.split(sub(name, SUPERSEDED.ID_FIRST))
  call('ZREM', superseded.CLAIMS, name)
  parts.remove(superseded.VERSIONS, id, sub(name, SUPERSEDED.REVISION_FIRST, SUPERSEDED.REVISION_LAST) .. due)
end

function superseded.settle(id, revision, token) -- says whether it was held
  local name = u48(revision) .. id
  local is_held = tonumber(call('ZSCORE', superseded.CLAIMS, name)) == token
  if is_held then superseded.forget(name) end
  return is_held
end

function superseded.renew(id, revision, token, to) -- says whether it is held
  local name = u48(revision) .. id
  local held = tonumber(call('ZSCORE', superseded.CLAIMS, name))
  if held ~= token and held ~= to then return false end
  call('ZADD', superseded.CLAIMS, text(to), name)
  return true
end

function superseded.forget_lapsed(limit)
  for _, name in ipairs(tokens.over(superseded.CLAIMS, limit)) do superseded.forget(name) end
end

-- Puts back what was claimed and not settled in time.
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

-- Ends the retries that go on beside a message; says whether one is in flight. A replacement fences that one off, a cancel
-- lets it run for the last time.
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

-- Returns the first message of a lane that is not held, parking what is; `score` nil if there is none.
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
