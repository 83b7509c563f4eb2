-- limited_keys: lists keys of a limited lane that have messages waiting or in flight. It writes nothing.
--@ base record moves
-- ARGV[4] lane
-- ARGV[5] 'turns' for keys with waiting messages, 'running' for keys with messages in flight, 'key' for one key
-- ARGV[6] for 'turns' the cursor, 0 at first; for 'running' the last key of the previous call; for 'key' the key
-- Returns now, the next ARGV[6] ('' = none), the messages in flight of the whole lane, the marks of the lane, then for
-- each key: its name, its messages in flight, its due messages that wait, the place of its first message that waits
-- ('' = none), and its marks.
local AT_ONCE = 250
local n = known_lane(ARGV[4])
if not n or not limited or not is_limited(n) then return { text(now), '', 0, '' } end
local lane = limits.lane(n)
local answer = { text(now), '', call('ZCARD', lane.RUNNING), call('HGET', lane.MARKS, 'w') or '' }

local function add(name)
  local key = limits.key(lane, name)
  local first, place = key.prefix, limits.first_place(key)
  answer[#answer + 1] = name
  answer[#answer + 1] = call('ZLEXCOUNT', lane.RUNNING, '[' .. first, '(' .. first .. '\255')
  answer[#answer + 1] = call('ZLEXCOUNT', lane.QUEUES, '[' .. first, '(' .. first .. u48(now + 1))
  answer[#answer + 1] = place and text(place) or ''
  answer[#answer + 1] = call('HGET', lane.MARKS, 'k' .. name) or ''
end

if ARGV[5] == 'key' then
  add(ARGV[6])
elseif ARGV[5] == 'turns' then
  local after, found = unpack(call('ZSCAN', lane.TURNS, ARGV[6], 'COUNT', AT_ONCE))
  for i = 1, #found, 2 do add(found[i]) end
  answer[2] = after ~= '0' and after or ''
else
  local from = ARGV[6] == '' and '-' or '(' .. limits.key(lane, ARGV[6]).prefix .. '\255'
  for _ = 1, AT_ONCE do
    local name = call('ZRANGEBYLEX', lane.RUNNING, from, '+', 'LIMIT', 0, 1)[1]
    if not name then return answer end
    local key = sub(name, SIZED_KEY.KEY_FIRST, SIZED_KEY.KEY_OFFSET + unpack_bytes('>H', name))
    add(key)
    from = '(' .. limits.key(lane, key).prefix .. '\255'
    answer[2] = key
  end
end
return answer
