-- scan: reads one set of places from a place on, with what stands there; writes nothing.
--@ base
-- ARGV[4] the set behind the tag: due:<lane>, or parked:<lane>:<address>
-- ARGV[5], ARGV[6] from which place on, epoch ms, and from which sequence on of what stands there
-- ARGV[7], ARGV[8] before which place and sequence; '' = to the end
-- ARGV[9] nothing of a later sequence than this
-- ARGV[10], ARGV[11] due at this or later, and before this; '' = whenever
-- ARGV[12] so many are looked at, at most
-- ARGV[13] 'due', or 'values'
-- Returns now, then where to go on, place and sequence ('' = that is all), members, and of each its due time, 8 bytes, all in one;
-- or its value. What has gone from `msg` is left out.
local BLOCK, MOST_BYTES = 100, 1048576
local KEY = TAG .. ARGV[4]
local LAST, MOST, DUE_ONLY = tonumber(ARGV[9]), tonumber(ARGV[12]), ARGV[13] == 'due'
local FROM, TO = tonumber(ARGV[10]) or 0, tonumber(ARGV[11]) or 281474976710656
local PLACED = 128

local function sequence_of(member)
  return (unpack_bytes('>I6', member))
end

-- Returns the rank of the first that stands at a place and sequence, or later.
local function rank_of(ms, sequence)
  local low = call('ZCOUNT', KEY, '-inf', '(' .. ms)
  local high = sequence == '0' and low or call('ZCOUNT', KEY, '-inf', ms)
  while low < high do
    local middle = floor((low + high) / 2)
    if sequence_of(call('ZRANGE', KEY, middle, middle)[1]) < tonumber(sequence) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local members, values, dues = {}, {}, {}

local function add(member, value)
  local due_at = byte(value) >= PLACED and 23 or 17
  local due = sub(value, due_at, due_at + 5)
  if #due == 6 then
    local ms = unpack_bytes('>I6', due)
    if ms < FROM or ms >= TO then return end
  else
    due = '\0\0\0\0\0\0'
  end
  members[#members + 1] = member
  if DUE_ONLY then dues[#dues + 1] = '\0\0' .. due else values[#values + 1] = value end
end

-- Reads what `found` names from `i` on, members and places by turns; returns its bytes.
local function add_block(found, i)
  local ids, names = {}, {}
  for at = i, math.min(i + 2 * BLOCK, #found) - 1, 2 do
    if sequence_of(found[at]) <= LAST then
      names[#names + 1] = found[at]
      ids[#ids + 1] = sub(found[at], 7)
    end
  end
  local bytes = 0
  if #ids == 0 then return bytes end
  for at, value in ipairs(call('HMGET', MSG, unpack(ids))) do
    if value and #value > 0 then
      bytes = bytes + #value
      add(names[at], value)
    end
  end
  return bytes
end

local first = rank_of(ARGV[5], ARGV[6])
local ends = ARGV[7] == '' and call('ZCARD', KEY) or rank_of(ARGV[7], ARGV[8])
local found = first < ends and call('ZRANGE', KEY, first, math.min(first + MOST, ends) - 1, 'WITHSCORES') or {}
local i, bytes = 1, 0
while i <= #found and bytes < MOST_BYTES do
  bytes = bytes + add_block(found, i)
  i = i + 2 * BLOCK
end
local place, sequence = '', ''
if i <= #found then
  place, sequence = found[i + 1], text(sequence_of(found[i]))
elseif first + #found / 2 < ends then
  place, sequence = found[#found], text(sequence_of(found[#found - 1]) + 1)
end
return { text(now), place, sequence, members, DUE_ONLY and table.concat(dues) or values }
