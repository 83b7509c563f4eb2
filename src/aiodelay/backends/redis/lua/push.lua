-- push: appends elements to a list until the list is full.
-- KEYS[1] the list
-- ARGV[1] the most elements that the list may hold; 0 = no limit
-- ARGV[2] 'raw' = push the elements unchanged; '' = add the time of the push, u64, at the end of each element
-- From ARGV[3] on: elements.
-- Returns how many elements were pushed, from the first one on.
local length, most = redis.pcall('LLEN', KEYS[1]), tonumber(ARGV[1])
if type(length) == 'table' then return length end -- The server returned an error.
local count = #ARGV - 2
if most > 0 then count = math.min(count, most - length) end
if count <= 0 then return 0 end
local pushed = ''
if ARGV[2] ~= 'raw' then
  local time = redis.call('TIME')
  pushed = struct.pack('>I8', time[1] * 1000 + math.floor(time[2] / 1000))
end
local elements = {}
for i = 1, count do elements[i] = ARGV[2 + i] .. pushed end
length = redis.pcall('RPUSH', KEYS[1], unpack(elements))
return type(length) == 'table' and length or count
