-- record: reads and writes the value that stands under an id in `msg`: a head, then the record of docs/formats.md.
--
-- Head: sequence u48, its top bit set if a place u48 follows; otherwise the message stands at its due time.
-- PREFIX and the flags are derived from model.FIELDS; tests/unit/test_redis_scripts.py compares them.
local PREFIX = '>BBHI6I6I6HBBc8'
local PREFIX_SIZE = 34
local FORMAT = 1
local RECURRING, ALONE, NO_RETRY, LATE_SHIFT, LATE_MASK, VERSIONED = 1, 2, 4, 3, 3, 32
local PLACED = 140737488355328
local NO_OP = '\0\0\0\0\0\0\0\0'
local MOST_ATTEMPTS, MOST_LAPSES = 65535, 255
local OCCURRENCE = 3
local band, bor, rshift = bit.band, bit.bor, bit.rshift

local function has(e, flag) return band(e.flags, flag) ~= 0 end
local function set(e, flag) e.flags = bor(e.flags, flag) end
local function unset(e, flag) if has(e, flag) then e.flags = e.flags - flag end end
local function late_of(e) return band(rshift(e.flags, LATE_SHIFT), LATE_MASK) end

-- Returns nil for a value that cannot be read: cut short, or of another format.
local function parse(id, value)
  if #value < 6 + PREFIX_SIZE then return nil end
  local e = { id = id, value = value, sequence = struct.unpack('>I6', value) }
  local at = 7
  if e.sequence >= PLACED then
    if #value < 12 + PREFIX_SIZE then return nil end
    e.sequence, e.place, at = e.sequence - PLACED, struct.unpack('>I6', value, 7), 13
  end
  local format
  format, e.flags, e.lane, e.revision, e.due, e.expires, e.attempt, e.lapses, e.kills, e.op =
    struct.unpack(PREFIX, value, at)
  if format ~= FORMAT then return nil end
  e.record_at, e.body_at = at, at + PREFIX_SIZE
  e.place = e.place or e.due
  if has(e, VERSIONED) then
    e.version = sub(value, e.body_at, e.body_at + 7)
    e.body_at = e.body_at + 8
  end
  return e
end

local function body_of(e)
  if not e.body then e.body = sub(e.value, e.body_at) end
  return e.body
end

local function record_bytes(e)
  return struct.pack(PREFIX, FORMAT, e.flags, e.lane, e.revision, e.due, e.expires, e.attempt, e.lapses, e.kills, e.op)
    .. (e.version or '') .. body_of(e)
end

local function head_bytes(e)
  if e.place == e.due then return u48(e.sequence) end
  return u48(e.sequence + PLACED) .. u48(e.place)
end

local function member(e) return u48(e.sequence) .. e.id end

-- --- the body: a MessagePack map of one-letter keys ------------------------------------------------------------

local function count_at(s, at, size)
  return struct.unpack(size == 1 and '>B' or size == 2 and '>H' or '>I4', s, at)
end

local BLOB = { [0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4 }
local FIXED = { [0xc0] = 1, [0xc2] = 1, [0xc3] = 1, [0xca] = 5, [0xcb] = 9, [0xcc] = 2, [0xcd] = 3, [0xce] = 5,
  [0xcf] = 9, [0xd0] = 2, [0xd1] = 3, [0xd2] = 5, [0xd3] = 9 }
local MANY = { [0xdc] = 2, [0xdd] = 4, [0xde] = 2, [0xdf] = 4 }

-- Returns where the bytes of the text or binary at `at` begin, and how many they are.
local function blob(s, at)
  local b = byte(s, at)
  if b >= 0xa0 and b < 0xc0 then return at + 1, b - 0xa0 end
  local size = BLOB[b]
  return at + 1 + size, count_at(s, at + 1, size)
end

local function items(s, at) -- of a map or list: how many values, and where the first begins
  local b = byte(s, at)
  if b >= 0x80 and b < 0x90 then return 2 * (b - 0x80), at + 1 end
  if b >= 0x90 and b < 0xa0 then return b - 0x90, at + 1 end
  local size = MANY[b]
  local count = count_at(s, at + 1, size)
  return b >= 0xde and 2 * count or count, at + 1 + size
end

local function skip(s, at) -- the position after the value at `at`
  local b = byte(s, at)
  if b < 0x80 or b >= 0xe0 then return at + 1 end
  if FIXED[b] then return at + FIXED[b] end
  if BLOB[b] or (b >= 0xa0 and b < 0xc0) then
    local from, length = blob(s, at)
    return from + length
  end
  local count
  count, at = items(s, at)
  for _ = 1, count do at = skip(s, at) end
  return at
end

-- Returns the fields in order: {key, where it begins, where its value begins, where the next begins}.
local function fields(e)
  local body = body_of(e)
  local count, at = items(body, 1)
  local found = {}
  for i = 1, count / 2 do
    local from, length = blob(body, at)
    local ends = skip(body, from + length)
    found[i] = { sub(body, from, from + length - 1), at, from + length, ends }
    at = ends
  end
  return found
end

local function field(e, key) -- the field's value as it is written, or nil
  for _, f in ipairs(fields(e)) do
    if f[1] == key then return sub(e.body, f[3], f[4] - 1) end
  end
  return nil
end

-- Replaces fields: `changes` maps keys to written values, or to false to leave them out.
local function rewrite(e, changes)
  local parts, count = { '' }, 0
  for _, f in ipairs(fields(e)) do
    if changes[f[1]] == nil then
      parts[#parts + 1] = sub(e.body, f[2], f[4] - 1)
      count = count + 1
    end
  end
  for key, value in pairs(changes) do
    if value then
      parts[#parts + 1] = cmsgpack.pack(key) .. value
      count = count + 1
    end
  end
  parts[1] = count < 16 and string.char(0x80 + count) or struct.pack('>BH', 0xde, count)
  e.body = table.concat(parts)
end

local function live_of(e)
  local written = field(e, 'l')
  return written and cmsgpack.unpack(written) or {}
end

local function written_list(list)
  if #list == 0 then return false end
  local parts = { #list < 16 and string.char(0x90 + #list) or struct.pack('>BH', 0xdc, #list) }
  for _, value in ipairs(list) do parts[#parts + 1] = struct.pack('>BI8', 0xcf, value) end
  return table.concat(parts)
end

local function address_of(e)
  if not e.address then
    local written = field(e, 'a')
    e.address = ''
    if written then
      local from, length = blob(written, 1)
      e.address = sub(written, from, from + length - 1)
    end
  end
  return e.address
end

-- Bytes that count against demand: payload, key and headers, which stand first in the body.
local function size_of(e)
  local s, at = e.value, e.body_at
  if e.body then s, at = e.body, 1 end
  local count, size = nil, 0
  count, at = items(s, at)
  for _ = 1, count / 2 do
    local key = sub(s, at, at + 1)
    if key == '\161p' or key == '\161k' then
      local from, length = blob(s, at + 2)
      size, at = size + length, from + length
    elseif key == '\161h' then
      local values
      values, at = items(s, at + 2)
      for _ = 1, values do
        local from, length = blob(s, at)
        size, at = size + length, from + length
      end
    else
      break
    end
  end
  return size
end

local function same_rule(a, b) -- two rules as written; the order of their keys does not count
  if a == b then return true end
  if not a or not b then return false end
  a, b = cmsgpack.unpack(a), cmsgpack.unpack(b)
  for key, value in pairs(a) do if b[key] ~= value then return false end end
  for key, value in pairs(b) do if a[key] ~= value then return false end end
  return true
end
