-- taken: what consumers have taken from a list, and its return when a lease ends; part of the scripts of sources.
--
-- KEYS[1] the list
-- KEYS[2] its consumers -> epoch ms at which the lease of each ends
-- KEYS[3] what the consumer has taken: number -> element; those of others are derived from KEYS[2]
-- KEYS[4] of a fan-out only: the topic's content. The list then holds references beside elements, each an index, or index,
--   flags, lapses and kills with a space between them; the list's consumers are the instances of a topic's one
-- ARGV[2] the consumer
local LIST, CONSUMERS, TAKEN, CONTENT = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local MOST, MOST_BYTES, MOST_CONSUMERS = 500, 1048576, 4
local MAX_LEASE, RIGHTING, SUSPECT_LAPSES, KILLS_TO_DEATH = 60000, 20000, 2, 3
local FORMAT, ALONE = RECORD.FORMAT_VERSION, FLAG.ALONE
local FLAGS_AT, LAPSES_AT, KILLS_AT = RECORD.FLAGS_OFFSET, RECORD.LAPSES_OFFSET, RECORD.KILLS_OFFSET

local function taken_key(consumer) return sub(CONSUMERS, 1, -#'consumers' - 1) .. 'taken:' .. consumer end

local function prefix_at(s) -- where an element's prefix begins, 0 of a reference; nil if it has none that we know
  if CONTENT and byte(s) < 58 then return 0 end
  local at = 1
  local kind, high, low = byte(s, at, at + 2)
  at = kind == 0xc4 and high and at + 2 + high or kind == 0xc5 and low and at + 3 + 256 * high + low
  if not at then return nil end
  local bin, size, format = byte(s, at, at + 2)
  if bin ~= 0xc4 or (size ~= RECORD.SIZE and size ~= RECORD.VERSIONED_SIZE) then return nil end
  if format ~= FORMAT or #s < at + 1 + size then return nil end
  return at + 2
end

local function state_of(s, p)
  if p == 0 then
    local flags, lapses, kills = string.match(s, ' (%d+) (%d+) (%d+)$')
    return tonumber(flags or 0), tonumber(lapses or 0), tonumber(kills or 0)
  end
  local lapses, kills = byte(s, p + LAPSES_AT, p + KILLS_AT)
  return byte(s, p + FLAGS_AT), lapses, kills
end

local function with_state(s, p, flags, lapses, kills)
  if p == 0 then return string.format('%s %d %d %d', string.match(s, '^%d+'), flags, lapses, kills) end
  return sub(s, 1, p + FLAGS_AT - 1) .. char(flags) .. sub(s, p + FLAGS_AT + 1, p + LAPSES_AT - 1)
    .. char(math.min(lapses, 255), math.min(kills, 255)) .. sub(s, p + KILLS_AT + 1)
end

local function is_alone(flags) return math.floor(flags / ALONE) % 2 == 1 end

local function after_lapse(s)
  local p = prefix_at(s)
  if not p then return s end
  local flags, lapses, kills = state_of(s, p)
  if is_alone(flags) then return with_state(s, p, flags - ALONE, lapses, kills + 1) end
  return with_state(s, p, flags, lapses + 1, kills)
end

local function leave_if_empty(consumer)
  if call('EXISTS', taken_key(consumer)) == 0 then call('ZREM', CONSUMERS, consumer) end
end

local given, given_bytes = 0, 0

-- Gives elements back to the head of the list, those with the highest numbers first: so they stand as they stood.
-- No more than one script may move: the rest stays taken.
local function give_back(consumer, numbers, changed)
  local key = taken_key(consumer)
  table.sort(numbers, function(a, b) return a > b end)
  local elements, fields = {}, {}
  for _, number in ipairs(numbers) do
    if given >= MOST or given_bytes > MOST_BYTES then break end
    local element = call('HGET', key, text(number))
    if element then
      elements[#elements + 1], fields[#fields + 1] = changed and changed(element) or element, text(number)
      given, given_bytes = given + 1, given_bytes + #element
    end
  end
  if #elements > 0 then
    call('LPUSH', LIST, unpack(elements))
    call('HDEL', key, unpack(fields))
  end
  leave_if_empty(consumer)
end

-- Shortens leases that end further ahead than any may, as the clock has stepped back: who lives renews them meanwhile.
local function set_right()
  local ahead = call('ZRANGEBYSCORE', CONSUMERS, '(' .. text(now + MAX_LEASE), '+inf', 'LIMIT', 0, MOST)
  for _, consumer in ipairs(ahead) do call('ZADD', CONSUMERS, text(now + RIGHTING), consumer) end
end

local function return_lapsed()
  set_right()
  local lapsed = call('ZRANGEBYSCORE', CONSUMERS, '-inf', text(now), 'LIMIT', 0, MOST_CONSUMERS)
  for _, consumer in ipairs(lapsed) do
    local numbers = {}
    for i, number in ipairs(call('HKEYS', taken_key(consumer))) do numbers[i] = tonumber(number) end
    give_back(consumer, numbers, after_lapse)
  end
end
