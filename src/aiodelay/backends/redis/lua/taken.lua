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
local TRIED = 64 -- a flag that only taken elements have: the trial is not over

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

local function has(flags, flag) return math.floor(flags / flag) % 2 == 1 end

local function without(flags, flag) return has(flags, flag) and flags - flag or flags end

-- Returns an element whose trial is over.
local function untried(s)
  local p = prefix_at(s)
  if not p then return s end
  local flags, lapses, kills = state_of(s, p)
  local left = without(without(flags, TRIED), ALONE)
  return left == flags and s or with_state(s, p, left, lapses, kills)
end

-- Trials of suspects. The hash holds of each consumer that tries some, under '@' and its name: how long its lease lasts in
-- ms, when its process told last that it lives, the first and the last number, and 'd' once the lease of a lone suspect is
-- over. Beside these it holds what META of a store does: `tried`, `hot`, `suspected`, `killed`.
local trials = { KEY = sub(CONSUMERS, 1, -#'consumers' - 1) .. 'trials', SILENT_LEASES = 4, STALE = 120000 }

function trials.of(consumer)
  local value = call('HGET', trials.KEY, '@' .. consumer)
  local lease, beat, first, last, doubt = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+) ?(d?)$')
  return tonumber(lease), tonumber(beat), tonumber(first), tonumber(last), doubt
end

function trials.write(consumer, lease, beat, first, last, doubt)
  call('HSET', trials.KEY, '@' .. consumer, string.format('%d %.0f %.0f %.0f %s', lease, beat, first, last, doubt))
end

function trials.size(consumer, first, last) -- how many of these numbers are still tried
  local numbers, size = {}, 0
  for number = first, last do numbers[#numbers + 1] = text(number) end
  for _, element in ipairs(call('HMGET', taken_key(consumer), unpack(numbers))) do
    local p = element and prefix_at(element)
    if p and has(state_of(element, p), TRIED) then size = size + 1 end
  end
  return size
end

-- Returns the number of a lone suspect that a consumer may hold though its lease is over, and until when it may: its
-- process was heard of not long ago.
function trials.in_doubt(consumer)
  local lease, beat, first, last, doubt = trials.of(consumer)
  if not lease or first < last or math.abs(now - beat) >= trials.SILENT_LEASES * lease then return nil end
  if trials.size(consumer, first, last) == 0 then return nil end
  if doubt == '' then trials.write(consumer, lease, beat, first, last, 'd') end
  return first, math.min(beat + trials.SILENT_LEASES * lease, now + MAX_LEASE)
end

function trials.note_death(consumer) -- the lease of a group has ended: the group holds a killer
  local _, _, first, last = trials.of(consumer)
  if not first or first == last or call('HGET', trials.KEY, 'tried') == '0' then return end
  local size = trials.size(consumer, first, last)
  if size > 0 then call('HSET', trials.KEY, 'tried', 0, 'hot', size) end
end

-- Returns an element after its lease has ended.
function trials.after_lapse(consumer, s)
  local p = prefix_at(s)
  if not p then return s end
  local flags, lapses, kills = state_of(s, p)
  local is_tried, is_alone = has(flags, TRIED), has(flags, ALONE)
  if not is_tried then
    lapses = lapses + 1
    if lapses == SUSPECT_LAPSES then call('HSET', trials.KEY, 'suspected', text(now)) end
  elseif is_alone and consumer ~= ARGV[2] then -- its process has ended
    local _, beat = trials.of(consumer)
    kills = kills + 1
    call('HSET', trials.KEY, 'killed', text(beat or now))
  end
  return with_state(s, p, without(without(flags, TRIED), ALONE), lapses, kills)
end

local function leave_if_empty(consumer)
  if call('EXISTS', taken_key(consumer)) == 1 then return end
  call('ZREM', CONSUMERS, consumer)
  call('HDEL', trials.KEY, '@' .. consumer)
  if call('EXISTS', CONSUMERS, LIST) == 0 then call('UNLINK', trials.KEY) end
end

local given, given_bytes = 0, 0

-- Gives elements back to the head of the list, as `changed` returns them, those with the highest numbers first: so they
-- stand as they stood. No more than one script may move: the rest stays taken.
local function give_back(consumer, numbers, changed)
  local key = taken_key(consumer)
  table.sort(numbers, function(a, b) return a > b end)
  local elements, fields = {}, {}
  for _, number in ipairs(numbers) do
    if given >= MOST or given_bytes > MOST_BYTES then break end
    local element = call('HGET', key, text(number))
    if element then
      elements[#elements + 1], fields[#fields + 1] = changed(element), text(number)
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
    local alone, doubt_ends = trials.in_doubt(consumer)
    local numbers = {}
    for _, number in ipairs(call('HKEYS', taken_key(consumer))) do
      if tonumber(number) ~= alone then numbers[#numbers + 1] = tonumber(number) end
    end
    trials.note_death(consumer)
    give_back(consumer, numbers, function(s) return trials.after_lapse(consumer, s) end)
    if alone and call('HLEN', taken_key(consumer)) == 1 then call('ZADD', CONSUMERS, text(doubt_ends), consumer) end
  end
end
