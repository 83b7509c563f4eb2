-- blocked: lists the blocked addresses. It writes nothing.
--@ base record moves
-- Returns {lane, address, reason, number of waiting messages} for each address.
local answer = {}
local lanes = call('HGETALL', LANES)
for i = 1, #lanes, 2 do
  local n = tonumber(lanes[i + 1])
  local found = call('HGETALL', why_key(n))
  for j = 1, #found, 2 do
    local why = string.match(found[j + 1], '^%d+ (.+)$')
    local waiting = call('ZCARD', TAG .. 'parked:' .. n .. ':' .. found[j])
    if why and waiting > 0 and not is_held(n, found[j]) then
      answer[#answer + 1] = { lanes[i], found[j], why, waiting }
    end
  end
end
return answer
