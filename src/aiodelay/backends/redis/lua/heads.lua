-- heads: what stands at a lane's head and must be neither claimed nor moved is taken out of its way.

-- Says whether a lane's member is that of the value; one that is not was left by another program.
local function names(name, value, e)
  return byte(value) < VALUE.PLACED_BYTE
    and sub(name, MEMBER.SEQUENCE_FIRST, MEMBER.SEQUENCE_LAST) == sub(value, VALUE.SEQUENCE_FIRST, VALUE.SEQUENCE_LAST)
    or member(e) == name
end

-- Says whether it took a message out of `key`; of one that it left, `e.name` is its member.
local function pass(n, key, name, id, value, e)
  local held = e and any_holds() and is_held(n, address_of(e))
  if e and not held and (e.flags == 0 or not ends_by_itself(e)) and names(name, value, e) then
    e.name = name
    return false
  end
  open_gate()
  if not e or not names(name, value, e) then
    call('ZREM', key, name)
    if value and not e then set_aside(n, id, value) end
  elseif held then
    call('ZREM', key, name)
    park(e)
  else
    expire(e)
  end
  return true
end

-- Returns the message of a value, with its size; nil if it cannot be read. What became of it since it was read counts.
local function readable(id, value)
  local e = loaded[id] or value and parse(id, value) or nil
  if e then e.size = size_of(e) end
  if e and not e.size then e = nil end
  loaded[id] = e or false
  return e
end

local function sooner(a, b)
  return (not a or (b and b < a)) and b or a
end

-- Returns when a lease ends in a lane.
function tokens.next_end(n)
  local key = leased_key(n)
  local token = tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if token and token < tokens.LEAST and call('HLEN', trials.KEY) > 0 then -- it may be that of a suspect in doubt
    token = tonumber(call('ZRANGEBYSCORE', key, text(tokens.LEAST), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end
  return token and floor(token / COUNTERS) + TOKEN_EPOCH
end

-- Returns when there may be something to claim in a lane: a message comes due, a lease ends.
local function next_claim(n, most_parked) return sooner(head_of(n, most_parked), tokens.next_end(n)) end

-- Returns when there may be something to move: as to claim, or a blocked address is to be tried, which no claim does.
local function next_move(n, most_parked)
  return sooner(next_claim(n, most_parked), tonumber(call('ZRANGE', blocked_key(n), 0, 0, 'WITHSCORES')[2]))
end
