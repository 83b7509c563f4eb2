-- appending: messages that gather items (Conflict.append). They follow the same rules as core/appending.py.
--
-- A message in flight keeps the items that came since its claim in its body, beside its payload. The set IDS has the
-- ids of these messages, so that a plain settlement finds them without reading records.
appending.IDS = TAG .. 'appended'

local SEPARATOR = '\n'

local function bin(s)
  if #s < 256 then return '\196' .. string.char(#s) .. s end
  if #s < 65536 then return pack('>BH', 0xc5, #s) .. s end
  return pack('>BI4', 0xc6, #s) .. s
end

local function bytes_of(e, key)
  local body = body_of(e)
  local at = fields.value_at(body, 1, byte(key))
  if not at then return nil end
  local from, length = fields.blob(body, at)
  return sub(body, from, from + length - 1)
end

local function count_of(e, key)
  local written = fields.get(e, key)
  return written and cmsgpack.unpack(written)
end

-- Writes the payload as the first field of the body, where fields.measured() looks for it.
local function set_payload(e, payload)
  fields.rewrite(e, { [BODY.PAYLOAD] = false })
  local count, from = fields.items(e.body, 1)
  count = count / 2 + 1
  local head = count < 16 and string.char(0x80 + count) or pack('>BH', 0xde, count)
  e.body = head .. BODY.PAYLOAD_KEY .. bin(payload) .. sub(e.body, from)
end

-- Returns the items that a message got since its claim and their due time, or nil if there are none.
local function items_of(e)
  if not appends or call('SISMEMBER', appending.IDS, e.id) == 0 then return nil end
  local is_readable, items, due = pcall(function() return bytes_of(e, BODY.APPENDED), count_of(e, BODY.APPENDED_DUE_MS) end)
  if is_readable then return items, due end
  return nil
end

function appending.has_items(e) return items_of(e) ~= nil end

local function join(a, b) return a and a .. SEPARATOR .. b or b end

local function is_full(payload, most)
  local _, separators = string.gsub(payload, SEPARATOR, '')
  return most and separators + 1 >= most
end

local NOTHING = { [BODY.APPENDED] = false, [BODY.APPENDED_DUE_MS] = false }

-- Removes the items that a message got since its claim.
function appending.drop(e)
  if call('SREM', appending.IDS, e.id) == 1 then
    body_of(e)
    pcall(fields.rewrite, e, NOTHING)
  end
end

-- Returns a message as the run under way knows it, without the items that it got since its claim.
function appending.bare(e)
  if not items_of(e) then return e end
  local bare = copy(e)
  body_of(bare)
  fields.rewrite(bare, NOTHING)
  return bare
end

local function is_same_kind(e, given, lane)
  if has(e, RECURRING) or known_lane(lane) ~= e.lane then return false end
  for _, key in ipairs({ BODY.ADDRESS, BODY.TYPE, BODY.ENCODING }) do
    if (bytes_of(e, key) or '') ~= (bytes_of(given, key) or '') then return false end
  end
  return true
end

local function add_in_flight(e, items, due, most)
  if is_full(items, most) then due = math.min(due, now) end
  fields.rewrite(e, { [BODY.APPENDED] = bin(items), [BODY.APPENDED_DUE_MS] = pack('>BI8', 0xcf, due) })
  store(e)
  call('SADD', appending.IDS, e.id)
  note('replaced', e)
  return pack(ANSWER.PACKED, 'R', e.revision, due)
end

local function add_pending(e, payload, op, most)
  local joined = copy(e)
  body_of(joined)
  joined.size = nil
  set_payload(joined, payload)
  finish_off(e)
  joined.revision, joined.op = memory.next_revision(e.revision), op
  local place = e.place
  if is_full(payload, most) and joined.due > now then
    attempts.move(joined, now)
    place = now
  end
  insert(joined, place)
  note('replaced', joined)
  return pack(ANSWER.PACKED, superseded.is_any(e.id) and 'R' or 'r', joined.revision, joined.due)
end

-- Adds the item of a put to the stored message. Returns the answer.
function appending.append(a, e, due)
  local most, most_bytes = string.match(sub(ARGV[a], WHAT.OPERAND_FIRST), '^(%d*):(%d*):')
  local given = { body = ARGV[a + 7] }
  local is_readable, is_same = pcall(is_same_kind, e, given, ARGV[a + 3])
  if not is_readable or not is_same then return 'X' end
  local item, payload = bytes_of(given, BODY.PAYLOAD) or '', bytes_of(e, BODY.PAYLOAD) or ''
  local items, items_due = items_of(e)
  if #join(items, item) + #SEPARATOR + #payload > (tonumber(most_bytes) or math.huge) then return 'B' end
  most = tonumber(most)
  if token_of(e) then return add_in_flight(e, join(items, item), math.min(due, items_due or due), most) end
  return add_pending(e, join(payload, item), ARGV[a + 2], most)
end

-- Gives a message that is tried again the items that it got since its claim. Call this after take_out().
function appending.join(e)
  local items = items_of(e)
  if not items then return false end
  memory.remember_answer(e)
  local payload = bytes_of(e, BODY.PAYLOAD) or ''
  appending.drop(e)
  set_payload(e, join(payload, items))
  e.size, e.revision = nil, memory.next_revision(e.revision)
  return true
end

local FIRST_ATTEMPT = { [BODY.FIRST_ERROR] = false, [BODY.LAST_ERROR] = false, [BODY.EARLIER_ERRORS] = false,
  [BODY.PUT_DUE_MS] = false, [BODY.DEBOUNCED_MS] = false }

-- Ends a message after its last attempt. If it got items since its claim, they become the next message of its id. Call
-- this after take_out().
function appending.finish(e)
  local items, due = items_of(e)
  if not items then return forget(e) end
  memory.remember_answer(e)
  appending.drop(e)
  fields.rewrite(e, FIRST_ATTEMPT)
  set_payload(e, items)
  if e.expires ~= 0 then e.expires = e.expires - e.due + due end
  e.size, e.revision, e.due = nil, memory.next_revision(e.revision), due
  e.attempt, e.lapses, e.kills = 0, 0, 0
  unset(e, ALONE)
  unset(e, NO_RETRY)
  insert(e, due)
end
