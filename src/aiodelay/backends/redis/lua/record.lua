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

local ENCODINGS = { [BODY.ENCODING_KEY .. '\164json'] = true, [BODY.ENCODING_KEY .. '\167msgpack'] = true }
-- Returns the size of the body that begins at `at`, as fields.measured() does, or nil if the body is unreadable.
local function size_of(s, at)
  local map, a1, p, c4, length = byte(s, at, at + 4)
  -- The fast way is for a body with a short payload, and with an encoding or nothing else.
  if a1 == 0xa1 and p == BODY.PAYLOAD_BYTE and c4 == 0xc4 then
    local ends = at + 4 + length
    if map == 0x81 and ends == #s then return length end
    if map == 0x82 and ENCODINGS[sub(s, ends + 1)] then return length end
  end
  local is_readable, size = pcall(fields.measured, s, at)
  return is_readable and size or nil
end
