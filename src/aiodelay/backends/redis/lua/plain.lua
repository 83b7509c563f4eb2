-- plain: time and numbers. The scripts of lists, topics and logs contain this part.
--
-- ARGV[1] now, epoch ms; '' = the server's TIME
local call, sub, byte, char = redis.call, string.sub, string.byte, string.char

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function text(n) return string.format('%.0f', n) end
