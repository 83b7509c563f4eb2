-- counts: counts the messages of each lane by state. It writes nothing.
--@ base
-- Returns now, {worker, the worker's entry in `workers`, ...}, the members of `holds`, {member of `parked`, number of
-- messages, ...}, and then for each lane:
--   its name, its number, and its numbers of scheduled, overdue and leased messages and of dead letters
local parked = {}
for _, name in ipairs(call('SMEMBERS', PARKED)) do
  parked[#parked + 1] = name
  parked[#parked + 1] = text(call('ZCARD', TAG .. 'parked:' .. name))
end
local answer = { text(now), call('HGETALL', WORKERS), call('SMEMBERS', HOLDS), parked }
local lanes = call('HGETALL', LANES)
for i = 1, #lanes, 2 do
  local n = tonumber(lanes[i + 1])
  answer[#answer + 1] = lanes[i]
  answer[#answer + 1] = lanes[i + 1]
  answer[#answer + 1] = text(call('ZCOUNT', due_key(n), '(' .. text(now), '+inf'))
  answer[#answer + 1] = text(call('ZCOUNT', due_key(n), '-inf', text(now)))
  answer[#answer + 1] = text(call('ZCARD', leased_key(n)))
  answer[#answer + 1] = call('HGET', META, 'dead:' .. text(n)) or '0'
end
return answer
