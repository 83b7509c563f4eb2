-- load: counts the messages of one lane that become due in spans of time. It reads a bounded part, and writes nothing.
--@ base
-- ARGV[4] lane
-- ARGV[5] start of the first span, epoch ms
-- ARGV[6] length of a span, ms
-- ARGV[7] number of spans
-- From ARGV[8] on: the sets that the previous call has left for later; none = all sets.
-- Returns {the sets that are left for later}, then index (from 0) and count of each span with messages, in no order.
local MOST_COST = 200
local FROM, SPAN, SPANS = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local found, left, cost = {}, {}, 0

local function count(set)
  if cost >= MOST_COST then
    left[#left + 1] = set
    return
  end
  local key, to = TAG .. set, '(' .. text(FROM + SPAN * SPANS)
  local all = call('ZCOUNT', key, text(FROM), to)
  if all <= SPANS then
    local scored = call('ZRANGEBYSCORE', key, text(FROM), to, 'WITHSCORES')
    for i = 2, #scored, 2 do
      local span = floor((tonumber(scored[i]) - FROM) / SPAN)
      found[span] = (found[span] or 0) + 1
    end
  else
    for span = 0, SPANS - 1 do
      local from = FROM + span * SPAN
      local n = call('ZCOUNT', key, text(from), '(' .. text(from + SPAN))
      if n > 0 then found[span] = (found[span] or 0) + n end
    end
  end
  cost = cost + 1 + math.min(all, SPANS)
end

local n = known_lane(ARGV[4])
if #ARGV > 7 then
  for a = 8, #ARGV do count(ARGV[a]) end
elseif n then
  count('due:' .. n)
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    if string.match(name, '^(%d+):') == text(n) then count('parked:' .. name) end
  end
end
local answer = { left }
for span, messages in pairs(found) do
  answer[#answer + 1] = text(span)
  answer[#answer + 1] = text(messages)
end
return answer
