-- trying: the common part of `again` (for fan-out topics) and `again_log`.
local p, own = topic.of(CONTENT), sub(CONSUMERS, 1, -#':consumers' - 1)
local letters = {}

call('ZREM', CONSUMERS, '')
for a = 3, #ARGV, 3 do
  local entry = call('HGET', TAKEN, ARGV[a])
  letters[#letters + 1] = entry and 's' or 'g'
  if entry then
    local due = now + math.max(tonumber(ARGV[a + 1]), 0)
    local place = call('HINCRBY', own .. ':state', 'retries', 1)
    call('ZADD', own .. ':later', text(due), struct.pack('>I8', place) .. ARGV[a + 2] .. struct.pack('>I8', due))
    call('HDEL', TAKEN, ARGV[a])
    topic.release(p, { entry })
  end
end
leave_if_empty(ARGV[2])
return table.concat(letters)
