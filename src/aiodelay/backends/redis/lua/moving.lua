-- moving: the common part of `transfer`, `transfer_logs` and `transfer_topics`. It moves due messages of one lane to
-- their addresses. One script first delivers messages and then removes them from the store.
--
-- The part before this one (`lists`, `logs` or `topics`) defines the table `destination`:
--   look_at(t)           returns two values: the reason why the address takes nothing, or nil; and the number of
--                        messages for which the address has room. It may set t.key, t.is_raw and t.cost. It sets
--                        t.is_elsewhere if claims take the messages for this address.
--   append(t, elements)  delivers elements. It returns nil, or the reason why it could not deliver them.
--   is_shared            true if claims take the other messages of the lane
--   FULL                 the reason of an address without room
--   MOST_COST            the largest sum of t.cost in one call of the script. The first message may exceed it.
local MOST = 500
local N, NOW = known_lane(ARGV[4]), text(now)
local most, most_bytes = math.min(tonumber(ARGV[5]), MOST), math.min(tonumber(ARGV[6]), MOST_BYTES)
local moved, messages, bytes, read, read_bytes = 0, 0, 0, 0, 0
local has_left = false -- True if the script has left messages to claims.
local targets, in_order, rooms, series = {}, {}, {}, {}
local has_blocked = N and call('EXISTS', blocked_key(N)) == 1

destination.traces, destination.most_traces = {}, 2 * tonumber(ARGV[8])

