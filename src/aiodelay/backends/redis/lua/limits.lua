-- limits: lanes that have limits. Each key of such a lane has a queue, the keys take turns, and the messages in flight
-- are counted. A limit follows the rules of core/limits.py.
--
--   limits           lane number -> the limits of the lane; 'step:' and lane number -> the next step of `requeue`;
--                    'claimed:' and lane number -> the last claim of the lane, or up to CLOCK_MS earlier
--   queues:<n>       prefix of the key, place u48 and member of `due` for each waiting message
--   turns:<n>        key that has waiting messages -> its ticket
--   inflight:<n>     id of each message in flight -> its key
--   running:<n>      prefix of the key and id of each message in flight; 's' and a member of `superseded` instead of the
--                    id, for a superseded claim
--   superseded:keys  member of `superseded` -> lane u16, body with the key and the address alone
--   marks:<n>        'k' and key, or 'w' for the whole lane -> the beginnings that a rate counts
--
-- The prefix of a key is its size u16 and the key. So the messages of a key are neighbours.
-- A ticket is the time since which the key waits, times TURNS, plus the number of the turn. A negative ticket belongs to
-- a key that must wait for the end of a message in flight. Its amount has the time at which the key was served last.
limits.ALL, limits.OF_SUPERSEDED = TAG .. 'limits', TAG .. 'superseded:keys'
limits.TURNS = 1024
local PARTS = 64
local AT_ONCE, BLOCK, CLOCK_MS = 1000, 32, 500
local lanes = {}

function limits.lane(n)
  local lane = lanes[n]
  if lane then return lane end
  local written, step, claimed = unpack(call('HMGET', limits.ALL, n, 'step:' .. n, 'claimed:' .. n))
  local known = written and cmsgpack.unpack(written) or {}
  lane = { n = n, by = known.by, each = known.each or {}, step = step, claimed = tonumber(claimed) or 0, keys = {},
    changed = {}, queued = {}, ended = 0, QUEUES = TAG .. 'queues:' .. n, TURNS = TAG .. 'turns:' .. n,
    INFLIGHT = TAG .. 'inflight:' .. n, RUNNING = TAG .. 'running:' .. n, MARKS = TAG .. 'marks:' .. n, is_begun = {} }
  lane.whole = { lane = lane, limit = known.whole or {}, field = 'w' }
  lanes[n] = lane
  counted.at_end = limits.finish
  return lane
end

