-- keep: renews the lease of a consumer, and reports which elements it still holds.
--@ plain taken
-- KEYS and ARGV[1], ARGV[2] as in `plain` and `taken`.
-- ARGV[3] the new length of the lease from now on, ms; at most 60,000
-- From ARGV[4] on: numbers of elements. An 'a' before a number means that the trial of this suspect is over.
-- Returns a string with a letter for each element, in order: 'r' renewed, 'l' lost.
local letters = {}

local function end_trial(number)
  local element = call('HGET', TAKEN, number)
  local left = untried(element)
  if left ~= element then call('HSET', TAKEN, number, left) end
end

call('ZREM', CONSUMERS, '')
for a = 4, #ARGV do
  local alone, number = string.match(ARGV[a], '^(a?)(%d+)$')
  local held = call('HEXISTS', TAKEN, number) == 1
  if held and alone == 'a' then end_trial(number) end
  letters[a - 3] = held and 'r' or 'l'
end
if call('EXISTS', TAKEN) == 1 then
  call('ZADD', CONSUMERS, text(now + math.min(tonumber(ARGV[3]), MAX_LEASE)), ARGV[2])
end
return table.concat(letters)