function destination.tell(e)
  local is_readable, trace = pcall(fields.get, e, BODY.TRACE)
  if is_readable and trace and #destination.traces < destination.most_traces then
    destination.traces[#destination.traces + 1], destination.traces[#destination.traces + 2] = e.id, trace
  end
end

local function target_of(address)
  local t = targets[address]
  if t then return t end
  t = { address = address, key = address, cost = 0, is_held = is_held(N, address),
    is_blocked = has_blocked and call('ZSCORE', blocked_key(N), address) and true, elements = {}, ids = {}, from = {},
    memories = {}, others = {}, parked = {}, places = {} }
  targets[address], in_order[#in_order + 1] = t, t
  local broken, room = destination.look_at(t)
  t.broken, rooms[t.key] = broken, rooms[t.key] or room
  return t
end

local function why_not(t)
  return t.broken or rooms[t.key] <= 0 and destination.FULL or nil
end

-- --- list elements: id, prefix and body with the time of the push; or the payload alone -----------------------------

local written, written_plain
do
  -- HEADS: size -> the first bytes of a MessagePack binary. MAPS: the first byte of a map -> the first
  -- byte of a map with one more key.
  local HEADS, MAPS = {}, {}
  for first = 0x80, 0x8e do MAPS[first] = string.char(first + 1) end

  local function head_of_bin(size)
    HEADS[size] = size < 256 and '\196' .. string.char(size) or pack('>BH', 0xc5, size)
    return HEADS[size]
  end

  local PUSHED = ELEMENT.PUSHED .. pack('>I8', now)

  local function element_of(e)
    local size = e.version and RECORD.VERSIONED_SIZE or RECORD.SIZE
    local record = e.body and record_bytes(e) or sub(e.value, e.body_at - size)
    local body_at = size + 1
    local map = byte(record, body_at)
    local head = head_of_bin(#e.id) .. e.id .. head_of_bin(size) .. sub(record, 1, size)
    -- If the map has 15 keys or more, its first byte cannot count one more key. Leave out the time then.
    if not MAPS[map] then return head .. sub(record, body_at) end
    return head .. MAPS[map] .. sub(record, body_at + 1) .. PUSHED
  end

  local function payload_of(e)
    local s, at = e.body or e.value, e.body and 1 or e.body_at
    at = fields.value_at(s, at, BODY.PAYLOAD_BYTE)
    if not at then return '' end
    local from, length = fields.blob(s, at)
    return sub(s, from, from + length - 1)
  end

  function written(t, e)
    return t.is_raw and payload_of(e) or element_of(e)
  end

  -- Returns the element of a value that has no flags and whose place is its due time. This needs one concatenation and
  -- no function calls.
  function written_plain(id, value)
    return (HEADS[#id] or head_of_bin(#id)) .. id .. RECORD.BIN .. sub(value, VALUE.FORMAT_FIRST, VALUE.OP_LAST)
      .. MAPS[byte(value, VALUE.BODY_FIRST)] .. sub(value, VALUE.BODY_FIRST + 1) .. PUSHED
  end
end

local function park_for(t, name, place)
  t.parked[#t.parked + 1], t.places[#t.places + 1], t.places[#t.places + 2] = name, place, name
end

-- --- moving ------------------------------------------------------------------------------------------------------

local push
do
  local function after_end(e)
    if is_due_to_expire(e) then call('ZREM', LATE, e.id) end
    if byte(e.id) == OCCURRENCE then occurrences.strike(e.id) else memory.remember_end(e) end
  end

  -- Removes the messages. All other steps come later: after an error in them, a later call cannot deliver the messages
  -- again.
  local function remove(t)
    for key, members in pairs(t.from) do call('ZREM', key, unpack(members)) end
    call('HDEL', MSG, unpack(t.ids))
    for _, e in ipairs(t.others) do
      loaded[e.id] = false
      note('delivered', e)
      pcall(after_end, e)
    end
    if #t.memories > 0 then memory.remember_all(t.memories) end
  end

  local function tell_all(ids)
    for _, id in ipairs(ids) do
      if #destination.traces >= destination.most_traces then return end
      local e = parse(id, call('HGET', MSG, id))
      if e then destination.tell(e) end
    end
  end

  function push(t)
    t.broken = destination.append(t, t.elements)
    if t.broken then
      for _, name in ipairs(t.from[due_key(N)] or {}) do park_for(t, name, call('ZSCORE', due_key(N), name)) end
      return
    end
    if destination.most_traces > 0 then tell_all(t.ids) end
    remove(t)
    t.has_moved, moved = true, moved + #t.ids
  end
end

-- --- reading due messages ----------------------------------------------------------------------------------------

local walk, try_blocked
do
  local MOST_READ, MOST_TRIED, MOST_SERIES, MOST_TARGETS, GROWTH = 1000, 20, 100, 250, 20

  -- Returns the address and the size of a value in the most frequent form. It has no flags, its place is its due time,
  -- and its body has a few texts and binaries but no key and no headers. Returns nil for any other value. Then look()
  -- decodes the whole record.
  local function plain(s)
    if byte(s) >= VALUE.PLACED_BYTE or byte(s, VALUE.FORMAT_FIRST) ~= FORMAT then return nil end
    if byte(s, VALUE.FLAGS_FIRST) ~= 0 then return nil end
    local map = byte(s, VALUE.BODY_FIRST)
    if not map or map < 0x81 or map > 0x8e then return nil end
    local at, address, size = VALUE.BODY_FIRST + 1, '', 0
    for _ = 1, map - 0x80 do
      local one, key, kind, length = byte(s, at, at + 3)
      if one ~= 0xa1 or not length or key == BODY.KEY_BYTE then return nil end
      if kind >= 0xa0 and kind < 0xc0 then
        if key == BODY.ADDRESS_BYTE then address = sub(s, at + 3, at + kind - 0x9e) end
        at = at + 3 + kind - 0xa0
      elseif kind == 0xd9 then
        if key == BODY.ADDRESS_BYTE then address = sub(s, at + 4, at + 3 + length) end
        at = at + 4 + length
      elseif kind == 0xc4 then
        at, size = at + 4 + length, size + length
      elseif kind == 0xc5 then
        length = 256 * length + (byte(s, at + 4) or 0)
        at, size = at + 5 + length, size + length
      else
        return nil
      end
    end
    if at ~= #s + 1 then return nil end
    return address, size
  end

  local function has_room(t, size)
    if messages == 0 then return most > 0 end
    return messages < most and bytes + size <= most_bytes and destination.cost + t.cost <= destination.MOST_COST
  end

  local function take(t, key, name, id, size, element)
    local members = t.from[key] or {}
    t.from[key] = members
    members[#members + 1] = name
    t.elements[#t.elements + 1], t.ids[#t.ids + 1] = element, id
    rooms[t.key], messages, bytes = rooms[t.key] - 1, messages + 1, bytes + size
    destination.cost = destination.cost + t.cost
  end

  local function look_at_plain(t, key, name, id, value, size)
    if not has_room(t, size) then return 'stop' end
    take(t, key, name, id, size, t.is_raw and written(t, parse(id, value)) or written_plain(id, value))
    local memories, until_ms = t.memories, unpack_bytes('>I6', value, VALUE.REVISION_FIRST) + memory.WINDOW
    if until_ms > now and sub(value, VALUE.OP_FIRST, VALUE.OP_LAST) ~= NO_OP then
      memories[#memories + 1] = 'o' .. sub(value, VALUE.OP_FIRST, VALUE.OP_LAST)
      memories[#memories + 1] = u48(until_ms) .. 's' .. sub(value, VALUE.REVISION_FIRST, VALUE.DUE_MS_LAST)
    end
    if byte(id) ~= ID.OWN then
      memories[#memories + 1] = 'r' .. id
      memories[#memories + 1] = sub(value, VALUE.REVISION_FIRST, VALUE.REVISION_LAST)
    end
    return nil
  end

  local function place_of(e, value)
    return e and e.place or unpack_bytes('>I6', value, VALUE.DUE_MS_FIRST)
  end

  -- Returns a message to its lane: it was parked while the namespace was on a single server.
  local function back_to_lane(key, name, place)
    earlier(N, place)
    call('ZREM', key, name)
    call('ZADD', due_key(N), text(place), name)
    return 'gone'
  end

  -- Handles one due message. Returns 'gone' if the message has left the set `key`. Returns 'stop' if the caller must
  -- read no more messages. Returns nil if the message stays in `key` until push() or leave().
  local function look(key, name, id, value, trying)
    if read >= MOST_READ or read_bytes > MOST_BYTES then return 'stop' end
    read, read_bytes = read + 1, read_bytes + (value and #value or 0)
    local address, size = nil, nil
    if value and ARGV[2] == '0' and byte(id) ~= OCCURRENCE
        and sub(name, MEMBER.SEQUENCE_FIRST, MEMBER.SEQUENCE_LAST) == sub(value, VALUE.SEQUENCE_FIRST, VALUE.SEQUENCE_LAST) then
      address, size = plain(value)
    end
    local e = nil
    if not address then
      e = readable(id, value)
      if pass(N, key, name, id, value, e) then return 'gone' end
      address = fields.address_of(e)
    end
    if not targets[address] and #in_order == MOST_TARGETS then return 'stop' end
    local t = trying or target_of(address)
    if t.is_elsewhere and not t.is_held then
      has_left = true
      if trying then return back_to_lane(key, name, place_of(e, value)) end
    elseif t.is_held or why_not(t) or (t.is_blocked and not trying) then
      if trying then return 'stop' end
      park_for(t, name, place_of(e, value))
    elseif not e then
      return look_at_plain(t, key, name, id, value, size)
    elseif has(e, RECURRING) then
      if #series < 2 * MOST_SERIES then series[#series + 1], series[#series + 2] = id, e.value end
    elseif has_room(t, e.size) then
      take(t, key, name, id, e.size, written(t, e))
      t.others[#t.others + 1] = e
    else
      return 'stop'
    end
    return nil
  end

  -- Returns how many messages to read next. It assumes that they have the average size of the messages before them.
  local function next_limit()
    if read == 0 then return 1 end
    local fits = floor((MOST_BYTES - read_bytes) / (read_bytes / read + 1))
    return math.max(1, math.min(read * GROWTH, MOST, fits))
  end

  function walk(key, trying)
    local stays = 0
    while true do
      local limit = next_limit()
      local found = call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', stays, limit)
      if #found == 0 then return end
      local ids = {}
      for i, name in ipairs(found) do ids[i] = sub(name, MEMBER.ID_FIRST) end
      local values = call('HMGET', MSG, unpack(ids))
      for i, name in ipairs(found) do
        local verdict = look(key, name, ids[i], values[i], trying)
        if verdict == 'stop' then return end
        if not verdict then stays = stays + 1 end
      end
      if #found < limit then return end
    end
  end

  -- Tries the blocked addresses again. They may use half of the messages of this call. The other half is for the lane.
  function try_blocked()
    local most_before = most
    most = math.max(1, floor(most / 2))
    for _, address in ipairs(call('ZRANGEBYSCORE', blocked_key(N), '-inf', NOW, 'LIMIT', 0, MOST_TRIED)) do
      local t = target_of(address)
      if t.is_held then
        unblock(N, address)
      else
        t.is_tried = true
        if not why_not(t) then walk(TAG .. 'parked:' .. N .. ':' .. address, t) end
      end
    end
    most = most_before
  end
end

-- --- series ------------------------------------------------------------------------------------------------------

local end_occurrence
do
  -- Delivers an occurrence of a series. Returns true if the occurrence may end as delivered.
  local function push_occurrence(e)
    local t = target_of(fields.address_of(e))
    if not why_not(t) then
      local cost = destination.cost + t.cost
      -- The next call returns this series again.
      if cost > t.cost and cost > destination.MOST_COST then return false end
      t.broken = destination.append(t, { written(t, occurrences.copy_of(e)) })
      if not t.broken then
        rooms[t.key], t.has_moved, moved, destination.cost = rooms[t.key] - 1, true, moved + 1, cost
        destination.tell(e)
        return true
      end
    end
    if not t.is_blocked then park_for(t, member(e), e.place) end
    return false
  end

  -- Keeps an occurrence until a later time.
  local function wait(e, error_text, until_ms)
    body_of(e)
    attempts.count(e, e.attempt, error_text, '', '', true)
    insert(e, math.max(until_ms, e.due))
    note('again', e, sub(error_text, LETTERED.REST_FIRST))
  end

  function end_occurrence(a)
    local e, what = load(ARGV[a]), ARGV[a + 3]
    if not e or e.lane ~= N or e.revision ~= tonumber(ARGV[a + 1]) or e.due ~= tonumber(ARGV[a + 2]) then return end
    if not has(e, RECURRING) or e.place > now or token_of(e) or is_held(N, fields.address_of(e)) then return end
    if what == 'ddelivered' and not push_occurrence(e) then return end
    local due = tonumber(ARGV[a + 5])
    take_out(e)
    if what == 'a' then return wait(e, ARGV[a + 4], due) end
    if byte(what) == 120 then
      local failed = copy(e)
      body_of(failed)
      attempts.count(failed, e.attempt, ARGV[a + 4], '', '', true)
      dead.bury(failed, sub(what, LETTERED.REST_FIRST))
    else
      note(sub(what, LETTERED.REST_FIRST), e)
    end
    if due then attempts.rearm(e, due, false) else forget(e) end
  end
end

-- --- the end -----------------------------------------------------------------------------------------------------

local changed, leave = {}, nil
do
  local FIRST_WAIT, LAST_WAIT = 50, 2000

  local function park_all(t)
    call('ZREM', due_key(N), unpack(t.parked))
    call('ZADD', TAG .. 'parked:' .. N .. ':' .. t.address, unpack(t.places))
    call('SADD', PARKED, N .. ':' .. t.address)
  end

  -- Sets the time of the next try of an address. If the address took messages, this is soon. Otherwise the wait
  -- doubles.
  local function block(t)
    local why, wait = why_not(t), 0
    if why then
      local before = not t.has_moved and call('HGET', why_key(N), t.address)
      wait = before and 2 * tonumber(string.match(before, '^%d+')) or FIRST_WAIT
      wait = math.min(math.max(wait, FIRST_WAIT), LAST_WAIT)
    end
    call('ZADD', blocked_key(N), now + wait, t.address)
    call('HSET', why_key(N), t.address, wait .. ' ' .. (why or ''))
    return why or ''
  end

  function leave(t)
    if #t.parked > 0 then park_all(t) end
    if t.is_held or not t.is_tried and (t.is_blocked or #t.parked == 0) then return end
    local why = ''
    if call('EXISTS', TAG .. 'parked:' .. N .. ':' .. t.address) == 1 then
      why = block(t)
    else
      unblock(N, t.address)
      call('SREM', PARKED, N .. ':' .. t.address)
    end
    changed[#changed + 1], changed[#changed + 2] = t.address, why
  end
end

if not N or is_held(N) or destination.is_shared and limited and is_limited(N) then
  return { NOW, '0', '', {}, {} }
end
open_gate()
lapsing.return_lapsed(N, LAPSED_AT_ONCE)
for a = 9, #ARGV, 6 do end_occurrence(a) end
if has_blocked then try_blocked() end
walk(due_key(N))
for _, t in ipairs(in_order) do
  if #t.elements > 0 then push(t) end
  leave(t)
end
local look = has_left and moved == 0 and #series == 0 and sooner(slot.next(N), next_try(N)) or next_move(N, MOST)
local answer = { NOW, text(moved), look and text(look) or '', changed, destination.traces }
for i = 1, #series do answer[5 + i] = series[i] end
finish()
return answer
