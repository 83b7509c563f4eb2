-- taken: the elements that consumers have taken from a list, and their return when a lease ends. The scripts of sources
-- contain this part.
--
-- KEYS[1] the list
-- KEYS[2] sorted set of the list's consumers: name -> end of the consumer's lease, epoch ms
-- KEYS[3] hash of the elements that this consumer has taken: number -> element. A script builds the keys of other
--   consumers from KEYS[2].
-- KEYS[4] only for topics and logs: the content of the topic, or the log. The list then has entries that are elements
--   or references. A reference is an index, or an index, flags, lapses and kills with spaces between them. The
--   consumers of the list are then the instances of one consumer of the topic or log.
-- On a cluster, one more key follows, which never exists.
-- ARGV[2] the consumer
local LIST, CONSUMERS, TAKEN, CONTENT = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if CONTENT and sub(CONTENT, -#MARKER.GUARD) == MARKER.GUARD then CONTENT = nil end
local MOST, MOST_BYTES, MOST_CONSUMERS = 500, 1048576, 4
local MAX_LEASE, RIGHTING, SUSPECT_LAPSES, KILLS_TO_DEATH = 60000, 20000, 2, 3
local FORMAT, ALONE = RECORD.FORMAT_VERSION, FLAG.ALONE
local FLAGS_AT, LAPSES_AT, KILLS_AT = RECORD.FLAGS_OFFSET, RECORD.LAPSES_OFFSET, RECORD.KILLS_OFFSET
local TRIED = 64 -- A flag that only taken elements have. It means that their trial is in progress.

local function taken_key(consumer) return sub(CONSUMERS, 1, -#'consumers' - 1) .. 'taken:' .. consumer end

-- Returns the position of the record's prefix in an element, 0 for a reference, or nil without a prefix of format 1.
local function prefix_at(s)
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

-- Returns an element or a reference without the flags of a trial.
local function untried(s)
  local p = prefix_at(s)
  if not p then return s end
  local flags, lapses, kills = state_of(s, p)
  local left = without(without(flags, TRIED), ALONE)
  return left == flags and s or with_state(s, p, left, lapses, kills)
end

-- Trials of suspects, by the same rules as in a store (`moves`). The hash has a field for each consumer that tries
-- suspects: '@' and the name of the consumer. Its value has these parts:
--   the length of the lease in ms
--   the last sign of life of the consumer's process, epoch ms
--   the numbers of the first and the last suspect
--   'd' (in doubt) if a suspect is tried alone and its lease has ended
-- The hash also has the fields `tried`, `hot`, `suspected` and `killed`, which a store has in `meta`.
local trials = { KEY = sub(CONSUMERS, 1, -#'consumers' - 1) .. 'trials', SILENT_LEASES = 4, STALE = 120000 }

function trials.of(consumer)
  local value = call('HGET', trials.KEY, '@' .. consumer)
  local lease, beat, first, last, doubt = string.match(value or '', '^(%d+) (%d+) (%d+) (%d+) ?(d?)$')
  return tonumber(lease), tonumber(beat), tonumber(first), tonumber(last), doubt
end

function trials.write(consumer, lease, beat, first, last, doubt)
  call('HSET', trials.KEY, '@' .. consumer, string.format('%d %.0f %.0f %.0f %s', lease, beat, first, last, doubt))
end

-- Returns how many elements with these numbers still have the flag of the trial.
function trials.size(consumer, first, last)
  local numbers, size = {}, 0
  for number = first, last do numbers[#numbers + 1] = text(number) end
  for _, element in ipairs(call('HMGET', taken_key(consumer), unpack(numbers))) do
    local p = element and prefix_at(element)
    if p and has(state_of(element, p), TRIED) then size = size + 1 end
  end
  return size
end

-- A consumer that tries a suspect alone may still hold it after the end of the lease. Returns the number of such a
-- suspect, and the time until which the consumer may hold it. Returns nil if there is none, or if the process has given
-- no sign of life for too long.
function trials.in_doubt(consumer)
  local lease, beat, first, last, doubt = trials.of(consumer)
  if not lease or first < last or math.abs(now - beat) >= trials.SILENT_LEASES * lease then return nil end
  if trials.size(consumer, first, last) == 0 then return nil end
  if doubt == '' then trials.write(consumer, lease, beat, first, last, 'd') end
  return first, math.min(beat + trials.SILENT_LEASES * lease, now + MAX_LEASE)
end

-- Records that the lease of a group has ended. The group then contains a killer.
function trials.note_death(consumer)
  local _, _, first, last = trials.of(consumer)
  if not first or first == last or call('HGET', trials.KEY, 'tried') == '0' then return end
  local size = trials.size(consumer, first, last)
  if size > 0 then call('HSET', trials.KEY, 'tried', 0, 'hot', size) end
end

-- Returns an element with the changes after the end of its lease. They count a lapse, or the end of the process that
-- tried the suspect alone.
function trials.after_lapse(consumer, s)
  local p = prefix_at(s)
  if not p then return s end
  local flags, lapses, kills = state_of(s, p)
  local is_tried, is_alone = has(flags, TRIED), has(flags, ALONE)
  if not is_tried then
    lapses = lapses + 1
    if lapses == SUSPECT_LAPSES then call('HSET', trials.KEY, 'suspected', text(now)) end
  elseif is_alone and consumer ~= ARGV[2] then -- The process that tried this suspect alone has ended.
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

-- Returns elements to the head of the list. changed(element) gives the element to push. The element with the highest
-- number is pushed first, so that the old order is restored. One script returns a bounded number of elements, and the
-- other elements stay taken.
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

-- Shortens leases that are too long, because the clock has stepped back. Live consumers renew their leases.
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
