-- range: names messages by place, or dead letters by time; writes nothing.
--@ base record memory moves
-- ARGV[4] 'graves', or 'lanes'
-- ARGV[5] everything at this ms as well, '' = nothing more
-- ARGV[6], ARGV[7] from and to, as ZRANGEBYSCORE takes them
-- ARGV[8] so many of each set, and all that stand at the ms of the last
-- From ARGV[9] on: lanes; none = all.
-- Returns now, then id (or key in `dead`) and ms of each, in no order.
local answer = { text(now) }
local FROM, TO, LIMIT = ARGV[6], ARGV[7], tonumber(ARGV[8])

local function add(found, skips)
  for i = 1, #found, 2 do
    answer[#answer + 1] = sub(found[i], skips)
    answer[#answer + 1] = found[i + 1]
  end
end

local function add_page(key, skips)
  if ARGV[5] ~= '' then add(call('ZRANGEBYSCORE', key, ARGV[5], ARGV[5], 'WITHSCORES'), skips) end
  local found = call('ZRANGEBYSCORE', key, FROM, TO, 'WITHSCORES', 'LIMIT', 0, LIMIT)
  if #found < 2 * LIMIT then return add(found, skips) end
  local last = found[#found]
  while #found > 0 and found[#found] == last do found[#found], found[#found - 1] = nil, nil end
  add(found, skips)
  add(call('ZRANGEBYSCORE', key, last, last, 'WITHSCORES'), skips)
end

local function is_within(place)
  local from, to = string.match(FROM, '^%(?(.*)$'), string.match(TO, '^%(?(.*)$')
  if ARGV[5] ~= '' and place == tonumber(ARGV[5]) then return true end
  if FROM ~= '-inf' and (place < tonumber(from) or (byte(FROM) == 40 and place == tonumber(from))) then return false end
  return TO == '+inf' or place < tonumber(to)
end

local function add_leased(n)
  for _, id in ipairs(call('ZRANGE', leased_key(n), 0, -1)) do
    local e = load(id)
    if e and is_within(e.place) then
      answer[#answer + 1] = id
      answer[#answer + 1] = text(e.place)
    end
  end
end

if ARGV[4] == 'graves' then
  add_page(GRAVES, 1)
  return answer
end
local names = {}
for a = 9, #ARGV do names[#names + 1] = ARGV[a] end
if #names == 0 then names = call('HKEYS', LANES) end
local wanted = {}
for _, name in ipairs(names) do
  local n = known_lane(name)
  if n then
    wanted[text(n)] = true
    add_page(due_key(n), 7)
    add_leased(n)
  end
end
for _, name in ipairs(call('SMEMBERS', PARKED)) do
  if wanted[string.match(name, '^(%d+):')] then add_page(TAG .. 'parked:' .. name, 7) end
end
return answer
