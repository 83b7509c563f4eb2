-- record: reads and writes the values of the hash `msg`. A value is a head, then the record of docs/formats.md.
--
-- The head is the sequence number u48. If its top bit is set, the message's place u48 follows. Otherwise the place is
-- the due time. A name with a layout and a point, such as VALUE.SIZE, is a constant of records/layouts.py. Python
-- replaces it by a number or a string when it composes a script.
local PREFIX, HEADED = RECORD.PREFIX, VALUE.PREFIX
local FORMAT = RECORD.FORMAT_VERSION
local RECURRING, ALONE, NO_RETRY, VERSIONED = FLAG.RULE, FLAG.ALONE, FLAG.NO_RETRY, FLAG.VERSION
local LATE_SHIFT = FLAG.LATE_SHIFT
local PLACED = VALUE.PLACED
local NO_OP = string.rep('\0', RECORD.OP_SIZE)
local MOST_ATTEMPTS, MOST_LAPSES = 65535, 255
local OCCURRENCE = ID.OCCURRENCE
local band, bor, rshift = bit.band, bit.bor, bit.rshift

local function has(e, flag) return band(e.flags, flag) ~= 0 end
local function set(e, flag) e.flags = bor(e.flags, flag) end
local function unset(e, flag) if has(e, flag) then e.flags = e.flags - flag end end
local function late_of(e) return rshift(band(e.flags, FLAG.LATE), LATE_SHIFT) end

-- Returns a table for a value, with the fields of its record. Returns nil if the value is truncated or has another
-- format.
local function parse(id, value)
  if #value < VALUE.SIZE then return nil end
  local at, place = VALUE.FORMAT_FIRST, nil
  local sequence, version, flags, lane, revision, due, expires, attempt, lapses, kills, op =
    unpack_bytes(HEADED, value)
  if sequence >= PLACED then
    if #value < PLACED_VALUE.SIZE + RECORD.SIZE then return nil end
    at, sequence = PLACED_VALUE.RECORD_FIRST, sequence - PLACED
    place = unpack_bytes('>I6', value, PLACED_VALUE.PLACE_FIRST)
    version, flags, lane, revision, due, expires, attempt, lapses, kills, op = unpack_bytes(PREFIX, value, at)
  end
  if version ~= FORMAT then return nil end
  local e = { id = id, value = value, sequence = sequence, place = place or due, flags = flags, lane = lane,
    revision = revision, due = due, expires = expires, attempt = attempt, lapses = lapses, kills = kills, op = op,
    body_at = at + RECORD.SIZE, version = nil, body = nil, token = nil, address = nil, rank = nil }
  if has(e, VERSIONED) then
    e.version = sub(value, e.body_at, e.body_at + RECORD.VERSION_SIZE - 1)
    e.body_at = e.body_at + RECORD.VERSION_SIZE
  end
  return e
end

local function body_of(e)
  if not e.body then e.body = sub(e.value, e.body_at) end
  return e.body
end

local function record_bytes(e)
  return pack(PREFIX, FORMAT, e.flags, e.lane, e.revision, e.due, e.expires, e.attempt, e.lapses, e.kills, e.op)
    .. (e.version or '') .. body_of(e)
end

local function head_bytes(e)
  if e.place == e.due then return u48(e.sequence) end
  return u48(e.sequence + PLACED) .. u48(e.place)
end

local function member(e) return u48(e.sequence) .. e.id end

-- --- the body: a MessagePack map of one-letter keys ------------------------------------------------------------

local function count_at(s, at, size)
  return unpack_bytes(size == 1 and '>B' or size == 2 and '>H' or '>I4', s, at)
end

