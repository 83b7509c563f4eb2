-- conflicts: the conflict rules that depend on times: earlier, later, debounce, throttle. They follow the same rules as
-- core/conflicts.py.

-- Returns the number in 8 bytes. It is exact for times.
local function time_in(version)
  local high, low = unpack_bytes('>I4I4', version)
  return high * 4294967296 + low
end

-- Returns the beginning of the last window of an id, or nil; and true if the window is under way.
local function window_of(id, e, window)
  local known = memory.known_version(id, e)
  local since = known and time_in(known)
  return since, since and now - since < window and now - since >= -window
end

local function debounced_since(e)
  local written = fields.get(e, BODY.DEBOUNCED_MS)
  return written and cmsgpack.unpack(written)
end

-- Returns true if the stored message stays, or if the window of an ended message is not over; then the beginning of that
-- window.
function conflicts.is_kept(a, e, mode, due)
  if mode == 't' then
    local since, is_within = window_of(ARGV[a + 1], e, tonumber(sub(ARGV[a], WHAT.OPERAND_FIRST)))
    return is_within, since
  end
  if not e or token_of(e) then return false end
  return (mode == 'b' and due >= e.due) or (mode == 'a' and due <= e.due)
end

-- Returns the due time that the mode gives a new message, the message's version, and the first call of its burst.
function conflicts.times(a, e, mode, due)
  local operand = sub(ARGV[a], WHAT.OPERAND_FIRST)
  local waits = e and not token_of(e) and e.attempt == 0 and e.lapses == 0
  if mode == 'd' then
    local is_readable, since = pcall(debounced_since, waits and e or { body = '\128' })
    since = math.min(is_readable and since or now, now) -- The clock may have stepped back.
    return operand == '' and due or math.min(due, since + tonumber(operand)), nil, since
  end
  local window = tonumber(operand)
  local since, is_within = window_of(ARGV[a + 1], e, window)
  if since and since > now and not is_within then memory.forget_version(ARGV[a + 1]) end -- The clock has stepped back.
  if not is_within then return due, now end
  if waits then return e.due, since end
  local next_window = since > now and since or since + window
  return next_window, next_window
end

-- Writes what conflicts.times() has returned into a new message.
function conflicts.mark(e, version, since)
  if version then
    set(e, VERSIONED)
    e.version = pack('>I8', version)
  end
  if since then fields.append(e, BODY.DEBOUNCED_MS, pack('>BI8', 0xcf, since)) end
end
