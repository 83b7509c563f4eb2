-- load: counts what of one lane comes due in spans of time; writes nothing.
--@ base
-- ARGV[4] lane
-- ARGV[5] where the first span begins, epoch ms
-- ARGV[6] how long a span is, ms
-- ARGV[7] how many spans
-- Returns index (from 0) and count of each span in which anything comes due, in no order.
local FEW = 2000
local FROM, SPAN, SPANS = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local found = {}

local function count(key)
  local to = '(' .. text(FROM + SPAN * SPANS)
  if call('ZCOUNT', key, text(FROM), to) <= FEW then
    local scored = call('ZRANGEBYSCORE', key, text(FROM), to, 'WITHSCORES')
    for i = 2, #scored, 2 do
      local span = floor((tonumber(scored[i]) - FROM) / SPAN)
      found[span] = (found[span] or 0) + 1
    end
    return
  end
  for span = 0, SPANS - 1 do
    local from = FROM + span * SPAN
    local n = call('ZCOUNT', key, text(from), '(' .. text(from + SPAN))
    if n > 0 then found[span] = (found[span] or 0) + n end
  end
end

local n = known_lane(ARGV[4])
if n then
  count(due_key(n))
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    if string.match(name, '^(%d+):') == text(n) then count(TAG .. 'parked:' .. name) end
  end
end
local answer = {}
for span, messages in pairs(found) do
  answer[#answer + 1] = text(span)
  answer[#answer + 1] = text(messages)
end
return answer
