-- claim: leases due messages. Each demand first gets an equal share. A second round gives the unused parts of the
-- shares to the other demands.
--@ base known record moves heads rounds requeue
-- ARGV[4] length of the leases, ms
-- ARGV[5] worker
-- ARGV[6] request id. A repetition of the request returns the messages of the first claim that still have its lease.
-- ARGV[7] '1' if the caller has already received an answer to this request. The script then leases no new messages.
-- ARGV[8] the most lapses that a claimed message may have
-- ARGV[9] incarnation of the worker, under which the claim is recorded; '' = others do not notice the worker's end
-- ARGV[10] '1' if the worker knows that the store holds a number for the incarnation
-- ARGV[11] number of lanes that the caller only watches, followed by their names
-- Then the number of lanes whose messages for lists in this slot the caller transfers, followed by their names. The
-- script leaves these messages in the lanes.
-- Then the demands, in the order of their turn: messages, bytes, number of lanes, names of the lanes.
-- Returns these values, in this order:
--   now
--   the times of the next possible claims from the demanded lanes, in the order of the arguments; '-' = the lane is
--     empty
--   the token
--   the numbers of the demanded lanes, in the order of the arguments; 0 = the lane does not exist; negative = the lane
--     has limits
--   the time of the next possible move in the watched lanes
--   the marks of the store, if the claim took nothing, and if only a change of the marks can make the two times earlier
--   the new number of the incarnation; 0 = it was registered before, or nothing was claimed; -1 = it was declared dead,
--     so nothing is claimed
--   then id and value of each message
-- A message in the most frequent form costs 1. Any other message takes twice as long.
local MOST_COST, OTHER_COST, MOST_PASSED = 500, 2, 100
local BLOCK = 32 -- The number of values to read in one call. More values could exceed the bytes of a claim.
local groups, lanes, numbers = {}, {}, {}
local SHARED_AT = 12 + tonumber(ARGV[11])
slot.MOST_LEFT = 32 -- Of each shared lane. A transfer removes these messages soon.
local messages, bytes, passed, cost = 0, 0, 0, 0
-- is_on: true if this claim takes only suspects. most: the largest number of suspects. aside: the number of messages
-- that the claim has skipped.
local trial = { is_on = false, most = nil, aside = 0, MOST_ASIDE = 2000, MOST_LAPSES = tonumber(ARGV[8]) }

