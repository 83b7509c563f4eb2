-- tidy: does one bounded step of housekeeping for all lanes.
--@ base known record moves requeue
-- ARGV[4] the most messages to change
-- ARGV[5] worker
-- ARGV[6] the lanes that the worker serves, as a MessagePack list: a time in ms, which the script replaces by now,
--   then names of lanes
-- ARGV[7] a time in ms. Workers without a sign of life for this time are deleted.
-- Returns now, the number of lapsed messages, the number of expired messages, {worker, its MessagePack list, ...} of
-- the live workers, {lane, place of its first overdue message or '', ...} of every lane that has messages.
local LIMIT = tonumber(ARGV[4])
local MOST_MOVED, MOST_PARKED, MOST_UNTRIED, MOST_BLOCKED, MOST_QUIET, MOST_STEPS = 500, 100, 60000, 100, 1000, 4

local function note_worker()
  local serves = cmsgpack.unpack(ARGV[6])
  serves[1] = now
  call('HSET', WORKERS, ARGV[5], cmsgpack.pack(serves))
end

local function forget_workers()
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

-- Returns true if there is nothing that a step could end or return: no leases, no `Late` policies, no pauses, no parked
-- messages, and nothing to forget.
local function is_quiet(lanes)
  if #lanes > 2 * MOST_QUIET then return false end
  local keys = { superseded.CLAIMS, LATE, DONE, HOLDS, PARKED }
  for i = 2, #lanes, 2 do keys[#keys + 1] = leased_key(lanes[i]) end
  return call('EXISTS', unpack(keys)) == 0
end

-- Returns true if a transfer still tries this blocked address regularly. Such a transfer itself returns the parked
-- messages.
local function is_tried(n, address)
  local next_try = call('ZSCORE', blocked_key(n), address)
  return next_try and tonumber(next_try) > now - MOST_UNTRIED
end

-- Returns parked messages to their lanes if their address is neither paused nor tried. Such messages remain after a
-- crash during a resume or a transfer.
local function unpark_released()
  local left = MOST_MOVED
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    local n, address = string.match(name, '^(%d+):(.*)$')
    if left > 0 and call('SISMEMBER', HOLDS, name) == 0 and not is_tried(n, address) then
      local key = TAG .. 'parked:' .. name
      local parked = call('ZRANGE', key, 0, left - 1, 'WITHSCORES')
      for i = 1, #parked, 2 do
        earlier(tonumber(n), tonumber(parked[i + 1]))
        call('ZADD', due_key(tonumber(n)), parked[i + 1], parked[i])
        call('ZREM', key, parked[i])
      end
      if limited and is_limited(tonumber(n)) then limits.enter_all(tonumber(n), parked) end
      if #parked < 2 * left then
        call('SREM', PARKED, name)
        unblock(n, address)
      end
      left = left - #parked / 2
    end
  end
end

local function expire_late()
  local expired, bytes = 0, 0
  local found = call('ZRANGEBYSCORE', LATE, '-inf', text(now), 'WITHSCORES', 'LIMIT', 0, LIMIT + MOST_MOVED)
  for i = 1, #found, 2 do
    if expired >= LIMIT or bytes >= MOST_BYTES then break end
    local e = load(found[i])
    bytes = bytes + (e and #e.value or 0)
    if not e or token_of(e) or not ends_by_itself(e) or e.place > now then
      call('ZREM', LATE, found[i])
    elseif any_holds() and (is_held(e.lane) or is_held(e.lane, fields.address_of(e))) then
      call('ZREM', LATE, found[i])
      call('ZADD', LATE_HELD, found[i + 1], found[i])
    else
      expire(e)
      expired = expired + 1
    end
  end
  return expired
end

-- Returns the first place of the messages of a lane that are parked because their addresses are blocked, or nil.
local function first_blocked(n)
  local found = nil
  for _, address in ipairs(call('ZRANGE', blocked_key(n), 0, MOST_BLOCKED - 1)) do
    local place = call('ZRANGE', TAG .. 'parked:' .. n .. ':' .. address, 0, 0, 'WITHSCORES')[2]
    if place and not is_held(n, address) and (not found or tonumber(place) < found) then found = tonumber(place) end
  end
  return found
end

local function oldest_of(n)
  local first = head_of(n, MOST_PARKED) -- Call this before first_blocked(), because it may park messages.
  local blocked = not is_held(n) and first_blocked(n) or nil
  return blocked and (not first or blocked < first) and blocked or first
end

local function lane_states(lanes, quiet)
  local parked, states, oldest = {}, {}, {}
  for i = 2, #lanes, 2 do
    local n = tonumber(lanes[i])
    oldest[i] = quiet and head_of(n, MOST_PARKED) or not quiet and oldest_of(n)
  end
  for _, name in ipairs(quiet and {} or call('SMEMBERS', PARKED)) do
    if call('EXISTS', TAG .. 'parked:' .. name) == 1 then parked[tonumber(string.match(name, '^(%d+):'))] = true end
  end
  for i = 1, #lanes, 2 do
    local n = tonumber(lanes[i + 1])
    local first = oldest[i + 1]
    if first or parked[n] or call('EXISTS', due_key(n), leased_key(n)) > 0 then
      states[#states + 1] = lanes[i]
      states[#states + 1] = first and first <= now and text(first) or ''
    end
  end
  return states
end

open_gate()
note_worker() -- Call this first, because a lapse of a suspect checks whether its worker is alive.
local lanes = call('HGETALL', LANES)
local lapsed, expired, quiet = 0, 0, is_quiet(lanes)
if quiet then
  has_holds = false
else
  for i = 2, #lanes, 2 do
    if lapsed < LIMIT then lapsed = lapsed + lapsing.return_lapsed(tonumber(lanes[i]), LIMIT - lapsed) end
  end
  superseded.forget_lapsed(LIMIT)
  expired = expire_late()
  memory.forget_past(100)
  unpark_released()
end
for n in string.gmatch(limited or '', '%d+') do requeue.check(tonumber(n), MOST_STEPS) end
if spared and not tokens.spared then call('HDEL', META, 'spared') end
if tonumber(ARGV[2]) > 0 then call('XTRIM', JOURNAL, 'MAXLEN', ARGV[2]) end
local alive = forget_workers()
local answer = { text(now), text(lapsed), text(expired), alive, lane_states(lanes, quiet) }
finish()
return answer
