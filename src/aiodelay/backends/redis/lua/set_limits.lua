-- set_limits: sets the limits of a lane, also while messages of the lane wait or are in flight.
--@ base record moves requeue
-- ARGV[4] lane
-- ARGV[5] what the limits are: 'lane', 'key' or 'address' = what each message counts under; '' = the limits end
-- ARGV[6] the limit of the whole lane; ARGV[7] the limit of each key. A limit is a MessagePack map with `concurrency`, or
--   `most` and `span` (ms), or all three; it is empty without a limit.
-- ARGV[8] the limits, ARGV[9] no limits, as the client writes and compares them
-- ARGV[10] '1' if a program's code declares the limits, else '0'
-- ARGV[11] the version of aiodelay that switches the feature `limits` on
-- With ARGV[4] alone, the script only takes the next step of `requeue`. The caller repeats this while the script returns 1.
-- Returns 1 if a step of `requeue` is left, else 0.
local n = known_lane(ARGV[4])

local function write_limited(numbers)
  limited = numbers
  call('HSET', META, 'limited', numbers)
end

local function switch_on()
  if not string.find(' ' .. (features or ''), ' limits=', 1, true) then
    call('HSET', META, 'features', (features and features .. ' ' or '') .. 'limits=' .. ARGV[11])
  end
end

-- Removes the queues and counts of the lane. Superseded claims keep their keys, unless the limits end.
local function unlink_all(is_end)
  local lane = limits.lane(n)
  lane.step = nil
  call('HDEL', limits.ALL, 'step:' .. n)
  call('UNLINK', lane.QUEUES, lane.TURNS, lane.INFLIGHT, lane.RUNNING)
  local replaced = call('HGETALL', limits.OF_SUPERSEDED)
  for i = 1, #replaced, 2 do
    if unpack_bytes('>H', replaced[i + 1]) == n and (is_end or not call('ZSCORE', superseded.CLAIMS, replaced[i])) then
      call('HDEL', limits.OF_SUPERSEDED, replaced[i])
    end
  end
end

local function write(known)
  if not next(known) then return end -- cmsgpack would write an empty table as an array.
  call('HSET', limits.ALL, n, cmsgpack.pack(known))
end

local function end_limits()
  unlink_all(true)
  call('UNLINK', limits.lane(n).MARKS)
  call('HDEL', limits.ALL, 'claimed:' .. n)
  write_limited((string.gsub(limited, ' ' .. n .. ' ', ' ')))
  if limited == ' ' then
    call('HDEL', META, 'limited')
    limited = false
  end
end

-- Returns true if the limits change.
local function set(known)
  local none, given = ARGV[9], ARGV[8]
  if ARGV[10] == '1' then
    if (known.declared or none) == given then return false end
    known.declared = given
  end
  if (known.limits or none) == given then
    write(known)
    return false
  end
  local before = limited and is_limited(n) and known.by
  known.limits, known.by = given, ARGV[5]
  known.whole, known.each = cmsgpack.unpack(ARGV[6]), cmsgpack.unpack(ARGV[7])
  write(known)
  if ARGV[5] == '' then
    if before then end_limits() end
    return true
  end
  switch_on()
  if not before then write_limited((limited or ' ') .. n .. ' ') end
  if before ~= ARGV[5] then unlink_all() end
  requeue.start(limits.lane(n), before == ARGV[5] and 'turns' or 'inflight')
  return true
end

open_gate()
if #ARGV > 4 then
  if not n and (ARGV[5] ~= '') then n = new_lane(ARGV[4]) end
  if not n then return ARGV[5] == '' and 0 or redis.error_reply('the store takes no new lane') end
  local written = call('HGET', limits.ALL, n)
  if set(written and cmsgpack.unpack(written) or {}) then limits.call_others(n) end
end
local lane = n and limited and is_limited(n) and limits.lane(n)
if lane and lane.step then requeue.step(lane) end
finish()
return lane and lane.step and 1 or 0
