-- present: compares the namespace with that of a process's opening, and its keys with each other.
--@ base
-- ARGV[4] the `uuid` that was found at the opening
-- Returns now, the present `uuid` or '', the number of stored messages and dead letters, and the number that the sorted
-- sets list; the noted and the present number of pauses; those of the sources whose positions are kept. The numbers of a
-- pair differ only after somebody deleted a key.
--
-- A process that finds another namespace, or none, notes the time in `meta`, for `aiodelay check` to read.
local MOST_PARKED = 1000

local stored, placed = call('HLEN', MSG) + call('HLEN', DEAD), call('ZCARD', GRAVES)
local lanes = call('HGETALL', LANES)
for i = 2, #lanes, 2 do placed = placed + call('ZCARD', due_key(lanes[i])) + call('ZCARD', leased_key(lanes[i])) end
if call('SCARD', PARKED) <= MOST_PARKED then
  for _, name in ipairs(call('SMEMBERS', PARKED)) do placed = placed + call('ZCARD', TAG .. 'parked:' .. name) end
else
  placed = stored
end
local uuid, noted_holds, noted_sources = unpack(call('HMGET', META, 'uuid', 'holds', 'sources'))
uuid = uuid or ''
if uuid ~= ARGV[4] then
  open_gate()
  call('HSET', META, 'vanished', text(now))
end
local holds, sources = call('SCARD', HOLDS), call('HLEN', SRC)
return { text(now), uuid, stored, placed, tonumber(noted_holds or holds), holds, tonumber(noted_sources or sources), sources }
