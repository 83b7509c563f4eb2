-- take: moves elements from a list's head to what a consumer has taken; they are its own until its lease ends.
--@ taken
-- ARGV[3] number of the first element
-- ARGV[4] most elements, ARGV[5] most bytes; one larger element is taken alone
-- ARGV[6] how long the lease lasts, ms
-- ARGV[7] '1' if a call with this first number was made before: what it took is given again
-- Returns now, when the lease of another consumer ends ('' = there is none), how many the consumer holds with what was
-- taken, then elements; nil in the place of one that
-- was taken before and has ended.
local FIRST, CHUNK = tonumber(ARGV[3]), 32
local most, most_bytes = math.min(tonumber(ARGV[4]), MOST), math.min(tonumber(ARGV[5]), MOST_BYTES)

local function taken_before()
  local numbers, found, last = {}, {}, 0
  for i = 1, MOST do numbers[i] = text(FIRST + i - 1) end
  for i, element in ipairs(call('HMGET', TAKEN, unpack(numbers))) do
    found[i] = element
    if element then last = i end
  end
  return { unpack(found, 1, last) }
end

-- Returns the element as it is taken; nil if it is to be taken alone, and others were taken before it.
local function as_taken(element, taken)
  local p = prefix_at(element)
  if not p then return element end
  local flags, lapses, kills = state_of(element, p)
  if lapses < SUSPECT_LAPSES or kills >= KILLS_TO_DEATH then return element end
  if taken > 0 then return nil end
  return with_state(element, p, is_alone(flags) and flags or flags + ALONE, lapses, kills), true
end

local function first_elements()
  local found, bytes = {}, 0
  while #found < most do
    local fits = #found > 0 and math.floor((most_bytes - bytes) / (bytes / #found + 1)) or 1 -- were all of a size
    local limit = math.max(1, math.min(CHUNK, most - #found, fits))
    local chunk = redis.pcall('LRANGE', LIST, #found, #found + limit - 1)
    if chunk.err then return chunk end
    if #chunk == 0 then return found end
    for _, element in ipairs(chunk) do
      local taken, alone = as_taken(element, #found)
      if not taken or (#found > 0 and bytes + #element > most_bytes) then return found end
      found[#found + 1], bytes = taken, bytes + #element
      if alone then return found end
    end
  end
  return found
end

local function lease() call('ZADD', CONSUMERS, text(now + tonumber(ARGV[6])), ARGV[2]) end

local function take() -- the lease first, the list last: whatever fails, no element is nowhere, and none without a lease
  local elements, numbered = first_elements(), {}
  for i, element in ipairs(elements) do
    numbered[2 * i - 1], numbered[2 * i] = text(FIRST + i - 1), element
  end
  if #elements == 0 then return elements end
  lease()
  call('HSET', TAKEN, unpack(numbered))
  local trimmed = redis.pcall('LTRIM', LIST, #elements, -1)
  if trimmed.err then
    for i = 1, #numbered, 2 do call('HDEL', TAKEN, numbered[i]) end
    leave_if_empty(ARGV[2])
    return trimmed
  end
  return elements
end

local function next_end()
  for i, value in ipairs(call('ZRANGE', CONSUMERS, 0, 1, 'WITHSCORES')) do
    if i % 2 == 1 and value ~= ARGV[2] then return call('ZSCORE', CONSUMERS, value) end
  end
  return ''
end

call('ZREM', CONSUMERS, '') -- under OOM a script may write only if its first write frees memory
local elements = ARGV[7] == '1' and taken_before() or {}
if #elements > 0 then
  lease()
else
  return_lapsed()
  elements = take()
  if elements.err then return elements end
end
local answer = { text(now), next_end(), call('HLEN', TAKEN) }
for i, element in ipairs(elements) do answer[3 + i] = element end
return answer
