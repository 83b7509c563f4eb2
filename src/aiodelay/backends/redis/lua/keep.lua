-- keep: renews a consumer's lease, as far as it still holds what it names.
--@ plain taken
-- ARGV[3] how long the lease shall last from now on, ms; no longer than allowed
-- From ARGV[4] on: numbers; with 'a' before that of a suspect whose trial is over.
-- Returns a letter for each, in order: 'r' renewed, 'l' lost.
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
