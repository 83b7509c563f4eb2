-- taking: moves elements to what a consumer has taken; what `take`, of lists and fan-outs, and `take_log` have in common.
local FIRST, MOST_MISSED, POLL, SEEN_EVERY, CHUNK = tonumber(ARGV[3]), 2000, 1000, 10000, topic.CHUNK
local MOST_ASIDE_BYTES, MOST_LAPSES = 8 * MOST_BYTES, tonumber(ARGV[9] or 255)
local most, most_bytes = math.min(tonumber(ARGV[4]), MOST), math.min(tonumber(ARGV[5]), MOST_BYTES)
local OWN = sub(CONSUMERS, 1, -#':consumers' - 1)
local STATE, LATER = OWN .. ':state', OWN .. ':later'
local p = CONTENT and topic.of(CONTENT)
local is_ordered = false

-- Returns what entries stand for; false for a reference to what is kept no more.
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

local function shown(entry, content) -- a content, with the state of the reference to it; nobody is told what is tried
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

-- --- trials: the rules of a store, for what one list or one consumer has -------------------------------------------

local trial = { is_on = false, most = nil }

local function lapses_of(entry) -- and kills; those of what is given up, whoever takes it, do not count
  local at = prefix_at(entry)
  if not at then return 0, 0 end
  local _, lapses, kills = state_of(entry, at)
  if kills >= KILLS_TO_DEATH then return 0, 0 end
  return lapses, kills
end

function trials.hot() -- the suspects that hold a killer, without the group that came through the last trial
  local known = call('HMGET', trials.KEY, 'tried', 'hot')
  return math.max(tonumber(known[2] or 0) - tonumber(known[1] or 0), 0)
end

function trials.most() -- half of the suspects that hold a killer, or all if none is known to
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

-- Returns the entries of a trial, each with the flags of a tried element.
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

-- Says whether an entry joins so many that were taken. A suspect that has ended a process alone is tried alone again.
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

-- Returns entries behind so many of the list, and what they stand for; behind the last, what a log has ahead.
local function next_entries(leaving, limit)
  local chunk = redis.pcall('LRANGE', LIST, leaving, leaving + limit - 1)
  if chunk.err then return chunk end
  if #chunk > 0 or not topic.ahead then return chunk, contents_of(chunk) end
  return topic.ahead(p, limit)
end

-- Finds the first entries that may be taken: `entries`, and what they stand for, `contents`. `gone` stand for nothing, and
-- `aside` are stepped over, unless the consumer takes all in order. So many are `leaving` the head, those aside as well.
local function first_entries()
  local head = { entries = {}, contents = {}, gone = {}, aside = {}, leaving = 0, has_waiting = false }
  local entries, aside, bytes, aside_bytes = head.entries, head.aside, 0, 0
  while #entries < most and head.leaving - #entries < MOST_MISSED and aside_bytes < MOST_ASIDE_BYTES do
    local fits = #entries > 0 and math.floor((most_bytes - bytes) / (bytes / #entries + 1)) or 1 -- were all of a size
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

local function behead(head) -- returns the answer of LTRIM; what was stepped over stands at the head of the list again
  local trimmed = redis.pcall('LTRIM', LIST, head.leaving, -1)
  if trimmed.err or #head.aside == 0 then return trimmed end
  local back = {}
  for i = #head.aside, 1, -1 do back[#back + 1] = head.aside[i] end
  call('LPUSH', LIST, unpack(back))
  return trimmed
end

-- The lease first, the list last: whatever fails, no element is nowhere, and none without a lease. Returns what was taken,
-- whether more of the list may be taken at once, and whether some of it waits for a trial or for the end of one.
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

-- --- of a topic ---------------------------------------------------------------------------------------------------

local function bring_back() -- retries that are due now; says whether there were any
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

-- Says whether nothing may be taken now, and when that may be otherwise.
local function withheld()
  if not topic.is_known(p, sub(OWN, #p + #'@' + 1)) then return 'u', now + POLL end
  if math.abs(now - tonumber(call('HGET', STATE, 'seen') or 0)) >= SEEN_EVERY then call('HSET', STATE, 'seen', text(now)) end
  if tonumber(ARGV[8]) > tonumber(call('HGET', STATE, 'told') or 0) then call('HSET', STATE, 'told', ARGV[8]) end
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

call('ZREM', CONSUMERS, '') -- under OOM a script may write only if its first write frees memory
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
local counts = CONTENT and call('HMGET', STATE, 'missed', 'told') or {}
local answer = { text(now), next_look == '' and '' or text(next_look), call('HLEN', TAKEN), why, counts[1] or '0', counts[2] or '0' }
for i, element in ipairs(elements) do answer[6 + i] = element end
return answer
