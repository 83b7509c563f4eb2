-- bury: declares a process dead whose number has stood still, and returns its claimed messages to their lanes. Each of
-- these messages has lapsed. A suspect in a trial stays claimed until its lease ends: only the rules of trials may count
-- the end of its process.
--@ base known record moves
-- ARGV[4] incarnation
-- ARGV[5] its number, as the caller has read it
-- ARGV[6] the most messages to return
-- Returns two numbers: of returned messages, and 1 if the caller shall call again, because messages are left.
local MOST_MARKS = 200
local left, bytes = tonumber(ARGV[6]), 0
local key = pulses.held_key(ARGV[4])

-- Returns true if another process holds claims with the same token in the same lane. Tokens of different messages may
-- be equal, and nobody knows whose messages these are.
local function is_shared(mark)
  for _, other in ipairs(call('HKEYS', pulses.KEY)) do
    if other ~= ARGV[4] and call('ZSCORE', pulses.held_key(other), mark) then return true end
  end
  return false
end

-- Returns the messages of the claim that this mark names. Returns false if the limits were reached before the last of
-- them.
local function return_claim(mark)
  local n, token = string.match(mark, '^(%d+) (%d+)$')
  n = tonumber(n)
  if call('ZCOUNT', leased_key(n), token, token) == 0 or is_shared(mark) then return true end
  local kept = 0
  while true do
    if left == 0 or bytes >= MOST_BYTES then return false end
    local id = call('ZRANGEBYSCORE', leased_key(n), token, token, 'LIMIT', kept, 1)[1]
    if not id then return true end
    local e = load(id)
    bytes = bytes + (e and #e.value or 0)
    if not e or e.lane ~= n or trials.of(id) then
      kept = kept + 1 -- The end of the lease settles these.
    else
      lapsing.lapse(e)
      left = left - 1
    end
  end
end

local number = call('HGET', pulses.KEY, ARGV[4])
if not number or (number ~= ARGV[5] and tonumber(number) ~= pulses.DEAD) then return { 0, 0 } end
open_gate()
call('HSET', pulses.KEY, ARGV[4], pulses.DEAD)
for _, mark in ipairs(call('ZRANGE', key, 0, MOST_MARKS - 1)) do
  if not return_claim(mark) then break end
  call('ZREM', key, mark)
end
local is_left = call('EXISTS', key)
if is_left == 0 then call('HDEL', pulses.KEY, ARGV[4]) end
finish()
return { tonumber(ARGV[6]) - left, is_left }
