-- present: finds out whether data of the namespace have disappeared since a process opened the namespace.
--@ base
-- ARGV[4] the `uuid` of the namespace when the process opened it
-- Returns now, the `uuid` now ('' = none), then three pairs of numbers:
--   stored messages and dead letters; messages and dead letters that the sorted sets list
--   the number of pauses in `meta`; the number of pauses in `holds`
--   the number of sources in `meta`; the number of sources in `src`
-- then the marks of the store and the counted keys that exist. If there are many such keys, the list is empty.
-- The two numbers of a pair differ only if somebody has deleted a key.
--
-- If the `uuid` has changed, the script writes the time into `meta`, for `aiodelay check`.
local MOST_PARKED, MOST_KEYS = 1000, 100

local keys = {}
local function counted_by(command, key)
  local count = call(command, key)
  if count > 0 then keys[#keys + 1] = key end
  return count
end

local stored, placed = counted_by('HLEN', MSG) + counted_by('HLEN', DEAD), counted_by('ZCARD', GRAVES)
local lanes = call('HGETALL', LANES)
if #lanes > 0 then keys[#keys + 1] = LANES end
for i = 2, #lanes, 2 do
  placed = placed + counted_by('ZCARD', due_key(lanes[i])) + counted_by('ZCARD', leased_key(lanes[i]))
end
if counted_by('SCARD', PARKED) <= MOST_PARKED then
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    placed = placed + counted_by('ZCARD', TAG .. 'parked:' .. name)
  end
else
  placed = stored
end
local marked = marks()
local uuid, noted_holds, noted_sources = marked[MARK.UUID] or '', marked[MARK.HOLDS], marked[MARK.SOURCES]
if uuid ~= ARGV[4] then
  open_gate()
  call('HSET', META, 'vanished', text(now))
end
local holds, sources = counted_by('SCARD', HOLDS), counted_by('HLEN', SRC)
return { text(now), uuid, stored, placed, tonumber(noted_holds or holds), holds, tonumber(noted_sources or sources), sources,
  marked, #keys <= MOST_KEYS and keys or {} }
