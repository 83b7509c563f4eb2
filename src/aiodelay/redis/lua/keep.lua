-- keep: renews a consumer's lease, as far as it still holds what it names.
--@ plain taken
-- ARGV[3] how long the lease shall last from now on, ms; no longer than allowed
-- From ARGV[4] on: numbers; with 'a' before that of an element whose trial alone is over.
-- Returns a letter for each, in order: 'r' renewed, 'l' lost.
local letters = {}

local function end_trial(number)
  local element = call('HGET', TAKEN, number)
  local p = prefix_at(element)
  if not p then return end
  local flags, lapses, kills = state_of(element, p)
  if is_alone(flags) then call('HSET', TAKEN, number, with_state(element, p, flags - ALONE, lapses, kills)) end
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
