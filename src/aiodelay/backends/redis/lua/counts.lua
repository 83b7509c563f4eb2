-- counts: how many messages of each lane stand where; writes nothing.
--@ base
-- Returns now, {worker, what it serves, ...}, what is held, {parked address (as in `parked`), how many, ...}, then for
-- each lane its name, its number, how many wait ahead, overdue, leased, and dead.
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
