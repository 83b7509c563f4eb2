-- rounds: the order in which a claim takes the messages of a limited lane. In each round, each key that has a ticket
-- offers its first messages.
local MOST_TICKETS = 1000
-- A claim of at least LARGE messages takes up to IN_TURN messages of a key in its turn. A key costs more than a message.
local LARGE, IN_TURN = 200, 4

-- Returns the next keys in turn, at most `limit`: first the keys with due tickets, then the keys
-- that this claim has served.
local function keys_in_turn(lane, round, limit)
  local keys = {}
  if limit >= LARGE then limit = math.ceil(limit / IN_TURN) end
  if not round.is_last then
    local last = text(now * limits.TURNS + limits.TURNS - 1)
    local names = call('ZRANGEBYSCORE', lane.TURNS, 0, last, 'LIMIT', round.read, limit)
    for i, name in ipairs(names) do keys[i] = limits.key(lane, name) end
    round.read = round.read + #names
    round.is_last = #names < limit or round.read >= MOST_TICKETS
  end
  while round.is_last and #keys < limit and round.served[round.at] do
    keys[#keys + 1] = round.served[round.at]
    round.at = round.at + 1
  end
  return keys
end

-- Reads the first messages of a key that the claim has not read yet, at most `most`. Returns how many there are.
local function read_offers(key, most)
  key.offers, key.kept = {}, key.kept or 0
  local wanted = math.min(most, limits.room(key))
  if wanted > 0 then
    local found = call('ZRANGEBYLEX', key.lane.QUEUES, '[' .. key.prefix, '(' .. key.prefix .. '\255', 'LIMIT',
      key.kept, wanted + 1)
    key.next_place = nil
    for i, name in ipairs(found) do
      local place = unpack_bytes('>I6', name, #key.prefix + 1)
      if i > wanted or place > now then
        key.next_place = place
        break
      end
      key.offers[i] = name
    end
  end
  return #key.offers
end

-- Lets keys offer messages in turn, at most `limit`. The keys that have more offer them in a later round.
local function offer(round, keys, limit)
  local names, queued, of, most = {}, {}, {}, 0
  local each = math.ceil(limit / #keys)
  for _, key in ipairs(keys) do
    most = math.max(most, read_offers(key, each))
    if #key.offers == 0 then limits.look_again(key) end
  end
  for i = 1, most do
    for _, key in ipairs(keys) do
      local offered = key.offers[i]
      if offered and #names < limit then
        queued[#queued + 1], of[#of + 1], key.offered = offered, key, (key.offered or 0) + 1
        names[#names + 1] = sub(offered, #key.prefix + QUEUED.MEMBER_FIRST)
      elseif offered then
        key.next_place = math.min(key.next_place or PLACED, (unpack_bytes('>I6', offered, #key.prefix + 1)))
      end
    end
  end
  for _, key in ipairs(keys) do
    if #key.offers > 0 and key.next_place and key.next_place <= now then round.served[#round.served + 1] = key end
  end
  return names, queued, of
end

-- Counts the messages that were taken since the last call.
local function count_taken(round)
  for _, key in ipairs(round.taken) do
    limits.begin(key, key.taken - key.counted)
    key.counted = key.taken
  end
  round.taken = {}
end

-- Returns the next messages of the lane in turn: their members of `due`, their members of `queues`, and their keys.
function rounds.next(n, limit)
  local lane = limits.lane(n)
  limits.flush(lane)
  lane.round = lane.round or { read = 0, served = {}, at = 1, taken = {}, keys = {} }
  count_taken(lane.round)
  limit = math.min(limit, limits.room(lane.whole))
  while limit > 0 do
    local keys = keys_in_turn(lane, lane.round, limit)
    if #keys == 0 then break end
    local names, queued, of = offer(lane.round, keys, limit)
    if #names > 0 then return names, queued, of end
  end
  return {}, {}, {}
end

function rounds.take(e)
  local key, round = e.key, e.key.lane.round
  if not key.taken then
    key.taken, key.counted = 0, 0
    round.keys[#round.keys + 1] = key
  end
  if key.taken == key.counted then round.taken[#round.taken + 1] = key end
  key.taken = key.taken + 1
end

-- Records that a claim has taken messages of a lane.
function rounds.lease(n, taken)
  local ids, keys, queued = {}, {}, {}
  for _, e in ipairs(taken) do
    if e.lane == n then ids[#ids + 1], keys[#keys + 1], queued[#queued + 1] = e.id, e.key, e.queued end
  end
  local lane = limits.lane(n)
  call('ZREM', lane.QUEUES, unpack(queued))
  limits.record(n, ids, keys)
  count_taken(lane.round)
  limits.serve(lane, lane.round.keys)
  limits.note_claim(lane)
end

-- Returns the time of the first ticket that lies ahead, or nil.
function rounds.behind(n)
  local lane = limits.lane(n)
  limits.flush(lane)
  return limits.first_ticket(lane, now + 1)
end