function limits.key(lane, name)
  local key = lane.keys[name]
  if not key then
    key = { name = name, lane = lane, limit = lane.each, prefix = pack('>H', #name) .. name }
    lane.keys[name] = key
  end
  return key
end

-- --- what a limit counts, for the whole lane or a key ---------------------------------------------------------------

local function running(use)
  if not use.running then
    local set, first = use.lane.RUNNING, use.prefix
    use.running = first and call('ZLEXCOUNT', set, '[' .. first, '(' .. first .. '\255') or call('ZCARD', set)
  end
  return use.running
end

-- Forgets the numbers of messages in flight that this script has read.
function limits.count_again(lane)
  lane.whole.running = nil
  for _, key in pairs(lane.keys) do key.running = nil end
end

-- Returns the marks that the rate still counts: {time, number} each, oldest first.
local function counted_marks(use)
  if use.marks then return use.marks end
  use.field = use.field or 'k' .. use.name
  local written, span = call('HGET', use.lane.MARKS, use.field) or '', use.limit.span
  use.marks = {}
  for at = 1, #written, BEGINNING.SIZE do
    local time, number = unpack_bytes('>I6I4', written, at)
    if now - time < span and time - now < span then use.marks[#use.marks + 1] = { time, number } end
  end
  return use.marks
end

local function sum(list)
  local all = 0
  for _, mark in ipairs(list) do all = all + mark[2] end
  return all
end

-- Returns how many more messages may begin now.
function limits.room(use)
  local limit, left = use.limit, math.huge
  if limit.concurrency then left = limit.concurrency - running(use) end
  if limit.span then left = math.min(left, limit.most - sum(counted_marks(use))) end
  return math.max(left, 0)
end

-- Counts messages that a claim takes. If a limit has no concurrency, nobody needs the number of messages in flight.
local function begin(use, number)
  if use.running then use.running = use.running + number end
  local span = use.limit.span
  if not span then return end
  local list = counted_marks(use)
  local last = list[#list]
  if last and floor(last[1] * PARTS / span) == floor(now * PARTS / span) then
    last[1], last[2] = math.max(last[1], now), last[2] + number
  else
    list[#list + 1] = { now, number }
  end
  use.lane.is_begun[use] = true
end

-- Returns the time at which the rate has room again; nil if it has room now.
local function free_at(use)
  if not use.limit.span then return nil end
  local list = {}
  for i, mark in ipairs(counted_marks(use)) do list[i] = mark end
  table.sort(list, function(a, b) return a[1] < b[1] end)
  local used = sum(list)
  for _, mark in ipairs(list) do
    if used < use.limit.most then return nil end
    used = used - mark[2]
    if used < use.limit.most then return mark[1] + use.limit.span end
  end
  return nil
end

-- --- messages that enter and leave the queues ------------------------------------------------------------------------

local function touch(key)
  if not key.is_touched then
    key.is_touched = true
    key.lane.changed[#key.lane.changed + 1] = key
  end
end

-- Finds a new ticket for a key whose queue has changed in any way.
function limits.look_again(key)
  key.has_changed = true
  touch(key)
end

local function read_text(e, name)
  local s, at = e.body or e.value, e.body and 1 or e.body_at
  at = fields.value_at(s, at, name)
  if not at then return '' end
  local from, length = fields.blob(s, at)
  return sub(s, from, from + length - 1)
end

-- Returns the text of a field of a message, or '' if the body does not have the field or is unreadable.
local function text_of(e, name)
  local is_readable, text = pcall(read_text, e, name)
  return is_readable and text or ''
end

-- Returns the name of the key under which a message counts. A message whose body is unreadable has no key.
function limits.name_of(lane, e)
  if lane.by == 'lane' then return '' end
  local address = lane.by == 'address' and text_of(e, BODY.ADDRESS_BYTE) or ''
  return address ~= '' and address or text_of(e, BODY.KEY_BYTE)
end

local function write_queued(lane)
  if #lane.queued > 0 then
    call('ZADD', lane.QUEUES, unpack(lane.queued))
    lane.queued = {}
  end
end

local function enter(lane, key, name, place)
  local queued = lane.queued
  queued[#queued + 1], queued[#queued + 2] = 0, key.prefix .. u48(place) .. name
  if #queued >= AT_ONCE then write_queued(lane) end
  key.entered = math.min(key.entered or place, place)
  touch(key)
end

-- Adds a message that has entered its lane to the queue of its key.
function limits.enter(e)
  local lane = limits.lane(e.lane)
  enter(lane, limits.key(lane, limits.name_of(lane, e)), member(e), e.place)
end

-- Adds members of the lane to the queues. `scored` has members and places, in turn.
function limits.enter_all(n, scored)
  local lane = limits.lane(n)
  for from = 1, #scored, 2 * BLOCK do
    local ids, last = {}, math.min(from + 2 * BLOCK - 1, #scored)
    for i = from, last, 2 do ids[#ids + 1] = sub(scored[i], MEMBER.ID_FIRST) end
    for i, value in ipairs(call('HMGET', MSG, unpack(ids))) do
      local e, at = value and parse(ids[i], value), from + 2 * i - 2
      enter(lane, limits.key(lane, e and limits.name_of(lane, e) or ''), scored[at], tonumber(scored[at + 1]))
    end
  end
end

function limits.leave(e)
  local lane = limits.lane(e.lane)
  local key = limits.key(lane, limits.name_of(lane, e))
  write_queued(lane)
  call('ZREM', lane.QUEUES, key.prefix .. u48(e.place) .. member(e))
  limits.look_again(key)
end

-- Removes a member of queues:<n>.
function limits.drop(key, queued)
  call('ZREM', key.lane.QUEUES, queued)
  limits.look_again(key)
end

-- --- claims ----------------------------------------------------------------------------------------------------------

-- Counts messages of a key that a claim takes.
function limits.begin(key, number)
  begin(key, number)
  begin(key.lane.whole, number)
end

-- Records that a claim takes messages of the lane. Most claims write nothing.
function limits.note_claim(lane)
  if math.abs(now - lane.claimed) < CLOCK_MS then return end
  lane.claimed = now
  call('HSET', limits.ALL, 'claimed:' .. lane.n, text(now))
end

-- Returns true if the clock has stepped back since the last claim. It may miss a step of less than 2 * CLOCK_MS.
function limits.has_stepped_back(lane) return lane.claimed - now >= CLOCK_MS end

-- Records that messages are in flight. `keys` has the key of each id.
function limits.record(n, ids, keys)
  local lane, held, names = limits.lane(n), {}, {}
  for i, id in ipairs(ids) do
    held[#held + 1], held[#held + 2] = id, keys[i].name
    names[#names + 1], names[#names + 2] = 0, keys[i].prefix .. id
  end
  call('HSET', lane.INFLIGHT, unpack(held))
  call('ZADD', lane.RUNNING, unpack(names))
end

local function note_end(key)
  local whole = key.lane.whole
  if key.running then key.running = key.running - 1 end
  if whole.running then whole.running = whole.running - 1 end
  key.lane.ended, key.has_ended = key.lane.ended + 1, true
  touch(key)
end

-- Gives back the room of messages that are no longer in flight.
function limits.ended(n, ids)
  local lane, gone, names = limits.lane(n), {}, {}
  for i, name in ipairs(call('HMGET', lane.INFLIGHT, unpack(ids))) do
    if name then
      local key = limits.key(lane, name)
      gone[#gone + 1], names[#names + 1] = ids[i], key.prefix .. ids[i]
      note_end(key)
    end
  end
  if #gone > 0 then
    call('HDEL', lane.INFLIGHT, unpack(gone))
    call('ZREM', lane.RUNNING, unpack(names))
  end
end

-- Goes on counting the claim of a message that a command replaces.
function limits.supersede(e)
  local lane = limits.lane(e.lane)
  local of = call('HGET', lane.INFLIGHT, e.id)
  if of then
    call('HDEL', lane.INFLIGHT, e.id)
    call('ZREM', lane.RUNNING, limits.key(lane, of).prefix .. e.id)
  end
  limits.record_superseded(lane, e, u48(e.revision) .. e.id)
end

-- Counts a superseded claim under the key of `e`. `name` is its member of `superseded`.
function limits.record_superseded(lane, e, name)
  local key = limits.key(lane, limits.name_of(lane, e))
  local own = { [BODY.KEY] = text_of(e, BODY.KEY_BYTE), [BODY.ADDRESS] = text_of(e, BODY.ADDRESS_BYTE) }
  call('ZADD', lane.RUNNING, 0, key.prefix .. 's' .. name)
  call('HSET', limits.OF_SUPERSEDED, name, pack('>H', lane.n) .. cmsgpack.pack(own))
  return key
end

-- Gives back the room of a superseded claim. `name` is its member of `superseded`.
function limits.end_superseded(name)
  local written = call('HGET', limits.OF_SUPERSEDED, name)
  if not written then return end
  call('HDEL', limits.OF_SUPERSEDED, name)
  local n = unpack_bytes('>H', written)
  if not is_limited(n) then return end
  local lane = limits.lane(n)
  local key = limits.key(lane, limits.name_of(lane, { body = sub(written, OF_LANE.BODY_FIRST) }))
  call('ZREM', key.lane.RUNNING, key.prefix .. 's' .. name)
  note_end(key)
end

-- --- tickets ---------------------------------------------------------------------------------------------------------

-- Returns the place of the first message of the key, or nil.
function limits.first_place(key)
  local found = call('ZRANGEBYLEX', key.lane.QUEUES, '[' .. key.prefix, '(' .. key.prefix .. '\255', 'LIMIT', 0, 1)[1]
  return found and (unpack_bytes('>I6', found, #key.prefix + 1))
end

-- Returns true if the change of the key may change its ticket. A ticket `score` is '' if the key has none.
local function may_change(key, score)
  if key.has_changed then return true end
  if key.entered and (not score or (score >= 0 and floor(score / limits.TURNS) > key.entered)) then return true end
  return key.has_ended and score and score < 0
end

-- Returns the ticket of a key without the number of its turn.
local function ticket_at(key, place, served)
  if key.limit.concurrency and running(key) >= key.limit.concurrency then return -(served * limits.TURNS + 1) end
  return math.max(place, served, free_at(key) or 0) * limits.TURNS
end

-- Returns the new ticket of a key without the number of its turn; nil if the key has no message.
local function ticket_of(key, score)
  local place, served = limits.first_place(key), score and floor(math.abs(score) / limits.TURNS) or 0
  if not place then return nil end
  return ticket_at(key, place, served > now and 0 or served)
end

-- Returns the time of the first ticket of a lane, not before `from`, or nil.
function limits.first_ticket(lane, from)
  local least = text((from or 0) * limits.TURNS)
  local score = call('ZRANGEBYSCORE', lane.TURNS, least, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return score and floor(tonumber(score) / limits.TURNS)
end

local function note_ticket(lane, at, has_room)
  if heads[lane.n] == nil then heads[lane.n] = limits.first_ticket(lane) or false end
  if not earliest[lane.n] or at < earliest[lane.n] then earliest[lane.n] = at end
  if has_room then counted.has_room = true end
end

local function give_tickets(lane, changed, from, to)
  local names, given, gone, turn = {}, {}, {}, nil
  for i = from, to do names[#names + 1] = changed[i].name end
  for i, written in ipairs(call('ZMSCORE', lane.TURNS, unpack(names))) do
    local key, score = changed[from + i - 1], tonumber(written)
    if may_change(key, score) then
      local ticket = ticket_of(key, score)
      if not ticket then
        if score then gone[#gone + 1] = key.name end
      elseif ticket < 0 or not score or floor(score / limits.TURNS) * limits.TURNS ~= ticket then
        turn = turn or call('HINCRBY', META, 'turns', #names) - #names
        given[#given + 1] = ticket < 0 and ticket or ticket + (turn + i) % limits.TURNS
        given[#given + 1] = key.name
        if ticket >= 0 then note_ticket(lane, ticket / limits.TURNS, key.has_ended) end
      end
    end
    key.is_touched, key.has_changed, key.has_ended, key.entered = nil, nil, nil, nil
  end
  if #given > 0 then call('ZADD', lane.TURNS, unpack(given)) end
  if #gone > 0 then call('ZREM', lane.TURNS, unpack(gone)) end
end

-- Gives new tickets to keys whose messages a claim has taken.
function limits.serve(lane, keys)
  local given, gone, at = {}, {}, 0
  local turn = call('HINCRBY', META, 'turns', #keys) - #keys
  for i, key in ipairs(keys) do
    local place
    if key.taken == key.offered then place = key.next_place else place = limits.first_place(key) end
    local ticket = place and ticket_at(key, place, now)
    if ticket then
      given[at + 1], given[at + 2] = ticket < 0 and ticket or ticket + (turn + i) % limits.TURNS, key.name
      at = at + 2
    else
      gone[#gone + 1] = key.name
    end
  end
  if at > 0 then call('ZADD', lane.TURNS, unpack(given)) end
  if #gone > 0 then call('ZREM', lane.TURNS, unpack(gone)) end
end

-- If the limit of the whole lane was full and has room now, others may claim.
local function note_room_of_lane(lane)
  local most, ended = lane.whole.limit.concurrency, lane.ended
  lane.ended = 0
  if not most or ended == 0 then return end
  local left = running(lane.whole)
  local first = left < most and left + ended >= most and limits.first_ticket(lane)
  if first then
    heads[lane.n] = false
    note_ticket(lane, first, true)
  end
end

local function write_marks(lane)
  local written = {}
  for use in pairs(lane.is_begun) do
    local parts = {}
    for i, mark in ipairs(use.marks) do parts[i] = pack('>I6I4', mark[1], mark[2]) end
    written[#written + 1], written[#written + 2] = use.field, table.concat(parts)
  end
  lane.is_begun = {}
  if #written > 0 then call('HSET', lane.MARKS, unpack(written)) end
end

-- Writes the changes of a lane, and gives its keys their new tickets.
function limits.flush(lane)
  write_queued(lane)
  local changed = lane.changed
  lane.changed = {}
  for from = 1, #changed, AT_ONCE do give_tickets(lane, changed, from, math.min(from + AT_ONCE - 1, #changed)) end
  note_room_of_lane(lane)
  write_marks(lane)
end

-- Returns the time at which a limited lane may next have something to claim, apart from the ends of claims.
function limits.next_ms(n)
  if is_held(n) then return nil end
  local lane = limits.lane(n)
  limits.flush(lane)
  if lane.step then return now end
  if limits.room(lane.whole) == 0 then return free_at(lane.whole) end
  return limits.first_ticket(lane)
end

-- Lets other processes and idle processes look at a lane again.
function limits.call_others(n)
  heads[n], earliest[n] = false, now
  counted.has_room = true
end

function limits.finish()
  for _, lane in pairs(lanes) do limits.flush(lane) end
  if counted.has_room then next_sequence(false) end -- So the marks of the store change.
end
