-- moves: the common steps of commands, claims and settlements. They follow the same rules as core/transitions.py.
local SUSPECT_LAPSES, KILLS_TO_DEATH = 2, 3
local MAX_LEASE = 60000
local TOKEN_EPOCH, COUNTERS = 1735689600000, 4096
-- A script reads no more records after this many bytes. The last record may exceed the limit.
local MOST_BYTES = 1048576

-- True once the namespace has the feature `append`: messages in flight may have got items.
local appends = features and string.find(' ' .. features, ' append=', 1, true) ~= nil

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

local function parked_key(e) return TAG .. 'parked:' .. e.lane .. ':' .. fields.address_of(e) end

local function park(e)
  call('SADD', PARKED, text(e.lane) .. ':' .. fields.address_of(e))
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
  if any_holds() and is_held(e.lane, fields.address_of(e)) then
    park(e)
  else
    earlier(e.lane, place)
    call('ZADD', due_key(e.lane), place, member(e))
    if limited and is_limited(e.lane) then limits.enter(e) end
  end
  if is_due_to_expire(e) then call('ZADD', LATE, math.max(place, e.expires + 1), e.id) end
end

local function leave_lane(e)
  if call('ZREM', due_key(e.lane), member(e)) == 0 then call('ZREM', parked_key(e), member(e)) end
  if limited and is_limited(e.lane) then limits.leave(e) end
  if is_due_to_expire(e) then
    call('ZREM', LATE, e.id)
    call('ZREM', LATE_HELD, e.id)
  end
end

local function take_out(e)
  if token_of(e) then
    call('ZREM', leased_key(e.lane), e.id)
    if limited and is_limited(e.lane) then limits.ended(e.lane, { e.id }) end
    trials.stop(e)
  else
    leave_lane(e)
  end
  e.token = false
end

-- Ends a message after its removal from its lane. Do not call this for a message that is replaced.
local function forget(e)
  call('HDEL', MSG, e.id)
  loaded[e.id] = false
  if byte(e.id) == OCCURRENCE then occurrences.strike(e.id) else memory.remember_end(e) end
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

local function expire(e)
  if late_of(e) == 2 then dead.bury(e, 'late') else note('dropped', e, 'late') end
  finish_off(e)
end

local LAPSED_AT_ONCE = 60 -- The return of this many messages takes as long as all other work of a claim.

-- Returns the place of the first message of a lane that is not paused, or nil if there is none. Parks the paused
-- messages before it. After `most_parked` parked messages, it stops and returns now, so that the caller comes back.
local function head_of(n, most_parked)
  if is_held(n) then return nil end
  local key = due_key(n)
  for _ = 0, most_parked do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if not first[1] then return nil end
    local e = any_holds() and load(sub(first[1], MEMBER.ID_FIRST)) or nil
    if not (e and is_held(n, fields.address_of(e))) then return tonumber(first[2]) end
    open_gate()
    call('ZREM', key, first[1])
    if limited and is_limited(n) then limits.leave(e) end
    park(e)
  end
  return now
end
