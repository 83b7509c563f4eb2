-- lagging: the common part of `lag` (for fan-out topics) and `lag_log`.
local p, found = topic.of(KEYS[1]), {}

local function memory(key) return call('MEMORY', 'USAGE', key) or 0 end

for a = 2, #ARGV do
  local own = p .. '@' .. ARGV[a]
  local state = call('HMGET', own .. ':state', 'ordered', 'since', 'missed', 'seen')
  local waiting, dropped, cursor, more = topic.standing(p, ARGV[a])
  local in_flight, bytes = 0, memory(own .. ':refs') + memory(own .. ':later') + more
  for _, instance in ipairs(call('ZRANGE', own .. ':consumers', 0, topic.CHUNK - 1)) do
    local taken = own .. ':taken:' .. instance
    in_flight, bytes = in_flight + call('HLEN', taken), bytes + memory(taken)
  end
  found[a - 1] = { state[1] or '', state[2] or '0', text(tonumber(state[3] or 0) + dropped), text(waiting), in_flight,
    call('ZCARD', own .. ':later'), bytes, cursor, state[4] or '' }
end
return found
