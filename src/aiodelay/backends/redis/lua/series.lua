-- series: lists recurring messages from an index of their encoded ids, in the order of this index.
--@ base record
-- ARGV[4] the encoded id after which to begin; '' = begin with the first
-- ARGV[5] the number of ids to check
-- Returns the id after which the next call begins ('' = there are no more ids), then the ids of recurring messages. The
-- script removes ids from the index whose messages no longer recur.
local SERIES = TAG .. 'series'
local ids = call('ZRANGE', SERIES, ARGV[4] == '' and '-' or '(' .. ARGV[4], '+', 'BYLEX', 'LIMIT', 0, ARGV[5])
local answer, over = { #ids == tonumber(ARGV[5]) and ids[#ids] or '' }, {}
for i, value in ipairs(#ids > 0 and call('HMGET', MSG, unpack(ids)) or {}) do
  local e = value and parse(ids[i], value)
  if e and has(e, RECURRING) then
    answer[#answer + 1] = ids[i]
  elseif e or not value then
    over[#over + 1] = ids[i]
  end
end
if #over > 0 then
  open_gate()
  call('ZREM', SERIES, unpack(over))
end
return answer