local function read_demands()
  local shared, a = {}, SHARED_AT + 1 + tonumber(ARGV[SHARED_AT])
  for i = SHARED_AT + 1, a - 1 do shared[ARGV[i]] = true end
  while a <= #ARGV do
    local group = { most = tonumber(ARGV[a]), bytes = tonumber(ARGV[a + 1]), lanes = {}, taken = {}, size = 0,
      cost = 0 }
    for i = 1, tonumber(ARGV[a + 2]) do
      local n = known_lane(ARGV[a + 2 + i])
      numbers[#numbers + 1] = n and limited and is_limited(n) and -n or n or 0
      if n then
        local lane = { n = n, members = {}, ids = {}, values = {}, at = 1, kept = 0, taken = {}, rank = #groups + 1,
          left = 0, at_argument = #numbers }
        lane.is_over = is_held(n)
        lane.is_limited = limited and is_limited(n)
        lane.is_shared = shared[ARGV[a + 2 + i]] and not lane.is_limited
        group.lanes[#group.lanes + 1] = lane
        lanes[#lanes + 1] = lane
      end
    end
    if #group.lanes == 1 then group.lanes[1].is_alone = ARGV[2] == '0' and not any_holds() end
    groups[#groups + 1] = group
    a = a + 3 + tonumber(ARGV[a + 2])
  end
end

local function read_values(lane)
  local ids, values = lane.ids, lane.values
  local last = #ids > 0 and values[#ids] and #values[#ids] or MOST_BYTES
  local from, to = #ids + 1, math.min(#ids + math.min(BLOCK, math.max(1, floor(MOST_BYTES / last))), #lane.members)
  for i = from, to do ids[i] = sub(lane.members[i], MEMBER.ID_FIRST) end
  for i, value in ipairs(call('HMGET', MSG, unpack(ids, from, to))) do values[from + i - 1] = value end
end

-- Returns the next member of the lane, its id and its value.
local function next_member(lane, wanted)
  if lane.at > #lane.members then
    if lane.is_last then return nil end
    local limit = math.min(MOST_COST, math.max(16, wanted + 1))
    if lane.is_limited then
      lane.members, lane.queued, lane.keys = rounds.next(lane.n, limit)
    else
      lane.members = call('ZRANGEBYSCORE', due_key(lane.n), '-inf', text(now), 'LIMIT', lane.kept, limit)
    end
    lane.at, lane.ids, lane.values = 1, {}, {}
    lane.is_last = not lane.is_limited and #lane.members < limit
    if #lane.members == 0 then return nil end
  end
  local at = lane.at
  if at > #lane.ids then read_values(lane) end
  lane.at = at + 1
  return lane.members[at], lane.ids[at], lane.values[at]
end

-- Reads a message in the most frequent form: it is readable, has no flags, has never lapsed, and is at its due time.
-- This is several times faster than readable() and pass(). Returns nil for any other message.
local function as_most_are(lane, name, id, value)
  local version, flags = byte(value, VALUE.FORMAT_FIRST, VALUE.FLAGS_FIRST)
  if version ~= FORMAT or flags ~= 0 or byte(value, VALUE.LAPSES_FIRST) ~= 0 then return nil end
  if byte(value) >= VALUE.PLACED_BYTE then return nil end
  local sequence = sub(value, VALUE.SEQUENCE_FIRST, VALUE.SEQUENCE_LAST)
  if sub(name, MEMBER.SEQUENCE_FIRST, MEMBER.SEQUENCE_LAST) ~= sequence then return nil end
  local size = size_of(value, VALUE.BODY_FIRST)
  return size and { id = id, name = name, value = value, lane = lane.n, flags = 0, lapses = 0, size = size, cost = 1 }
end

-- Goes on to the next message of the lane. The present message stays in the lane. If the claim takes it, lease()
-- removes it.
local function keep(lane)
  if lane.is_limited then lane.first.key.kept = lane.first.key.kept + 1 end
  lane.kept, lane.first = lane.kept + 1, nil
end

-- Leaves the first message of a shared lane to the transfer if it is for a list in this slot.
function slot.leave(lane)
  local e = lane.first
  if not string.find(e.value, slot.NAME, 1, true) then return end -- This takes less time than to decode the record.
  if not slot.has(fields.address_of(e.body_at and e or parse(e.id, e.value))) then return end
  keep(lane)
  lane.left = lane.left + 1
  lane.is_over = lane.left >= slot.MOST_LEFT
end

-- Returns the first message of the lane that may be claimed. The message stays in the lane.
local function first_of(lane, wanted)
  while not lane.first and not lane.is_over do
    local name, id, value = next_member(lane, wanted)
    if not name or passed >= MOST_PASSED then
      lane.is_over = true
      return nil
    end
    local e = value and lane.is_alone and as_most_are(lane, name, id, value)
    if e then
      lane.first = e
    else
      e = readable(id, value)
      if pass(lane.n, due_key(lane.n), name, id, value, e) then
        passed = passed + 1
        if lane.is_limited then limits.drop(lane.keys[lane.at - 1], lane.queued[lane.at - 1]) end
      else
        e.cost, lane.first = OTHER_COST, e
      end
    end
    if lane.is_limited and lane.first then e.key, e.queued = lane.keys[lane.at - 1], lane.queued[lane.at - 1] end
    if lane.is_shared and lane.first then slot.leave(lane) end
  end
  return lane.first
end

local function first_due(group)
  if #group.lanes == 1 then return first_of(group.lanes[1], group.most - #group.taken) and group.lanes[1] end
  local found = nil
  for _, lane in ipairs(group.lanes) do
    local e = first_of(lane, group.most - #group.taken)
    if e and (not found or e.place < found.first.place
        or (e.place == found.first.place and e.sequence < found.first.sequence)) then
      found = lane
    end
  end
  return found
end

local function fits(size, group, share)
  if bytes + size > MOST_BYTES or group.size + size > share then return false end
  return #group.taken == 0 or group.size + size <= group.bytes
end

-- Returns true if this claim may take the message. A claim takes either suspects or other messages. If a process
-- ended while it tried a suspect alone, this suspect is tried alone again.
function trial.takes(e)
  local is_suspect = e.lapses >= SUSPECT_LAPSES
  if messages == 0 then
    trial.is_on = is_suspect
    if is_suspect then
      trial.most = trial.most or (trial.MOST_LAPSES < SUSPECT_LAPSES or trials.are_on()) and 0 or trials.most()
      if e.kills > 0 then trial.most = math.min(trial.most, 1) end
    end
  end
  if not trial.is_on then return e.lapses <= trial.MOST_LAPSES and not is_suspect end
  return is_suspect and messages < trial.most and (messages == 0 or e.kills == 0)
end

local function fill(group, parts)
  local share = math.max(1, floor(MOST_COST / parts))
  while #group.taken < group.most and group.cost < share and cost < MOST_COST do
    local lane = first_due(group)
    if not lane then return end
    local e = lane.first
    if not trial.takes(e) then
      trial.aside, lane.has_aside = trial.aside + 1, true
      if trial.aside > trial.MOST_ASIDE or (trial.is_on and messages > 0 and messages >= trial.most) then return end
      keep(lane)
    else
      local size = e.size
      if messages > 0 and not fits(size, group, floor(MOST_BYTES / parts)) then return end
      keep(lane)
      group.taken[#group.taken + 1] = e
      group.size, group.cost = group.size + size, group.cost + e.cost
      messages, bytes, cost = messages + 1, bytes + size, cost + e.cost
      if e.key then rounds.take(e) end
    end
  end
end

-- Takes the next steps of limited lanes whose queues are still being made.
local function make_ready()
  local has_ended = false
  for _, lane in ipairs(lanes) do
    if lane.is_limited then
      if not has_ended then superseded.forget_lapsed(LAPSED_AT_ONCE) end
      has_ended = true
      local of = limits.lane(lane.n)
      requeue.follow_clock(of)
      if of.step then requeue.step(of) end
      if requeue.is_counting(of) then lane.is_over = true end
    end
  end
end

local function take()
  for _, parts in ipairs({ #groups, 1 }) do
    for _, group in ipairs(groups) do fill(group, parts) end
  end
  local taken = {}
  for _, group in ipairs(groups) do
    for _, e in ipairs(group.taken) do taken[#taken + 1] = e end
  end
  return taken
end

local function lease(taken)
  local token = text(tokens.at(now + tonumber(ARGV[4]), call('HINCRBY', META, 'claims', 1)))
  local members, leases = {}, {}
  for i, e in ipairs(taken) do
    local n = e.lane
    if not members[n] then members[n], leases[n] = {}, {} end
    local names, tokens = members[n], leases[n]
    names[#names + 1] = e.name
    tokens[#tokens + 1] = token
    tokens[#tokens + 1] = e.id
    if e.flags ~= 0 and is_due_to_expire(e) then call('ZREM', LATE, e.id) end
    if ARGV[2] ~= '0' then note('claimed', e) end
  end
  for n, names in pairs(members) do
    call('ZREM', due_key(n), unpack(names))
    call('ZADD', leased_key(n), unpack(leases[n]))
    if limited and is_limited(n) then rounds.lease(n, taken) end
  end
  return token
end

-- Returns the messages that an earlier call has leased with this token, in the same order.
local function taken_before(token)
  local found = {}
  for _, lane in ipairs(lanes) do
    for _, id in ipairs(call('ZRANGEBYSCORE', leased_key(lane.n), token, token)) do
      local e = load(id)
      if e then
        e.rank = lane.rank
        found[#found + 1] = e
      end
    end
  end
  table.sort(found, function(a, b)
    if a.rank ~= b.rank then return a.rank < b.rank end
    if a.place ~= b.place then return a.place < b.place end
    return a.sequence < b.sequence
  end)
  return found
end

-- Returns the time at which a claim should read this lane again. This is the place of the first message behind the
-- skipped suspects, or the time at which a trial of suspects may begin, whichever is earlier.
function trial.behind(lane)
  if lane.first then return now end
  if lane.is_limited then return sooner(now + trials.FIRST, rounds.behind(lane.n)) end
  local next = call('ZRANGEBYSCORE', due_key(lane.n), '(' .. text(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return sooner(now + trials.FIRST, tonumber(next))
end

local function next_look(lane)
  if lane.left > 0 and lane.is_over then return slot.next(lane.n) end
  if lane.has_aside and not (trial.is_on and messages > 0) then
    return sooner(trial.behind(lane), tokens.next_end(lane.n))
  end
  return next_claim(lane.n, MOST_PASSED)
end

local function next_looks()
  local own, watched = {}, nil
  for i = 1, #numbers do own[i] = '-' end
  for _, lane in ipairs(lanes) do
    local next = next_look(lane)
    if next then own[lane.at_argument] = text(next) end
  end
  for a = 12, SHARED_AT - 1 do
    local n = known_lane(ARGV[a])
    if n then watched = sooner(watched, next_move(n, MOST_PASSED)) end
  end
  return table.concat(own, ' '), watched and text(watched) or ''
end

read_demands()
local request_key = TAG .. 'req:' .. ARGV[5]
local token, request = string.match(call('GET', request_key) or '', '^(%d+) (.*)$')
local taken, number = {}, 0

-- Records the claims under the incarnation of the worker.
local function hold()
  if ARGV[9] == '' or #taken == 0 then return end
  local held = {}
  for _, e in ipairs(taken) do held[e.lane] = { [token] = true } end
  number = pulses.hold(ARGV[9], ARGV[10], held)
end

if ARGV[9] ~= '' and not pulses.is_open(ARGV[9], ARGV[10]) then
  number = pulses.DEAD
elseif request == ARGV[6] then
  taken = taken_before(token)
  hold()
elseif ARGV[7] ~= '1' then
  local left = LAPSED_AT_ONCE
  for _, lane in ipairs(lanes) do left = left - lapsing.return_lapsed(lane.n, left) end
  if limited then make_ready() end
  taken = take()
  if #taken > 0 then
    open_gate()
    if trial.is_on then trials.begin(taken, ARGV[4], ARGV[5]) end
    token = lease(taken)
    call('SET', request_key, token .. ' ' .. ARGV[6], 'PX', 2 * MAX_LEASE)
    hold()
  end
end
-- Messages that wait beside their lanes, and suspects, may return to their lanes although the marks stay the same.
local function marks_that_hold()
  if #taken > 0 or number == pulses.DEAD or any_holds() or call('EXISTS', PARKED, trials.KEY) > 0 then return {} end
  return marks()
end

local own, watched = next_looks()
local answer = { text(now), own, token or '', table.concat(numbers, ' '), watched, marks_that_hold(), number }
for _, e in ipairs(taken) do
  answer[#answer + 1] = e.id
  answer[#answer + 1] = e.value
end
finish()
return answer
