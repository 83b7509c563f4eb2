-- fields: reads and writes the fields of a record's body. The body is a MessagePack map of one-letter keys.
local function count_at(s, at, size)
  return unpack_bytes(size == 1 and '>B' or size == 2 and '>H' or '>I4', s, at)
end

local BLOB = { [0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4 }
local FIXED = { [0xc0] = 1, [0xc2] = 1, [0xc3] = 1, [0xca] = 5, [0xcb] = 9, [0xcc] = 2, [0xcd] = 3, [0xce] = 5,
  [0xcf] = 9, [0xd0] = 2, [0xd1] = 3, [0xd2] = 5, [0xd3] = 9 }
local MANY = { [0xdc] = 2, [0xdd] = 4, [0xde] = 2, [0xdf] = 4 }

-- Returns the position and the number of the bytes in the text or binary that begins at `at`.
function fields.blob(s, at)
  local b = byte(s, at)
  if b >= 0xa0 and b < 0xc0 then return at + 1, b - 0xa0 end
  local size = BLOB[b]
  return at + 1 + size, count_at(s, at + 1, size)
end

-- Returns the number of values in the map or list that begins at `at`, and the position of the first value. Keys of a
-- map count as values.
function fields.items(s, at)
  local b = byte(s, at)
  if b >= 0x80 and b < 0x90 then return 2 * (b - 0x80), at + 1 end
  if b >= 0x90 and b < 0xa0 then return b - 0x90, at + 1 end
  local size = MANY[b]
  local count = count_at(s, at + 1, size)
  return b >= 0xde and 2 * count or count, at + 1 + size
end

-- Returns the position after the value that begins at `at`.
function fields.skip(s, at)
  local b = byte(s, at)
  if b < 0x80 or b >= 0xe0 then return at + 1 end
  if FIXED[b] then return at + FIXED[b] end
  if BLOB[b] or (b >= 0xa0 and b < 0xc0) then
    local from, length = fields.blob(s, at)
    return from + length
  end
  local count
  count, at = fields.items(s, at)
  for _ = 1, count do at = fields.skip(s, at) end
  return at
end

-- Returns the fields of the body in order. Each field is {key, position of the key, position of the value, position
-- after the value}.
local function all_of(e)
  local body = body_of(e)
  local count, at = fields.items(body, 1)
  local found = {}
  for i = 1, count / 2 do
    local from, length = fields.blob(body, at)
    local ends = fields.skip(body, from + length)
    found[i] = { sub(body, from, from + length - 1), at, from + length, ends }
    at = ends
  end
  return found
end

-- Returns the position of the value of a one-letter key, or nil if the map that begins at `at` does not have the key.
function fields.value_at(s, at, key)
  local count
  count, at = fields.items(s, at)
  for _ = 1, count / 2 do
    local from, length = fields.blob(s, at)
    at = from + length
    if length == 1 and byte(s, from) == key then return at end
    at = fields.skip(s, at)
  end
  return nil
end

-- Returns the encoded value of a field of the body, or nil if the body does not have the field.
function fields.get(e, key)
  local body = body_of(e)
  local at = fields.value_at(body, 1, byte(key))
  return at and sub(body, at, fields.skip(body, at) - 1)
end

-- Replaces fields of the body. `changes` maps a key to its new encoded value, or to false to remove the field.
function fields.rewrite(e, changes)
  local kept, count, from, ends = '', 0, nil, nil -- Copy neighbouring unchanged fields together.
  for _, f in ipairs(all_of(e)) do
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

-- Adds a field that the body does not have. This takes less time than fields.rewrite().
function fields.append(e, key, value)
  local first = byte(e.body)
  if first < 0x80 or first >= 0x8f then return fields.rewrite(e, { [key] = value }) end
  local _, from = fields.items(e.body, 1)
  e.body = string.char(first + 1) .. sub(e.body, from) .. '\161' .. key .. value
end

function fields.live_of(e)
  local written = fields.get(e, BODY.LIVE)
  return written and cmsgpack.unpack(written) or {}
end

function fields.written_list(list)
  if #list == 0 then return false end
  local parts = { #list < 16 and string.char(0x90 + #list) or pack('>BH', 0xdc, #list) }
  for _, value in ipairs(list) do parts[#parts + 1] = pack('>BI8', 0xcf, value) end
  return table.concat(parts)
end

function fields.address_of(e)
  if not e.address then
    local s, at = e.body or e.value, e.body and 1 or e.body_at
    at = fields.value_at(s, at, BODY.ADDRESS_BYTE)
    e.address = ''
    if at then
      local from, length = fields.blob(s, at)
      e.address = sub(s, from, from + length - 1)
    end
  end
  return e.address
end

-- Returns the number of bytes that count against the demand: payload, key and headers. They are the first fields of the
-- body.
function fields.measured(s, at)
  if fields.skip(s, at) ~= #s + 1 then error('the body is cut short') end
  local count, size = nil, 0
  count, at = fields.items(s, at)
  for _ = 1, count / 2 do
    local key = sub(s, at, at + 1)
    if key == BODY.PAYLOAD_KEY or key == BODY.KEY_KEY then
      local from, length = fields.blob(s, at + 2)
      size, at = size + length, from + length
    elseif key == BODY.HEADERS_KEY then
      local values
      values, at = fields.items(s, at + 2)
      for _ = 1, values do
        local from, length = fields.blob(s, at)
        size, at = size + length, from + length
      end
    else
      break
    end
  end
  return size
end

-- Returns true if two encoded rules are equal. The order of their keys does not matter.
function fields.same_rule(a, b)
  if a == b then return true end
  if not a or not b then return false end
  a, b = cmsgpack.unpack(a), cmsgpack.unpack(b)
  for key, value in pairs(a) do if b[key] ~= value then return false end end
  for key, value in pairs(b) do if a[key] ~= value then return false end end
  return true
end
