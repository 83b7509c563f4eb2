-- present: finds out whether data of the namespace have disappeared since a process opened the namespace.
--@ base
-- ARGV[4] the `uuid` of the namespace when the process opened it
-- Returns now, the `uuid` now ('' = none), then three pairs of numbers:
--   stored messages and dead letters; messages and dead letters that the sorted sets list
--   the number of pauses in `meta`; the number of pauses in `holds`
--   the number of sources in `meta`; the number of sources in `src`
-- The two numbers of a pair differ only if somebody has deleted a key.
--
-- If the `uuid` has changed, the script writes the time into `meta`, for `aiodelay check`.
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