local BLOB = { [0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4 }
local FIXED = { [0xc0] = 1, [0xc2] = 1, [0xc3] = 1, [0xca] = 5, [0xcb] = 9, [0xcc] = 2, [0xcd] = 3, [0xce] = 5,
  [0xcf] = 9, [0xd0] = 2, [0xd1] = 3, [0xd2] = 5, [0xd3] = 9 }
local MANY = { [0xdc] = 2, [0xdd] = 4, [0xde] = 2, [0xdf] = 4 }

-- Returns the position and the number of the bytes in the text or binary that begins at `at`.
local function blob(s, at)
  local b = byte(s, at)
  if b >= 0xa0 and b < 0xc0 then return at + 1, b - 0xa0 end
  local size = BLOB[b]
  return at + 1 + size, count_at(s, at + 1, size)
end

-- Returns the number of values in the map or list that begins at `at`, and the position of the first value. Keys of a
-- map count as values.
local function items(s, at)
  local b = byte(s, at)
  if b >= 0x80 and b < 0x90 then return 2 * (b - 0x80), at + 1 end
  if b >= 0x90 and b < 0xa0 then return b - 0x90, at + 1 end
  local size = MANY[b]
  local count = count_at(s, at + 1, size)
  return b >= 0xde and 2 * count or count, at + 1 + size
end

-- Returns the position after the value that begins at `at`.
local function skip(s, at)
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

-- Returns the fields of the body in order. Each field is {key, position of the key, position of the value, position
-- after the value}.
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

-- Returns the position of the value of a one-letter key, or nil if the map that begins at `at` does not have the key.
local function value_at(s, at, key)
  local count
  count, at = items(s, at)
  for _ = 1, count / 2 do
    local from, length = blob(s, at)
    at = from + length
    if length == 1 and byte(s, from) == key then return at end
    at = skip(s, at)
  end
  return nil
end

-- Returns the encoded value of a field of the body, or nil if the body does not have the field.
local function field(e, key)
  local body = body_of(e)
  local at = value_at(body, 1, byte(key))
  return at and sub(body, at, skip(body, at) - 1)
end

-- Replaces fields of the body. `changes` maps a key to its new encoded value, or to false to remove the field.
local function rewrite(e, changes)
  local kept, count, from, ends = '', 0, nil, nil -- Copy neighbouring unchanged fields together.
  for _, f in ipairs(fields(e)) do
    if changes[f[1]] == nil then
      from = from or f[2]
      count = count + 1
    elseif from then
      kept, from = kept .. sub(e.body, from, f[2] - 1), nil
    end
    ends = f[4]
  end
  if from then kept = kept .. sub(e.body, from, ends - 1) end
  for key, value in pairs(changes) do
    if value then
      kept = kept .. '\161' .. key .. value
      count = count + 1
    end
  end
  e.body = (count < 16 and string.char(0x80 + count) or pack('>BH', 0xde, count)) .. kept
end

local function live_of(e)
  local written = field(e, BODY.LIVE)
  return written and cmsgpack.unpack(written) or {}
end

local function written_list(list)
  if #list == 0 then return false end
  local parts = { #list < 16 and string.char(0x90 + #list) or pack('>BH', 0xdc, #list) }
  for _, value in ipairs(list) do parts[#parts + 1] = pack('>BI8', 0xcf, value) end
  return table.concat(parts)
end

local function address_of(e)
  if not e.address then
    local s, at = e.body or e.value, e.body and 1 or e.body_at
    at = value_at(s, at, BODY.ADDRESS_BYTE)
    e.address = ''
    if at then
      local from, length = blob(s, at)
      e.address = sub(s, from, from + length - 1)
    end
  end
  return e.address
end

-- Returns the number of bytes that count against the demand: payload, key and headers. They are the first fields of the
-- body.
local function measured(s, at)
  if skip(s, at) ~= #s + 1 then error('the body is cut short') end
  local count, size = nil, 0
  count, at = items(s, at)
  for _ = 1, count / 2 do
    local key = sub(s, at, at + 1)
    if key == BODY.PAYLOAD_KEY or key == BODY.KEY_KEY then
      local from, length = blob(s, at + 2)
      size, at = size + length, from + length
    elseif key == BODY.HEADERS_KEY then
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

local ENCODINGS = { [BODY.ENCODING_KEY .. '\164json'] = true, [BODY.ENCODING_KEY .. '\167msgpack'] = true }
-- Returns the size of a message as measured() does, or nil if the body is unreadable.
local function size_of(e)
  local s, at = e.value, e.body_at
  local map, a1, p, c4, length = byte(s, at, at + 4)
  -- The fast way is for a body with a short payload, and with an encoding or nothing else.
  if a1 == 0xa1 and p == BODY.PAYLOAD_BYTE and c4 == 0xc4 then
    local ends = at + 4 + length
    if map == 0x81 and ends == #s then return length end
    if map == 0x82 and ENCODINGS[sub(s, ends + 1)] then return length end
  end
  local is_readable, size = pcall(measured, s, at)
  return is_readable and size or nil
end

-- Returns true if two encoded rules are equal. The order of their keys does not matter.
local function same_rule(a, b)
  if a == b then return true end
  if not a or not b then return false end
  a, b = cmsgpack.unpack(a), cmsgpack.unpack(b)
  for key, value in pairs(a) do if b[key] ~= value then return false end end
  for key, value in pairs(b) do if a[key] ~= value then return false end end
  return true
end
