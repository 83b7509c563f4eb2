-- tidy: a bounded step of housekeeping over all lanes.
--@ base record memory moves
-- ARGV[4] most messages to touch
-- ARGV[5] worker
-- ARGV[6] what it serves, a MessagePack list: its time in ms, then names of lanes
-- ARGV[7] workers not heard of for so many ms are forgotten
-- Returns now, how many lapsed, how many expired, {worker, what it serves, ...}, {lane, place of its first overdue
-- message or '', ...} of every lane that holds messages.
local LIMIT = tonumber(ARGV[4])
local MOST_MOVED = 500

local function forget_workers()
  local serves = cmsgpack.unpack(ARGV[6])
  serves[1] = now
  call('HSET', WORKERS, ARGV[5], cmsgpack.pack(serves))
  local known = call('HGETALL', WORKERS)
  local alive = {}
  for i = 1, #known, 2 do
    local is_read, seen = pcall(cmsgpack.unpack, known[i + 1])
    if is_read and type(seen) == 'table' and (tonumber(seen[1]) or 0) > now - tonumber(ARGV[7]) then
      alive[#alive + 1] = known[i]
      alive[#alive + 1] = known[i + 1]
    else
      call('HDEL', WORKERS, known[i])
    end
  end
  return alive
end

local function unpark_released() -- what a release that was cut short has left
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    local n = string.match(name, '^(%d+):')
    if call('SISMEMBER', HOLDS, name) == 0 then
      local key = TAG .. 'parked:' .. name
      local parked = call('ZRANGE', key, 0, MOST_MOVED - 1, 'WITHSCORES')
      for i = 1, #parked, 2 do
        earlier(tonumber(n), tonumber(parked[i + 1]))
        call('ZADD', due_key(tonumber(n)), parked[i + 1], parked[i])
        call('ZREM', key, parked[i])
      end
      if #parked < 2 * MOST_MOVED then call('SREM', PARKED, name) end
    end
  end
end

local function expire_late()
  local expired = 0
  local found = call('ZRANGEBYSCORE', LATE, '-inf', text(now), 'WITHSCORES', 'LIMIT', 0, LIMIT + MOST_MOVED)
  for i = 1, #found, 2 do
    if expired >= LIMIT then break end
    local e = load(found[i])
    if not e or token_of(e) or not ends_by_itself(e) or e.place > now then
      call('ZREM', LATE, found[i])
    elseif any_holds() and (is_held(e.lane) or is_held(e.lane, address_of(e))) then
      call('ZREM', LATE, found[i])
      call('ZADD', LATE_HELD, found[i + 1], found[i])
    else
      expire(e)
      expired = expired + 1
    end
  end
  return expired
end

local function lane_states(lanes)
  local parked, states, heads_of = {}, {}, {}
  for i = 2, #lanes, 2 do heads_of[i] = head_of(tonumber(lanes[i]), MOST_MOVED) end -- which may park
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    if call('EXISTS', TAG .. 'parked:' .. name) == 1 then parked[tonumber(string.match(name, '^(%d+):'))] = true end
  end
  for i = 1, #lanes, 2 do
    local n = tonumber(lanes[i + 1])
    local first = heads_of[i + 1]
    if first or parked[n] or call('EXISTS', due_key(n), leased_key(n)) > 0 then
      states[#states + 1] = lanes[i]
      states[#states + 1] = first and first <= now and text(first) or ''
    end
  end
  return states
end

open_gate()
local lanes = call('HGETALL', LANES)
local lapsed = 0
for i = 2, #lanes, 2 do
  if lapsed < LIMIT then lapsed = lapsed + return_lapsed(tonumber(lanes[i]), LIMIT - lapsed) end
end
local expired = expire_late()
forget_past(100)
unpark_released()
if tonumber(ARGV[2]) > 0 then call('XTRIM', JOURNAL, 'MAXLEN', ARGV[2]) end
local alive = forget_workers()
local answer = { text(now), text(lapsed), text(expired), alive, lane_states(lanes) }
finish()
return answer
