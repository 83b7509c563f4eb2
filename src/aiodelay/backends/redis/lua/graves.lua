-- graves: completes the index of dead letters by id, in steps of 500. Older versions of aiodelay did not write the
-- index.
--@ base record moves
-- ARGV[4] the result of the previous step; '' = the first step
-- Returns the argument of the next step; nil if the index is complete.
local AT_ONCE = 500
local last = tonumber(ARGV[4])
if not last then
  local count = call('ZCARD', GRAVES)
  if call('ZCARD', dead.BY_ID) >= count then return false end
  last = count - 1
end
if last < 0 then return false end
-- Race: a purge between two steps moves the later dead letters to lower ranks. The steps go from the last rank to the
-- first, so they miss no dead letter.
local first = math.max(last - AT_ONCE + 1, 0)
local members = {}
for _, key in ipairs(call('ZRANGE', GRAVES, first, last)) do
  members[#members + 1], members[#members + 2] = 0, dead.by_id(key)
end
open_gate()
if #members > 0 then call('ZADD', dead.BY_ID, unpack(members)) end
return first - 1
