-- hold: pauses or resumes a lane or an address.
--@ base record moves
-- ARGV[4] 'hold' pauses, 'release' resumes. 'return' returns up to 500 messages that were parked during the pause, and
--   up to 500 entries of `late:held`. The caller repeats 'return' until it gets 0.
-- ARGV[5] lane
-- ARGV[6] ':' + address; '' = the whole lane
-- Returns 1 if the call changed the state, else 0. For 'return', returns 1 if there may be more to return, else 0.
local MOST_MOVED = 500

local function hold()
  local n = known_lane(ARGV[5]) or new_lane(ARGV[5])
  return n and call('SADD', HOLDS, text(n) .. ARGV[6]) or 0
end

local function release()
  local n = known_lane(ARGV[5])
  if not n or call('SREM', HOLDS, text(n) .. ARGV[6]) == 0 then return 0 end
  earliest[n], heads[n] = now, false
  return 1
end

local function put_back(n)
  local key = TAG .. 'parked:' .. text(n) .. ARGV[6]
  local parked = call('ZRANGE', key, 0, MOST_MOVED - 1, 'WITHSCORES')
  local scored, names = {}, {}
  for i = 1, #parked, 2 do
    earlier(n, tonumber(parked[i + 1]))
    scored[i], scored[i + 1], names[#names + 1] = parked[i + 1], parked[i], parked[i]
  end
  if #names > 0 then
    call('ZREM', key, unpack(names))
    call('ZADD', due_key(n), unpack(scored))
    if limited and is_limited(n) then limits.enter_all(n, parked) end
  end
  if #names < MOST_MOVED then
    call('SREM', PARKED, text(n) .. ARGV[6])
    return false
  end
  return true
end

local function put_back_late()
  local late = call('ZRANGE', LATE_HELD, 0, MOST_MOVED - 1, 'WITHSCORES')
  for i = 1, #late, 2 do
    call('ZREM', LATE_HELD, late[i])
    call('ZADD', LATE, late[i + 1], late[i])
  end
  return #late == 2 * MOST_MOVED
end

open_gate()
local changed = 0
if ARGV[4] == 'hold' then
  changed = hold()
elseif ARGV[4] == 'release' then
  changed = release()
else
  local n = known_lane(ARGV[5])
  local more = n and ARGV[6] ~= '' and put_back(n)
  if put_back_late() or more then changed = 1 end
end
-- The script `present` compares this count.
if changed == 1 and ARGV[4] ~= 'return' then call('HSET', META, 'holds', call('SCARD', HOLDS)) end
finish(true)
return changed
