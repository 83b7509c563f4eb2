-- taking: the common part of `take` (for lists and fan-out topics) and `take_log`.
local FIRST, MOST_MISSED, POLL, SEEN_EVERY, CHUNK = tonumber(ARGV[3]), 2000, 1000, 10000, topic.CHUNK
local MOST_ASIDE_BYTES, MOST_LAPSES = 8 * MOST_BYTES, tonumber(ARGV[9] or 255)
local most, most_bytes = math.min(tonumber(ARGV[4]), MOST), math.min(tonumber(ARGV[5]), MOST_BYTES)
local OWN = sub(CONSUMERS, 1, -#':consumers' - 1)
local STATE, LATER = OWN .. ':state', OWN .. ':later'
local p = CONTENT and topic.of(CONTENT)
local is_ordered = false

-- Returns the contents of entries of the list. The content of an element is the element itself. The content of a
-- reference is what the topic stores for it, or false if the topic has dropped it.
local function contents_of(entries)
  if not CONTENT then return entries end
  local contents, places, indexes = {}, {}, {}
  for i, entry in ipairs(entries) do
    contents[i] = entry
    if topic.is_reference(entry) then
      places[#places + 1], indexes[#indexes + 1] = i, string.match(entry, '^%d+')
    end
  end
  if #indexes > 0 then
    for i, content in ipairs(topic.contents(p, indexes)) do contents[places[i]] = content end
  end
  return contents
end

-- Returns the element to give to the consumer: the content, with the flags, lapses and kills of its entry, but without
-- the flag TRIED.
local function shown(entry, content)
  local at = prefix_at(entry)
  if not at then return entry end
  local flags, lapses, kills = state_of(entry, at)
  if at > 0 then return has(flags, TRIED) and with_state(entry, at, flags - TRIED, lapses, kills) or entry end
  flags, at = without(flags, TRIED), flags + lapses + kills > 0 and prefix_at(content)
  return at and with_state(content, at, state_of(content, at) + flags, lapses, kills) or content
end

local function taken_before()
  local numbers, entries, last = {}, {}, 0
  for i = 1, MOST do numbers[i] = text(FIRST + i - 1) end
  local taken = call('HMGET', TAKEN, unpack(numbers))
  for i = 1, MOST do
    if taken[i] then last = i end
  end
  for i = 1, last do
    local entry = taken[i]
    local content = entry and contents_of({ entry })[1]
    entries[i] = content and shown(entry, content)
    if entry and not content then
      call('HDEL', TAKEN, numbers[i])
      topic.release(p, { entry })
      topic.missed(p, sub(OWN, #p + #'@' + 1), 1)
    end
  end
  return { unpack(entries, 1, last) }
end

-- --- trials: the same rules as in a store, for the elements of one list or one consumer ----------------------------

local trial = { is_on = false, most = nil }

-- Returns the lapses and the kills of an entry. Returns 0 and 0 for an entry that its consumer will make a dead letter.
local function lapses_of(entry)
  local at = prefix_at(entry)
  if not at then return 0, 0 end
  local _, lapses, kills = state_of(entry, at)
  if kills >= KILLS_TO_DEATH then return 0, 0 end
  return lapses, kills
end

-- Returns the number of suspects that contain a killer, without the group of the last trial, which did not end its
-- process.
function trials.hot()
  local known = call('HMGET', trials.KEY, 'tried', 'hot')
  return math.max(tonumber(known[2] or 0) - tonumber(known[1] or 0), 0)
end

-- Returns the largest size of the next group. It is half of the suspects that contain a killer, or MOST if none is
-- known.
function trials.most()
  local hot = trials.hot()
  return hot > 0 and math.floor((hot + 1) / 2) or MOST
end

function trials.are_on()
  local known, are_on = call('HGETALL', trials.KEY), false
  for i = 1, #known, 2 do
    if byte(known[i]) == 64 then -- '@'
      local consumer = sub(known[i], #'@' + 1)
      local _, beat, first, last, doubt = trials.of(consumer)
      if math.abs(now - beat) >= trials.STALE or trials.size(consumer, first, last) == 0 then
        call('HDEL', trials.KEY, known[i])
      elseif doubt == '' then
        are_on = true
      end
    end
  end
  return are_on
end

-- Begins a trial of these entries. Returns the entries with the flags of a trial.
function trials.begin(entries)
  local _, kills = lapses_of(entries[1])
  local known = call('HMGET', trials.KEY, 'suspected', 'killed')
  local are_void = tonumber(known[1] or 0) > tonumber(known[2] or 0)
  if kills == 0 then call('HSET', trials.KEY, 'tried', #entries, 'hot', trials.hot()) end
  trials.write(ARGV[2], tonumber(ARGV[6]), now, FIRST, FIRST + #entries - 1, '')
  local tried = {}
  for i, entry in ipairs(entries) do
    local at = prefix_at(entry)
    local flags, lapses, own = state_of(entry, at)
    flags = without(without(flags, TRIED), ALONE) + TRIED + (#entries == 1 and ALONE or 0)
    tried[i] = with_state(entry, at, flags, lapses, are_void and 0 or own)
  end
  return tried
end

-- Returns true if the call may take this entry after it has taken `taken` entries. A call takes either suspects or
-- other entries. If a process ended while it tried a suspect alone, this suspect is tried alone again.
function trial.takes(entry, taken)
  local lapses, kills = lapses_of(entry)
  local is_suspect = lapses >= SUSPECT_LAPSES
  if taken == 0 then
    trial.is_on = is_suspect
    if is_suspect then
      trial.most = trial.most or (MOST_LAPSES < SUSPECT_LAPSES or trials.are_on()) and 0 or trials.most()
      if kills > 0 then trial.most = math.min(trial.most, 1) end
    end
  end
  if not trial.is_on then return lapses <= MOST_LAPSES and not is_suspect end
  return is_suspect and taken < trial.most and (taken == 0 or kills == 0)
end

-- --- the list ------------------------------------------------------------------------------------------------------

-- Returns the entries of the list after the first `leaving` entries, and their contents. After the end of the list, it
-- returns the next entries of the log, if there is a log.
local function next_entries(leaving, limit)
  local chunk = redis.pcall('LRANGE', LIST, leaving, leaving + limit - 1)
  if chunk.err then return chunk end
  if #chunk > 0 or not topic.ahead then return chunk, contents_of(chunk) end
  return topic.ahead(p, limit)
end

-- Finds the first entries that may be taken. Returns a table with these fields:
--   entries, contents  the entries and their contents
--   gone               the references whose content the topic has dropped
--   aside              the entries that the call skips; none if the consumer keeps order
--   leaving            the number of entries to remove from the head of the list, with the skipped entries
--   has_waiting        true if the call has found an entry that it may not take
local function first_entries()
  local head = { entries = {}, contents = {}, gone = {}, aside = {}, leaving = 0, has_waiting = false }
  local entries, aside, bytes, aside_bytes = head.entries, head.aside, 0, 0
  while #entries < most and head.leaving - #entries < MOST_MISSED and aside_bytes < MOST_ASIDE_BYTES do
    -- This number is an estimate from the average size of the entries so far.
    local fits = #entries > 0 and math.floor((most_bytes - bytes) / (bytes / #entries + 1)) or 1
    local limit = #aside > 0 and CHUNK or math.max(1, math.min(CHUNK, most - #entries, fits))
    local chunk, contents = next_entries(head.leaving, limit)
    if chunk.err then return chunk end
    if #chunk == 0 then break end
    for i, content in ipairs(contents) do
      if #entries == most then return head end
      if not content then
        head.gone[#head.gone + 1] = chunk[i]
      elseif trial.takes(chunk[i], #entries) then
        if #entries > 0 and bytes + #content > most_bytes then return head end
        entries[#entries + 1], head.contents[#entries + 1] = chunk[i], content
        bytes = bytes + #content
      else
        head.has_waiting = true
        if is_ordered or (trial.is_on and #entries > 0) then return head end
        aside[#aside + 1], aside_bytes = chunk[i], aside_bytes + #chunk[i]
      end
      head.leaving = head.leaving + 1
    end
  end
  return head
end

local function lease() call('ZADD', CONSUMERS, text(now + tonumber(ARGV[6])), ARGV[2]) end

-- Removes entries from the head of the list, and pushes the skipped entries back. Returns the reply to LTRIM.
local function behead(head)
  local trimmed = redis.pcall('LTRIM', LIST, head.leaving, -1)
  if trimmed.err or #head.aside == 0 then return trimmed end
  local back = {}
  for i = #head.aside, 1, -1 do back[#back + 1] = head.aside[i] end
  call('LPUSH', LIST, unpack(back))
  return trimmed
end

-- Takes elements. It first writes the lease and last trims the list. So if a step fails, no element is lost, and no
-- element is taken without a lease. Returns three values: the elements; true if the caller may take more at once; and
-- true if entries wait for a trial or for the end of one.
local function take()
  local head = first_entries()
  if head.err then return head end
  local entries, found, numbered = head.entries, {}, {}
  if #entries + #head.gone == 0 then return found, false, head.has_waiting end
  if trial.is_on and #entries > 0 then entries = trials.begin(entries) end
  for i, entry in ipairs(entries) do
    numbered[2 * i - 1], numbered[2 * i] = text(FIRST + i - 1), entry
    found[i] = (CONTENT or trial.is_on) and shown(entry, head.contents[i]) or entry
  end
  if #entries > 0 then
    lease()
    call('HSET', TAKEN, unpack(numbered))
  end
  if #head.gone > 0 then
    topic.missed(p, sub(OWN, #p + #'@' + 1), #head.gone)
    topic.release(p, head.gone)
  end
  if topic.ahead then topic.go_on(p, entries, head.leaving - call('LLEN', LIST)) end
  local trimmed = behead(head)
  if trimmed.err then
    for i = 1, #numbered, 2 do call('HDEL', TAKEN, numbered[i]) end
    leave_if_empty(ARGV[2])
    return trimmed
  end
  return found, #entries == 0, head.has_waiting
end

local function next_end()
  for i, value in ipairs(call('ZRANGE', CONSUMERS, 0, 1, 'WITHSCORES')) do
    if i % 2 == 1 and value ~= ARGV[2] then return call('ZSCORE', CONSUMERS, value) end
  end
  return ''
end

-- --- topics and logs ----------------------------------------------------------------------------------------------

-- Moves retries that are due to the head of the list. Returns true if there was such a retry.
local function bring_back()
  local due = call('ZRANGEBYSCORE', LATER, '-inf', text(now), 'LIMIT', 0, math.min(most, CHUNK))
  local bytes = 0
  for i = 1, #due do
    bytes = bytes + #due[i]
    if i > 1 and bytes > MOST_BYTES then
      due = { unpack(due, 1, i - 1) }
      break
    end
  end
  for i = #due, 1, -1 do call('LPUSH', LIST, sub(due[i], RETRY.ELEMENT_FIRST)) end
  if #due > 0 then call('ZREM', LATER, unpack(due)) end
  return #due > 0
end

local function next_later() return call('ZRANGE', LATER, 0, 0, 'WITHSCORES')[2] end

-- Returns '' if the consumer may take elements. Otherwise returns 'w' or 'u', which `take` describes, and the time at
-- which the consumer may next take elements.
local function withheld()
  if not topic.is_known(p, sub(OWN, #p + #'@' + 1)) then return 'u', now + POLL end
  if math.abs(now - tonumber(call('HGET', STATE, 'seen') or 0)) >= SEEN_EVERY then call('HSET', STATE, 'seen', text(now)) end
  local told, since = unpack(call('HMGET', STATE, 'told', 'since'))
  local is_current = (ARGV[10] or since) == since
  if is_current and tonumber(ARGV[8]) > tonumber(told or 0) then call('HSET', STATE, 'told', ARGV[8]) end
  if call('HEXISTS', STATE, 'fill') == 1 and not topic.fill(p, sub(OWN, #p + #'@' + 1)) then return 'w', now end
  is_ordered = call('HGET', STATE, 'ordered') == '1'
  if is_ordered and call('ZCARD', CONSUMERS) > 0 then return 'w', now + POLL end
  local has_retry = bring_back()
  local later = is_ordered and not has_retry and next_later()
  if later then return 'w', later end
  if is_ordered then most = math.min(most, 1) end
  return ''
end

-- --- the answer --------------------------------------------------------------------------------------------------

-- If the server is out of memory, a script may write only if its first command frees memory. This ZREM changes nothing,
-- but allows the later writes.
call('ZREM', CONSUMERS, '')
local elements, has_more, has_waiting, why, next_look = ARGV[7] == '1' and taken_before() or {}, false, false, '', ''
if #elements > 0 then
  lease()
else
  return_lapsed()
  if CONTENT then why, next_look = withheld() end
  if why == '' then
    elements, has_more, has_waiting = take()
    if elements.err then return elements end
    next_look = next_end()
    local later = CONTENT and next_later()
    if later and (next_look == '' or tonumber(later) < tonumber(next_look)) then next_look = later end
    if has_waiting and #elements == 0 then
      why = 'w'
      if next_look == '' or tonumber(next_look) > now + POLL then next_look = now + POLL end
    end
    if has_more then next_look = now end
  end
end
local counts = CONTENT and call('HMGET', STATE, 'missed', 'told', 'since') or {}
local answer = { text(now), next_look == '' and '' or text(next_look), call('HLEN', TAKEN), why, counts[1] or '0',
  counts[2] or '0', counts[3] or '' }
for i, element in ipairs(elements) do answer[7 + i] = element end
return answer
