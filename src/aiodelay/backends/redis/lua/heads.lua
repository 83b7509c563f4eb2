-- heads: removes paused, late and unreadable messages from the head of a lane, because the script must neither claim
-- nor move them. It also finds the time at which a lane next has something to do. `claim` and the scripts that transfer
-- contain this part.

-- Returns true if the member of a lane belongs to this value. If not, another program has left the member.
local function names(name, value, e)
  return byte(value) < VALUE.PLACED_BYTE
    and sub(name, MEMBER.SEQUENCE_FIRST, MEMBER.SEQUENCE_LAST) == sub(value, VALUE.SEQUENCE_FIRST, VALUE.SEQUENCE_LAST)
    or member(e) == name
end

-- Removes a message from `key` if it must not be claimed or moved: parks it, ends it, or makes it a dead letter.
-- Returns true if it has removed the message. Otherwise the message stays, and `e.name` is its member.
local function pass(n, key, name, id, value, e)
  local held = e and any_holds() and is_held(n, fields.address_of(e))
  if e and not held and (e.flags == 0 or not ends_by_itself(e)) and names(name, value, e) then
    e.name = name
    return false
  end
  open_gate()
  if not e or not names(name, value, e) then
    call('ZREM', key, name)
    if value and not e then dead.set_aside(n, id, value) end
  elseif held then
    call('ZREM', key, name)
    park(e)
  else
    expire(e)
  end
  return true
end

-- Returns the message of a value, with its size, or nil if the value is unreadable. If this script has already loaded
-- or changed the message, returns this newer state.
local function readable(id, value)
  local e = loaded[id] or value and parse(id, value) or nil
  if e then e.size = size_of(e.value, e.body_at) end
  if e and not e.size then e = nil end
  loaded[id] = e or false
  return e
end

-- A lane of a cluster may have messages for lists in this slot, which a transfer moves, and messages for other lists,
-- which a claim takes. Each script leaves the messages of the other in the lane, and reads the lane again after AGAIN
-- ms: while these messages are at the head, no message that is due earlier than the others wakes a process.
local slot = { NAME = sub(TAG, 1, -#':' - 1), AGAIN = 100 }

-- Returns true if the key of a list has the hash tag of this namespace, so that it is in the same slot.
function slot.has(address)
  return string.match(string.match(address, '^[^?]*'), '^[^{]*({[^}]+})') == slot.NAME
end

local function sooner(a, b)
  return (not a or (b and b < a)) and b or a
end

-- Returns the time at which the next lease of a lane ends, or nil if there is none.
function tokens.next_end(n)
  local key = leased_key(n)
  local token = tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if token and token < tokens.LEAST and call('HLEN', trials.KEY) > 0 then -- A suspect may be in doubt: skip its lease.
    token = tonumber(call('ZRANGEBYSCORE', key, text(tokens.LEAST), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end
  if not token then return nil end
  local ends = floor(token / COUNTERS) + TOKEN_EPOCH
  return tokens.spared and token >= tokens.LEAST and math.max(ends, tokens.spared) or ends
end

-- Returns the time at which a lane may next have something to claim, because a message becomes due or a lease ends.
local function next_claim(n, most_parked)
  if limited and is_limited(n) then return sooner(limits.next_ms(n), tokens.next_end(n)) end
  return sooner(head_of(n, most_parked), tokens.next_end(n))
end

-- Returns the same time for a lane whose due messages the script has left to the other kind of script.
function slot.next(n)
  local ahead = call('ZRANGEBYSCORE', due_key(n), '(' .. text(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return sooner(sooner(now + slot.AGAIN, tonumber(ahead)), tokens.next_end(n))
end

-- Returns the time of the next try of a blocked address of a lane, or nil if there is none.
local function next_try(n)
  return tonumber(call('ZRANGE', blocked_key(n), 0, 0, 'WITHSCORES')[2])
end

-- Returns the time at which a lane may next have something to move. This is the time of a claim, or of a try.
local function next_move(n, most_parked)
  return sooner(next_claim(n, most_parked), next_try(n))
end
