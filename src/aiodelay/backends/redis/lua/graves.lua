-- graves: makes the index of dead letters by id complete, where versions before it have left some out; a step at a time.
--@ base record memory moves
-- ARGV[4] where to go on, as a step before has returned; '' = from the latest letter
-- Returns where to go on; nothing where all are indexed.
local AT_ONCE = 500
local last = tonumber(ARGV[4])
if not last then
  local count = call('ZCARD', GRAVES)
  if call('ZCARD', graves.BY_ID) >= count then return false end
  last = count - 1
end
if last < 0 then return false end
-- From the last to the first: so none is missed because others are purged meanwhile.
local first = math.max(last - AT_ONCE + 1, 0)
local members = {}
for _, key in ipairs(call('ZRANGE', GRAVES, first, last)) do
  members[#members + 1], members[#members + 2] = 0, graves.by_id(key)
end
open_gate()
if #members > 0 then call('ZADD', graves.BY_ID, unpack(members)) end
return first - 1
