-- lag: how far consumers of a topic are behind.
--@ plain topic
-- KEYS[1] the topic's content
-- From ARGV[2] on: names of consumers, a bounded number at a time.
-- Returns a list for each: ordered, when it was registered, how many it missed, how many wait, are in flight, are to be
-- tried again, and bytes that its keys take.
local p, found = topic.of(KEYS[1]), {}

local function memory(key) return call('MEMORY', 'USAGE', key) or 0 end

for a = 2, #ARGV do
  local own = p .. '@' .. ARGV[a]
  local state = call('HMGET', own .. ':state', 'ordered', 'since', 'missed')
  local in_flight, bytes = 0, memory(own .. ':refs') + memory(own .. ':later')
  for _, instance in ipairs(call('ZRANGE', own .. ':consumers', 0, topic.CHUNK - 1)) do
    local taken = own .. ':taken:' .. instance
    in_flight, bytes = in_flight + call('HLEN', taken), bytes + memory(taken)
  end
  found[a - 1] = { state[1] or '', state[2] or '0', state[3] or '0', call('LLEN', own .. ':refs'), in_flight,
    call('ZCARD', own .. ':later'), bytes }
end
return found
