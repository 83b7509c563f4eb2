-- base: keys, time, numbers, lanes, sequence numbers, journal and wake-ups. Every script of a store contains this part.
--
-- KEYS, the same for every script: lanes msg dead graves done src holds late late:held parked workers wake journal
-- meta. Each key begins with the hash tag "{namespace:00}:". Scripts build the keys of lanes, windows and workers from
-- that tag. If the namespace has several shards, one more key follows, which never exists: the tag, "layout:", and the
-- layout that the caller expects.
-- ARGV[1] now, epoch ms; '' = the server's TIME
-- ARGV[2] the largest number of journal entries to keep; 0 = no journal
-- ARGV[3] the name of the calling process. A process that reads `wake` skips its own entries.
local call, sub, byte, floor = redis.call, string.sub, string.byte, math.floor
local pack, unpack_bytes, format = struct.pack, struct.unpack, string.format
local KEYS, ARGV, unpack, tonumber = KEYS, ARGV, unpack, tonumber
local LANES, MSG, DEAD, GRAVES, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local SRC, HOLDS, LATE, LATE_HELD, PARKED = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local WORKERS, WAKE, JOURNAL, META = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local TAG = sub(LANES, 1, -#'lanes' - 1)

-- Race: a newer version, or `aiodelay reshard`, may have changed the layout after the caller opened the namespace.
local layout, features, limited, spared = unpack(call('HMGET', META, 'schema', 'features', 'limited', 'spared'))
local expected = KEYS[15] and string.match(KEYS[15], '^layout:(.*)', #TAG + 1) or MARKER.LAYOUT
if layout and layout ~= expected then return redis.error_reply('NEWER layout ' .. layout) end

local MOST_LANES = 65535
local WAKE_KEPT = 64

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

-- Prepares a module, a table of functions: define() adds the functions when one of them is first used. A script makes
-- its functions again in each call, and most calls need few of them.
local function lazily(module, define)
  setmetatable(module, { __index = function(_, name)
    setmetatable(module, nil)
    define()
    return module[name]
  end })
end

-- Use this for times and tokens, because tostring() and '..' would round them. redis.call writes a number argument
-- exactly.
local function text(n)
  return format('%.0f', n)
end

local function u48(n)
  return pack('>I6', n)
end

-- '..' writes lane numbers exactly, because they are small.
local function due_key(n) return TAG .. 'due:' .. n end
local function leased_key(n) return TAG .. 'leased:' .. n end

-- Call this before the first write. If the server is out of memory, a script may write only if its first command frees
-- memory. This ZREM removes nothing, but allows the later writes.
local is_open = false
local function open_gate()
  if not is_open then
    call('ZREM', GRAVES, '')
    is_open = true
  end
end

-- Returns true if the lane has limits. Call it only if `limited` is set, so that a store without limits pays nothing.
local function is_limited(n) return string.find(limited, ' ' .. n .. ' ', 1, true) ~= nil end

local lane_numbers = {}
local function known_lane(name)
  local n = lane_numbers[name]
  if n == nil then
    n = tonumber(call('HGET', LANES, name)) or false
    lane_numbers[name] = n
  end
  return n
end

local function new_lane(name)
  local n = call('HLEN', LANES) + 1
  if n > MOST_LANES then return false end
  call('HSET', LANES, name, n)
  lane_numbers[name] = n
  return n
end

local has_holds = nil
local function any_holds()
  if has_holds == nil then has_holds = call('SCARD', HOLDS) > 0 end
  return has_holds
end

-- Returns true if the lane is paused. With an address, returns true if this address of the lane is paused.
local function is_held(n, address)
  if not any_holds() then return false end
  if not address then return call('SISMEMBER', HOLDS, text(n)) == 1 end
  return call('SISMEMBER', HOLDS, text(n) .. ':' .. address) == 1
end

-- Counters and heads of lanes that change while the script runs. finish() writes the counters and wakes other
-- processes.
local counted = { sequence = nil, entries = nil, is_first = false, has_room = false, at_end = nil }
local heads, earliest = {}, {}

function counted.last_sequence()
  if not counted.sequence then
    local known = tonumber(call('HGET', META, 'seq'))
    counted.sequence, counted.is_first = known or 0, not known
  end
  return counted.sequence
end

-- Returns a new sequence number. It is odd if the message's place differs from its due time, and even if not. So a scan
-- knows the due time of a message with an even number from its place alone. META has the field `parity` if all messages
-- follow this rule. Versions before the rule have then left no messages.
local function next_sequence(is_elsewhere)
  local last = counted.last_sequence()
  counted.sequence = last + (last % 2 == (is_elsewhere and 1 or 0) and 2 or 1)
  return counted.sequence
end

-- Call this before a message enters a lane at `place`. If the message becomes the first of the lane, finish() wakes
-- other processes. The module `limits` does this for the lanes that have limits.
local function earlier(n, place)
  if limited and is_limited(n) then return end
  if heads[n] == nil then
    heads[n] = tonumber(call('ZRANGE', due_key(n), 0, 0, 'WITHSCORES')[2]) or false
  end
  if not earliest[n] or place < earliest[n] then earliest[n] = place end
end

local function note(event, e, detail)
  if ARGV[2] == '0' then return end
  counted.entries = (counted.entries or tonumber(call('HGET', META, 'journal') or 0)) + 1
  call('XADD', JOURNAL, 'MAXLEN', '~', ARGV[2], text(counted.entries) .. '-0', 'at', text(now), 'event', event,
    'id', e.id, 'revision', text(e.revision), 'lane', text(e.lane), 'due', text(e.due), 'attempt', text(e.attempt),
    'detail', detail or '')
end

-- Returns the marks of the store: values that change whenever a message is scheduled or returns to its lane, a lease
-- begins, a feature is switched on, or the data are lost. While they stay the same, no message can become claimable
-- earlier. See store/glance.py.
local MARK = { UUID = 3, HOLDS = 4, SOURCES = 5 } -- Positions in the list of marks.
local function marks()
  return call('HMGET', META, MARKER.MARKS)
end

-- A script that an operator repeats says `shall_write`: without a write, WAIT would not wait after a repetition.
local function finish(shall_write)
  if shall_write then counted.last_sequence() end
  if counted.at_end then counted.at_end() end
  if counted.sequence then call('HSET', META, 'seq', text(counted.sequence)) end
  if counted.is_first then call('HSET', META, 'parity', 1) end
  if counted.entries then call('HSET', META, 'journal', text(counted.entries)) end
  for n, place in pairs(earliest) do
    if not heads[n] or place < heads[n] then
      call('XADD', WAKE, 'MAXLEN', '~', WAKE_KEPT, '*', 'w', ARGV[3], 'l', text(n), 'd', text(place))
    end
  end
end
