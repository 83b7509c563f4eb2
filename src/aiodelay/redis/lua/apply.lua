-- apply: carries out commands in order; each has an answer of its own.
--@ base record memory moves
-- ARGV[4], ARGV[5]: a source and its next position, '' and '' without one. If the source has passed it: all answer 'P'.
-- From ARGV[6] on, 8 arguments a command: what, id, op (8 bytes), lane, due, late, version, body.
--   what    put: 'r' replace, 'k' keep, 'e' error, 'n' newer; then '*' if it recurs, '-' if not; for 'n', the version to
--           compare, u64. Others: 'c' cancel, 'm' reschedule, 'f' fire; their lane, late, version and body are ''.
--   id      byte 1 + 16 bytes of a UUIDv7, or byte 2 + text, or byte 3 + a series' id + its occurrence's due time, u48
--   due     epoch ms, or '+' and ms from now; '' for cancel and fire
--   late    '' deliver, '1:<ms>' drop, '2:<ms>' dead letter: so many ms past its due time
--   version u64, or ''
--   body    the MessagePack map of docs/formats.md
-- Returns now, then the answers. Done: a letter, revision u48, due u48: 's' stored, 'r' replaced, 'k' kept,
-- 'i' in flight, 'c' cancelled, 'm' rescheduled, 'f' fired. Refused: 'D' duplicate, 'O' + u64 outdated by that version,
-- 'N' not found, 'T' too late, 'I' in flight, 'P' passed, 'L' no lane is left.
local FIRST, STRIDE = 6, 8
local count = (#ARGV - FIRST + 1) / STRIDE
local answers = { text(now) }

local function due_of(written)
  if byte(written) == 43 then return now + tonumber(sub(written, 2)) end
  return math.max(tonumber(written), 0)
end

local function expiry(late, due)
  if late == '' then return 0, 0 end
  return tonumber(sub(late, 1, 1)), due + tonumber(sub(late, 3))
end

-- New ids that nothing is known of are gathered, and written in a few calls.
local fresh, records, places, expiring = {}, {}, {}, {}
local function flush()
  if #records == 0 then return end
  call('HSET', MSG, unpack(records))
  for n, members in pairs(places) do call('ZADD', due_key(n), unpack(members)) end
  if #expiring > 0 then call('ZADD', LATE, unpack(expiring)) end
  for id in pairs(fresh) do loaded[id] = nil end
  fresh, records, places, expiring = {}, {}, {}, {}
end

local LATE_STEP = 2 ^ LATE_SHIFT
local function new_entry(a, lane, revision)
  local due = due_of(ARGV[a + 4])
  local action, expires = expiry(ARGV[a + 5], due)
  local version = ARGV[a + 6]
  local flags = action * LATE_STEP
  if sub(ARGV[a], 2, 2) == '*' then flags = flags + RECURRING end
  if version ~= '' then flags = flags + VERSIONED else version = nil end
  return { id = ARGV[a + 1], flags = flags, lane = lane, revision = revision, due = due, place = due, expires = expires,
    attempt = 0, lapses = 0, kills = 0, op = ARGV[a + 2], version = version, body = ARGV[a + 7] }
end

local function put_fresh(e)
  e.sequence = next_sequence()
  earlier(e.lane, e.place)
  local value = pack(HEADED, e.sequence, FORMAT, e.flags, e.lane, e.revision, e.due, e.expires, 0, 0, 0, e.op)
  local members = places[e.lane] or {}
  places[e.lane] = members
  members[#members + 1] = e.place
  members[#members + 1] = sub(value, 1, 6) .. e.id
  records[#records + 1] = e.id
  records[#records + 1] = value .. (e.version or '') .. e.body
  if is_due_to_expire(e) then
    expiring[#expiring + 1] = math.max(e.place, e.expires + 1)
    expiring[#expiring + 1] = e.id
  end
  fresh[e.id] = true
  if #records >= 1000 then flush() end
end

-- Returns what a put comes to: a letter, and the version that outdates it.
local function verdict_on(a, e)
  local mode = sub(ARGV[a], 1, 1)
  if mode == 'n' then
    local known = recall_version(ARGV[a + 1])
    if e and e.version and (not known or is_newer(e.version, known)) then known = e.version end
    if known and not is_newer(sub(ARGV[a], 3), known) then return 'O' .. known end
  end
  if not e then return 's' end
  if mode == 'e' then return 'D' end
  local recurs = sub(ARGV[a], 2, 2) == '*'
  if mode == 'k' and (not recurs or not has(e, RECURRING)
      or same_rule(field({ body = ARGV[a + 7] }, 'r'), field(e, 'r'))) then
    return token_of(e) and 'i' or 'k'
  end
  return 'r'
end

local EVENTS = { s = 'stored', r = 'replaced', m = 'rescheduled', f = 'fired' }

local function put(a, e)
  local verdict = verdict_on(a, e)
  local letter = sub(verdict, 1, 1)
  if letter == 'k' or letter == 'i' then return letter .. u48(e.revision) .. u48(e.due) end
  if letter ~= 's' and letter ~= 'r' then return verdict end
  local lane = known_lane(ARGV[a + 3]) or new_lane(ARGV[a + 3])
  if not lane then return 'L' end
  if e then
    end_retries(e)
    finish_off(e)
  end
  local id = ARGV[a + 1]
  local revision = next_revision(byte(id) ~= 1 and recall_revision(id) or e and byte(id) == 1 and e.revision or nil)
  local n = new_entry(a, lane, revision)
  if letter == 's' and not any_holds() then
    put_fresh(n)
  else
    insert(n, n.due)
  end
  note(EVENTS[letter], n)
  return letter .. u48(revision) .. u48(n.due)
end

local function cancel(e)
  if not e then return 'N' end
  local in_flight = end_retries(e)
  if token_of(e) then
    in_flight = true
    set(e, NO_RETRY)
    store(e)
  else
    finish_off(e)
  end
  note('cancelled', e, in_flight and 'in flight' or '')
  return (in_flight and 'i' or 'c') .. u48(e.revision) .. u48(e.due)
end

local function change(a, e, letter)
  if not e then return 'N' end
  if token_of(e) then return letter == 'm' and 'T' or 'I' end
  remember_answer(e)
  leave_lane(e)
  local place
  if letter == 'm' then
    move(e, due_of(ARGV[a + 4]))
    place = e.due
  else
    place = math.min(e.place, now)
    if e.due > now then move(e, now) end
  end
  insert(e, place)
  note(EVENTS[letter], e)
  return letter .. u48(e.revision) .. u48(e.due)
end

local function carry_out(a)
  local what, id, op = sub(ARGV[a], 1, 1), ARGV[a + 1], ARGV[a + 2]
  if fresh[id] or (what == 'c' or what == 'm' or what == 'f') then flush() end
  local answer = recall_op(op)
  if answer then return answer end
  local e = load(id)
  if e and e.op == op then return first_answer(e) end
  if e then flush() end
  if what == 'c' then
    answer = cancel(e)
  elseif what == 'm' or what == 'f' then
    answer = change(a, e, what)
  else
    answer = put(a, e)
  end
  if sub(answer, 1, 1) ~= 's' then remember('o' .. op, now + WINDOW, answer) end
  return answer
end

local function check() -- all that is given, before anything is written
  if count ~= floor(count) then error('apply: the number of arguments is wrong') end
  for i = 0, count - 1 do
    local a = FIRST + i * STRIDE
    local what = sub(ARGV[a], 1, 1)
    if #ARGV[a + 2] ~= 8 then error('apply: an op is not 8 bytes long') end
    if what ~= 'c' and what ~= 'f' and not tonumber(ARGV[a + 4]) then error('apply: a due time is not a number') end
    if what ~= 'c' and what ~= 'f' and due_of(ARGV[a + 4]) >= PLACED then error('apply: a due time is too far') end
    if #ARGV[a + 6] ~= 0 and #ARGV[a + 6] ~= 8 then error('apply: a version is not 8 bytes long') end
  end
end

local function prefetch()
  for from = 0, count - 1, 500 do
    local ids, ops = {}, {}
    for i = from, math.min(from + 499, count - 1) do
      ids[#ids + 1] = ARGV[FIRST + i * STRIDE + 1]
      ops[#ops + 1] = 'o' .. ARGV[FIRST + i * STRIDE + 2]
    end
    prefetch_ops(ops)
    for i, value in ipairs(call('HMGET', MSG, unpack(ids))) do
      loaded[ids[i]] = value and parse(ids[i], value) or false
    end
  end
end

local function has_passed()
  local passed = ARGV[4] ~= '' and tonumber(call('HGET', SRC, ARGV[4]))
  return passed and tonumber(ARGV[5]) <= passed
end

local function carry_all_out()
  if ARGV[4] ~= '' then call('HSET', SRC, ARGV[4], ARGV[5]) end
  if count > 0 then prefetch() end
  for i = 0, count - 1 do answers[i + 2] = carry_out(FIRST + i * STRIDE) end
  flush()
end

-- WAIT and WAITAOF look at what their own connection wrote last: an answer that rests on what another one wrote, such as
-- that to a repeated command, must write as well, or it would not be waited for.
local function write_something()
  if sequence then return end
  open_gate()
  sequence = tonumber(call('HGET', META, 'seq') or 0)
end

check()
if has_passed() then
  for i = 1, count do answers[i + 1] = 'P' end
else
  carry_all_out()
end
write_something()
finish()
return answers
