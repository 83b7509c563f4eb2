-- taking: moves elements to what a consumer has taken; what `take`, of lists and fan-outs, and `take_log` have in common.
local FIRST, MOST_MISSED, POLL, SEEN_EVERY, CHUNK = tonumber(ARGV[3]), 2000, 1000, 10000, topic.CHUNK
local most, most_bytes = math.min(tonumber(ARGV[4]), MOST), math.min(tonumber(ARGV[5]), MOST_BYTES)
local OWN = sub(CONSUMERS, 1, -#':consumers' - 1)
local STATE, LATER = OWN .. ':state', OWN .. ':later'
local p = CONTENT and topic.of(CONTENT)

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

local function shown(entry, content) -- a content, with the state of the reference to it
  if not CONTENT or not topic.is_reference(entry) then return entry end
  local flags, lapses, kills = state_of(entry, 0)
  local at = flags + lapses + kills > 0 and prefix_at(content)
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

-- Returns the element as it is taken; nil if it is to be taken alone, and others were taken before it.
local function as_taken(element, taken)
  local at = prefix_at(element)
  if not at then return element end
  local flags, lapses, kills = state_of(element, at)
  if lapses < SUSPECT_LAPSES or kills >= KILLS_TO_DEATH then return element end
  if taken > 0 then return nil end
  return with_state(element, at, is_alone(flags) and flags or flags + ALONE, lapses, kills), true
end

-- Returns entries behind so many of the list, and what they stand for; behind the last, what a log has ahead.
local function next_entries(leaving, limit)
  local chunk = redis.pcall('LRANGE', LIST, leaving, leaving + limit - 1)
  if chunk.err then return chunk end
  if #chunk > 0 or not topic.ahead then return chunk, contents_of(chunk) end
  return topic.ahead(p, limit)
end

-- Returns entries as they are taken, what they stand for, those that stand for nothing, and how many leave with them.
local function first_entries()
  local entries, found, gone, leaving, bytes = {}, {}, {}, 0, 0
  while #found < most and leaving - #found < MOST_MISSED do
    local fits = #found > 0 and math.floor((most_bytes - bytes) / (bytes / #found + 1)) or 1 -- were all of a size
    local limit = math.max(1, math.min(CHUNK, most - #found, fits))
    local chunk, contents = next_entries(leaving, limit)
    if chunk.err then return chunk end
    if #chunk == 0 then break end
    for i, content in ipairs(contents) do
      if content then
        local taken, alone = as_taken(chunk[i], #found)
        if not taken or (#found > 0 and bytes + #content > most_bytes) then return entries, found, gone, leaving end
        entries[#entries + 1], found[#found + 1] = taken, shown(taken, content)
        bytes = bytes + #content
        if alone then return entries, found, gone, leaving + 1 end
      else
        gone[#gone + 1] = chunk[i]
      end
      leaving = leaving + 1
    end
  end
  return entries, found, gone, leaving
end

local function lease() call('ZADD', CONSUMERS, text(now + tonumber(ARGV[6])), ARGV[2]) end

local function take() -- the lease first, the list last: whatever fails, no element is nowhere, and none without a lease
  local entries, found, gone, leaving = first_entries()
  if entries.err then return entries end
  local numbered = {}
  for i, entry in ipairs(entries) do
    numbered[2 * i - 1], numbered[2 * i] = text(FIRST + i - 1), entry
  end
  if #entries > 0 then
    lease()
    call('HSET', TAKEN, unpack(numbered))
  end
  if #gone > 0 then
    topic.missed(p, sub(OWN, #p + #'@' + 1), #gone)
    topic.release(p, gone)
  end
  if topic.ahead then topic.go_on(p, entries, leaving - call('LLEN', LIST)) end
  local trimmed = leaving > 0 and redis.pcall('LTRIM', LIST, leaving, -1)
  if trimmed and trimmed.err then
    for i = 1, #numbered, 2 do call('HDEL', TAKEN, numbered[i]) end
    leave_if_empty(ARGV[2])
    return trimmed
  end
  return found, leaving
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
  local is_ordered = call('HGET', STATE, 'ordered') == '1'
  if is_ordered and call('ZCARD', CONSUMERS) > 0 then return 'w', now + POLL end
  local has_retry = bring_back()
  local later = is_ordered and not has_retry and next_later()
  if later then return 'w', later end
  if is_ordered then most = math.min(most, 1) end
  return ''
end

-- --- the answer --------------------------------------------------------------------------------------------------

call('ZREM', CONSUMERS, '') -- under OOM a script may write only if its first write frees memory
local elements, leaving, why, next_look = ARGV[7] == '1' and taken_before() or {}, 0, '', ''
if #elements > 0 then
  lease()
else
  return_lapsed()
  if CONTENT then why, next_look = withheld() end
  if why == '' then
    elements, leaving = take()
    if elements.err then return elements end
    next_look = next_end()
    local later = CONTENT and next_later()
    if later and (next_look == '' or tonumber(later) < tonumber(next_look)) then next_look = later end
    if leaving > #elements and #elements == 0 then next_look = now end
  end
end
local counts = CONTENT and call('HMGET', STATE, 'missed', 'told') or {}
local answer = { text(now), next_look == '' and '' or text(next_look), call('HLEN', TAKEN), why, counts[1] or '0', counts[2] or '0' }
for i, element in ipairs(elements) do answer[6 + i] = element end
return answer
