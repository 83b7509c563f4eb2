-- range: lists the ids of messages by place, or dead letters by time. It reads a bounded part, and writes nothing.
--@ base record moves
-- ARGV[4] 'lanes' = messages, 'graves' = dead letters, 'left' = the rest of an earlier answer
-- ARGV[5] a time in ms. The script also lists all members with this time. '' = none
-- ARGV[6], ARGV[7] the first and the last ms, in the form of ZRANGEBYSCORE
-- ARGV[8] the number of members to list of each set. The script also lists the other members that have the same ms as
--   the last member.
-- From ARGV[9] on: names of lanes (none = all lanes); or for 'left', the rest of an earlier answer.
-- Returns now, {the rest: set, ms, where to continue, ...}, then the id of each message, or the field name in `dead` of
-- each dead letter, each with its ms. They are in no order.
--
-- Race: claims between two calls remove the first of the members that have the same ms. So the script reads these
-- members from the last to the first, and misses none.
local left = {}
local answer = { text(now), left }
local FROM, TO, LIMIT = ARGV[6], ARGV[7], tonumber(ARGV[8])
local MOST = 500
local unread, bytes = MOST, 0

local function leave(set, ms, at)
  left[#left + 1], left[#left + 2], left[#left + 3] = set, ms, at
end

local function add(set, found)
  local first = set == 'graves' and 1 or MEMBER.ID_FIRST
  for i = 1, #found, 2 do
    answer[#answer + 1] = sub(found[i], first)
    answer[#answer + 1] = found[i + 1]
  end
  unread = unread - #found / 2
end

local function add_tie(set, ms, read)
  local key = TAG .. set
  local ends, count = call('ZCOUNT', key, '-inf', ms) - read, call('ZCOUNT', key, ms, ms) - read
  local n = math.max(math.min(count, unread), 0)
  if n > 0 then add(set, call('ZRANGE', key, ends - n, ends - 1, 'WITHSCORES')) end
  if n < count then leave(set, ms, text(read + n)) end
end

local function add_page(set)
  if unread <= 0 then return leave(set, '', '') end
  if ARGV[5] ~= '' then add_tie(set, ARGV[5], 0) end
  local found = call('ZRANGEBYSCORE', TAG .. set, FROM, TO, 'WITHSCORES', 'LIMIT', 0, LIMIT)
  if #found < 2 * LIMIT then return add(set, found) end
  local last = found[#found]
  while #found > 0 and found[#found] == last do found[#found], found[#found - 1] = nil, nil end
  add(set, found)
  add_tie(set, last, 0)
end

local function is_within(place)
  local from, to = string.match(FROM, '^%(?(.*)$'), string.match(TO, '^%(?(.*)$')
  if ARGV[5] ~= '' and place == tonumber(ARGV[5]) then return true end
  if FROM ~= '-inf' and (place < tonumber(from) or (byte(FROM) == 40 and place == tonumber(from))) then return false end
  return TO == '+inf' or place < tonumber(to)
end

-- Lists the leased messages of a lane. The messages of one claim have the same token, so one call lists them all.
local function add_leased(set, token)
  local from = token == '' and '-inf' or '(' .. token
  local leased = call('ZRANGEBYSCORE', TAG .. set, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 2 * MOST)
  for i = 1, #leased, 2 do
    if (unread <= 0 or bytes >= MOST_BYTES) and leased[i + 1] ~= token then return leave(set, '', token) end
    token, unread = leased[i + 1], unread - 1
    local e = load(leased[i])
    bytes = bytes + (e and #e.value or 0)
    if e and is_within(e.place) then
      answer[#answer + 1] = leased[i]
      answer[#answer + 1] = text(e.place)
    end
  end
end

local function add_lanes()
  local names = {}
  for a = 9, #ARGV do names[#names + 1] = ARGV[a] end
  if #names == 0 then names = call('HKEYS', LANES) end
  local wanted = {}
  for _, name in ipairs(names) do
    local n = known_lane(name)
    if n then
      wanted[text(n)] = true
      add_page('due:' .. n)
      add_leased('leased:' .. n, '')
    end
  end
  for _, name in ipairs(call('SMEMBERS', PARKED)) do
    if wanted[string.match(name, '^(%d+):')] then add_page('parked:' .. name) end
  end
end

local function add_left()
  for a = 9, #ARGV, 3 do
    local set, ms, at = ARGV[a], ARGV[a + 1], ARGV[a + 2]
    if sub(set, 1, #'leased:') == 'leased:' then
      add_leased(set, at)
    elseif ms == '' then
      add_page(set)
    else
      add_tie(set, ms, tonumber(at))
    end
  end
end

if ARGV[4] == 'graves' then
  add_page('graves')
elseif ARGV[4] == 'lanes' then
  add_lanes()
else
  add_left()
end
return answer
