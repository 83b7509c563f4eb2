-- apply: carries out commands in order. It returns one answer for each command.
--@ base record moves
-- ARGV[4] to ARGV[6] the name of an intake, its position before these commands, and its position after them. If the
--   stored position is not the position before the commands, no command is carried out, and every answer is 'P'. If no
--   position is stored, this is so only if '=' stands before the position before the commands. There
--   is one answer 'P' if there are no commands. If the store takes no new lane and a command needs one, no command is
--   carried out, and every answer is 'L'. A position is text: `aiodelay.backends.redis.records.positions`.
--   Without an intake: '', then a name for this call and the calls that the caller sends together with it, in order, or
--   '' if the call is alone; then ''. If an earlier one of these calls has not carried out all its commands, this call
--   carries out none.
-- From ARGV[7] on, 8 arguments for each command: what, id, op (8 bytes), lane, due, late, version, body. An argument
-- that a command does not use is ''.
--   what    for a put: 'r' replace, 'k' keep, 'e' error, 'n' newer, 'i' if_revision, 'b' earlier, 'a' later, 'd'
--           debounce, 't' throttle, 'T' throttle with a last message, 'p' append. Then '*' if the message recurs, '-' if not. Then
--           for 'n' the version to compare, u64; for 'i' the revision, u48; for 'd' the longest wait in ms, or ''; for
--           't' and 'T' the window in ms; for 'p' max_items or '', ':', the most bytes of a payload or '', ':', the
--           version of aiodelay that switches the feature `append` on. For other commands: 'c' cancel, 'm' reschedule, 'f' fire.
--   id      byte 1 + 16 bytes of a UUIDv7, or byte 2 + text, or byte 3 + the id of a series + the due time u48
--   op      With 8 zero bytes, the answer is not remembered. Then only a version protects the command against a
--           repetition.
--   due     epoch ms, or '+' and ms from now; for a debounced put '+' and its quiet time; for cancel '' or the due time
--           that the message must have; for fire ''
--   late    what happens that many ms after the due time: '' deliver, '1:<ms>' drop, '2:<ms>' dead letter
--   version u64, or ''
--   body    the MessagePack map of docs/formats.md; for cancel '' or the revision that the message must have
-- Returns now, then the answers. If the commands take long and there is no intake, there are fewer answers than
-- commands. The other commands were not carried out, and the caller sends them again.
--   Done: a letter, revision u48, due u48. 's' stored, 'r' replaced, 'R' replaced while an older version is in flight,
--   'k' kept (revision 0: the message has ended, and `due` is the beginning of its window), 'i' in flight, 'c' cancelled, 'm' rescheduled, 'f' fired.
--   Refused: a letter. 'D' duplicate, 'N' not found, 'T' too late, 'I' in flight, 'P' passed, 'L' too many lanes, 'X' the
--   stored message is of another kind, 'B' the joined payload is too large. 'O'
--   outdated, then revision u48 and due u48 of the stored message (0 = none), and for 'n' its version u64.
local FIRST, STRIDE = 7, 8
local BLOCK = 32 -- The number of records to read in one call. The records of a whole batch may be too large.
-- A put with a new id costs 1. A change takes three times as long, and longer for a large record.
local MOST_COST, CHANGE_COST, CHANGE_BYTES = 170, 3, 4096
local count = (#ARGV - FIRST + 1) / STRIDE
local answers, cost = { text(now) }, 0

local dues = {} -- A cache by the argument `due`, because many commands of a batch have the same value.
local function due_of(written)
  local due = dues[written]
  if not due then
    if byte(written) == 43 then
      due = now + (tonumber(sub(written, LETTERED.REST_FIRST)) or PLACED)
    else
      due = math.max(tonumber(written) or PLACED, 0)
    end
    dues[written] = due
  end
  return due
end

local LATE_STEP = 2 ^ LATE_SHIFT
local function flags_of(a)
  if ARGV[a] == 'r-' and ARGV[a + 5] == '' and ARGV[a + 6] == '' then return 0 end
  local flags = 0
  if ARGV[a + 5] ~= '' then flags = tonumber(sub(ARGV[a + 5], LATENESS.ACTION_FIRST, LATENESS.ACTION_LAST)) * LATE_STEP end
  if sub(ARGV[a], WHAT.RECURS_FIRST, WHAT.RECURS_LAST) == '*' then flags = flags + RECURRING end
  if ARGV[a + 6] ~= '' then flags = flags + VERSIONED end
  return flags
end

local function expiry(a, due)
  return ARGV[a + 5] == '' and 0 or due + tonumber(sub(ARGV[a + 5], LATENESS.MS_FIRST))
end

local function new_entry(a, lane, revision, due)
  local version = ARGV[a + 6] ~= '' and ARGV[a + 6] or nil
  return { id = ARGV[a + 1], flags = flags_of(a), lane = lane, revision = revision, due = due, place = due,
    expires = expiry(a, due), attempt = 0, lapses = 0, kills = 0, op = ARGV[a + 2], version = version, body = ARGV[a + 7] }
end

-- put_fresh() collects the puts of new ids, and flush() writes them with a few calls.
local fresh, records, places, expiring, n_records = {}, {}, {}, {}, 0
local function flush()
  if n_records == 0 then return end
  call('HSET', MSG, unpack(records, 1, n_records))
  for n, members in pairs(places) do call('ZADD', due_key(n), unpack(members)) end
  if #expiring > 0 then call('ZADD', LATE, unpack(expiring)) end
  for id in pairs(fresh) do loaded[id] = nil end
  fresh, records, places, expiring, n_records = {}, {}, {}, {}, 0
end

local function put_fresh(a, lane, revision, due)
  local id, flags, expires = ARGV[a + 1], flags_of(a), expiry(a, due)
  earlier(lane, due)
  local head = pack(HEADED, next_sequence(false), FORMAT, flags, lane, revision, due, expires, 0, 0, 0, ARGV[a + 2])
  local members = places[lane] or {}
  places[lane] = members
  members[#members + 1] = due
  members[#members + 1] = sub(head, VALUE.SEQUENCE_FIRST, VALUE.SEQUENCE_LAST) .. id
  records[n_records + 1], records[n_records + 2] = id, head .. ARGV[a + 6] .. ARGV[a + 7]
  n_records = n_records + 2
  if expires > 0 and band(flags, RECURRING) == 0 then
    expiring[#expiring + 1] = math.max(due, expires + 1)
    expiring[#expiring + 1] = id
  end
  fresh[id] = true
  if n_records >= 1000 then flush() end
end

local function outdated(e, version)
  return 'O' .. u48(e and e.revision or 0) .. u48(e and e.due or 0) .. (version or '')
end

local TIMED = { b = true, a = true, d = true, t = true, T = true }

-- Returns the answer of a put that its conflict mode gives. This is one letter, or the whole answer.
local function verdict_on(a, e, mode)
  if mode == 'n' then
    local known = memory.known_version(ARGV[a + 1], e)
    if known and not memory.is_newer(sub(ARGV[a], WHAT.OPERAND_FIRST), known) then return outdated(e, known) end
  end
  if mode == 'i' then
    local is_same = e and u48(e.revision) == sub(ARGV[a], WHAT.OPERAND_FIRST)
    if not is_same or (appends and appending.has_items(e)) then return outdated(e) end
  end
  if TIMED[mode] then
    local is_kept, since = conflicts.is_kept(a, e, mode, due_of(ARGV[a + 4]))
    if is_kept and not e then return 'k' .. u48(0) .. u48(since) end
    if is_kept then return token_of(e) and 'i' or 'k' end
  end
  if not e then return 's' end
  if mode == 'e' then return 'D' end
  local recurs = sub(ARGV[a], WHAT.RECURS_FIRST, WHAT.RECURS_LAST) == '*'
  if mode == 'k' and (not recurs or not has(e, RECURRING)
      or fields.same_rule(fields.get({ body = ARGV[a + 7] }, BODY.RULE), fields.get(e, BODY.RULE))) then
    return token_of(e) and 'i' or 'k'
  end
  return 'r'
end

local EVENTS = { s = 'stored', r = 'replaced', m = 'rescheduled', f = 'fired' }

local function switch_on_append(version)
  if appends then return end
  features = (features and features .. ' ' or '') .. 'append=' .. version
  appends = true
  call('HSET', META, 'features', features)
end

local function put(a, e)
  local letter, mode = 's', sub(ARGV[a], WHAT.VERB_FIRST, WHAT.VERB_LAST)
  if mode == 'p' then
    switch_on_append(string.match(ARGV[a], '[^:]*$'))
    if e then return appending.append(a, e, due_of(ARGV[a + 4])) end
  end
  if e or mode == 'n' or mode == 'i' or TIMED[mode] then
    local verdict = verdict_on(a, e, mode)
    letter = sub(verdict, ANSWER.LETTER_FIRST, ANSWER.LETTER_LAST)
    if (letter == 'k' or letter == 'i') and e then return letter .. u48(e.revision) .. u48(e.due) end
    if letter ~= 's' and letter ~= 'r' then return verdict end
  end
  local lane = known_lane(ARGV[a + 3]) or new_lane(ARGV[a + 3])
  if not lane then return 'L' end
  local id, due = ARGV[a + 1], due_of(ARGV[a + 4])
  local version, since, has_times = nil, nil, mode == 'd' or mode == 't' or mode == 'T'
  if has_times then due, version, since = conflicts.times(a, e, mode, due) end
  if e then
    occurrences.end_retries(e, true)
    superseded.add(e)
    if appends then appending.drop(e) end
    -- If the new message has a newer version, the store need not remember the old version.
    if e.version and #ARGV[a + 6] > 0 and memory.is_newer(ARGV[a + 6], e.version) then e.version = nil end
    if version then e.version = nil end
    finish_off(e)
  end
  local revision = memory.next_revision(byte(id) ~= ID.OWN and memory.recall_revision(id) or e and byte(id) == ID.OWN and e.revision or nil)
  if letter == 's' and not any_holds() and not has_times and not (limited and is_limited(lane)) then
    put_fresh(a, lane, revision, due)
  else
    local new = new_entry(a, lane, revision, due)
    if has_times then conflicts.mark(new, version, since) end
    insert(new, due)
  end
  if ARGV[2] ~= '0' then
    note(EVENTS[letter], { id = id, revision = revision, lane = lane, due = due, attempt = 0 })
  end
  if letter == 'r' and superseded.is_any(id) then letter = 'R' end
  return pack(ANSWER.PACKED, letter, revision, due)
end

local function cancel(a, e)
  if not e then return 'N' end
  local due, revision = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 7])
  if revision and (e.revision ~= revision or (due and e.due ~= due)) then return outdated(e) end
  if revision and appends and appending.has_items(e) then return outdated(e) end
  local in_flight = occurrences.end_retries(e) or superseded.is_any(e.id)
  if token_of(e) then
    in_flight = true
    if appends then appending.drop(e) end
    set(e, NO_RETRY)
    store(e)
  else
    finish_off(e)
  end
  note('cancelled', e, in_flight and 'in_flight' or '')
  return (in_flight and 'i' or 'c') .. u48(e.revision) .. u48(e.due)
end

local function change(a, e, letter)
  if not e then return 'N' end
  if token_of(e) then return letter == 'm' and 'T' or 'I' end
  memory.remember_answer(e)
  leave_lane(e)
  local place
  if letter == 'm' then
    attempts.move(e, due_of(ARGV[a + 4]))
    place = e.due
  else
    place = math.min(e.place, now)
    if e.due > now then attempts.move(e, now) end
  end
  insert(e, place)
  note(EVENTS[letter], e)
  return letter .. u48(e.revision) .. u48(e.due)
end

local has_repeated = false -- True if a command was a repetition.
local function carry_out(a, what_of_op)
  local what, id, op = sub(ARGV[a], WHAT.VERB_FIRST, WHAT.VERB_LAST), ARGV[a + 1], ARGV[a + 2]
  if fresh[id] or what == 'c' or what == 'm' or what == 'f' then flush() end
  local is_remembered = op ~= NO_OP
  local answer = is_remembered and memory.recall(what_of_op)
  if answer then
    has_repeated = true
    return answer
  end
  local e = load(id)
  cost = cost + (e and CHANGE_COST + floor(#e.value / CHANGE_BYTES) or 1)
  if e and is_remembered and e.op == op then
    has_repeated = true
    return memory.first_answer(e)
  end
  if e then flush() end
  if what == 'c' then
    answer = cancel(a, e)
  elseif what == 'm' or what == 'f' then
    answer = change(a, e, what)
  else
    if sub(ARGV[a], WHAT.RECURS_FIRST, WHAT.RECURS_LAST) == '*' then call('ZADD', TAG .. 'series', 0, id) end
    answer = put(a, e)
  end
  if is_remembered and byte(answer) ~= 115 then memory.remember(what_of_op, now + memory.WINDOW, answer) end
  return answer
end

-- Checks all arguments. Call this before the first write.
local function check()
  if count ~= floor(count) then error('apply: the number of arguments is wrong') end
  for a = FIRST, #ARGV, STRIDE do
    local what = byte(ARGV[a])
    if #ARGV[a + 2] ~= RECORD.OP_SIZE then error('apply: an op is not 8 bytes long') end
    if what ~= 99 and what ~= 102 and not (due_of(ARGV[a + 4]) < PLACED) then
      error('apply: a due time is not a number, or too far')
    end
    if #ARGV[a + 6] ~= 0 and #ARGV[a + 6] ~= RECORD.VERSION_SIZE then error('apply: a version is not 8 bytes long') end
  end
end

local function read_block(from, to)
  local ids, ops, things = {}, {}, {}
  for i = from, to do
    local id, op = ARGV[FIRST + i * STRIDE + 1], ARGV[FIRST + i * STRIDE + 2]
    ids[#ids + 1], ops[#ops + 1] = id, 'o' .. op
    if op ~= NO_OP then things[#things + 1] = 'o' .. op end
    if byte(id) ~= ID.OWN then things[#things + 1] = 'r' .. id end
  end
  if #things > 0 then memory.prefetch(things) end
  for i, value in ipairs(call('HMGET', MSG, unpack(ids))) do
    loaded[ids[i]] = value and parse(ids[i], value) or false
  end
  return ops
end

local function has_passed()
  local position, known = call('HGET', SRC, ARGV[4]), string.match(ARGV[5], '^=(.*)$')
  if known then return position ~= known end
  return position and position ~= ARGV[5]
end

-- Gives a number to each lane of the commands. Returns false if the store takes no more lanes.
local function has_lanes()
  for a = FIRST, #ARGV, STRIDE do
    local lane = ARGV[a + 3]
    if lane ~= '' and not known_lane(lane) and not new_lane(lane) then return false end
  end
  return true
end

-- Returns the answer to all commands of an intake if none of them is carried out, else nil.
local function refusal()
  if ARGV[4] == '' then return nil end
  if has_passed() then return 'P' end
  return not has_lanes() and 'L' or nil
end

local is_together = ARGV[4] == '' and ARGV[5] ~= ''
local CUT = TAG .. 'cut:' .. ARGV[5]
local CUT_KEPT = 60000 -- The caller waits for its answers for a shorter time.
local function cut_short()
  flush()
  if is_together then call('SET', CUT, 1, 'PX', CUT_KEPT) end
end

local function carry_all_out()
  if ARGV[4] ~= '' and call('HSET', SRC, ARGV[4], ARGV[6]) == 1 then
    call('HSET', META, 'sources', call('HLEN', SRC)) -- The script `present` compares this count.
  end
  local most_cost = ARGV[4] == '' and MOST_COST or math.huge
  for from = 0, count - 1, BLOCK do
    local to = math.min(from + BLOCK, count) - 1
    local ops = cost < most_cost and read_block(from, to)
    for i = from, to do
      if cost >= most_cost then return cut_short() end
      answers[i + 2] = carry_out(FIRST + i * STRIDE, ops[i - from + 1])
    end
  end
  flush()
end

-- Writes something even if no command has written. WAIT and WAITAOF wait only for the last write of their own
-- connection. The answer to a repeated command depends on a write of another connection. Without a write here, WAIT
-- would return at once. After a repetition, the write also changes the marks of the store: an earlier call may have
-- failed after it stored a message, so other processes have to look for it.
local function write_something()
  if counted.sequence then return end
  open_gate()
  if has_repeated then next_sequence(false) else counted.last_sequence() end
end

check()
local refused = refusal()
if refused then
  for i = 1, math.max(count, 1) do answers[i + 1] = refused end
elseif not is_together or call('EXISTS', CUT) == 0 then
  carry_all_out()
end
write_something()
finish()
return answers
