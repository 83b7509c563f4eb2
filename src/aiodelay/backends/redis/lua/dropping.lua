-- dropping: the common part of `drop` (for lists and fan-out topics) and `drop_log`.
local OVER = tonumber(ARGV[3])
local letters, over, back = {}, {}, {}

call('ZREM', CONSUMERS, '')
for a = 4, #ARGV do
  local held = call('HEXISTS', TAKEN, ARGV[a]) == 1
  letters[a - 3] = held and 's' or 'g'
  if a - 3 <= OVER then
    over[#over + 1] = ARGV[a]
  elseif held then
    back[#back + 1] = tonumber(ARGV[a])
  end
end
if #over > 0 then
  if CONTENT then topic.release(topic.of(CONTENT), call('HMGET', TAKEN, unpack(over))) end
  call('HDEL', TAKEN, unpack(over))
end
if #back > 0 then
  give_back(ARGV[2], back, untried)
  for a = 4 + OVER, #ARGV do
    if letters[a - 3] == 's' and call('HEXISTS', TAKEN, ARGV[a]) == 1 then letters[a - 3] = 'm' end
  end
end
leave_if_empty(ARGV[2])
return table.concat(letters)
