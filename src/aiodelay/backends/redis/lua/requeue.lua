-- requeue: makes the queues and counts of a limited lane agree with its messages, in bounded steps. This is necessary
-- after a change of limits, and after older versions of aiodelay or other programs have changed the lane.
local AT_ONCE, MOST_FIELDS, MOST_SWEPT = 250, 100, 5
local ORDER = { 'inflight', 'running', 'leased', 'superseded', 'due', 'queues', 'turns' }
-- While these steps are under way, the counts may be too low.
local COUNTS = { inflight = true, running = true, leased = true, superseded = true }
local SCANS = { inflight = 'HSCAN' }
local agree = {}

-- Forgets messages that are no longer in flight.
function agree.inflight(lane, found)
  local gone = {}
  for i = 1, #found, 2 do
    local id = found[i]
    if call('ZSCORE', leased_key(lane.n), id) then
      call('ZADD', lane.RUNNING, 0, limits.key(lane, found[i + 1]).prefix .. id)
    else
      gone[#gone + 1] = id
    end
  end
  if #gone > 0 then limits.ended(lane.n, gone) end
end

function agree.running(lane, found)
  for i = 1, #found, 2 do
    local name = found[i]
    local of = sub(name, SIZED_KEY.KEY_FIRST, SIZED_KEY.KEY_OFFSET + unpack_bytes('>H', name))
    local key = limits.key(lane, of)
    local rest = sub(name, #key.prefix + 1)
    local claim = sub(rest, LETTERED.REST_FIRST)
    if sub(rest, LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST) ~= 's' then
      if call('HGET', lane.INFLIGHT, rest) ~= of then call('ZREM', lane.RUNNING, name) end
    elseif not call('ZSCORE', superseded.CLAIMS, claim) then
      call('ZREM', lane.RUNNING, name)
      call('HDEL', limits.OF_SUPERSEDED, claim)
    end
    limits.look_again(key)
  end
end

local function key_of(lane, id)
  local e = load(id)
  return limits.key(lane, e and limits.name_of(lane, e) or '')
end

function agree.leased(lane, found)
  local ids, keys = {}, {}
  for i = 1, #found, 2 do
    if call('HEXISTS', lane.INFLIGHT, found[i]) == 0 then
      ids[#ids + 1], keys[#keys + 1] = found[i], key_of(lane, found[i])
    end
  end
  if #ids > 0 then limits.record(lane.n, ids, keys) end
  for _, key in ipairs(keys) do limits.look_again(key) end
end

-- Nobody knows the lane of a message that was replaced before the lane had limits. It was probably the lane of the
-- message that has replaced it.
function agree.superseded(lane, found)
  for i = 1, #found, 2 do
    local written, e = call('HGET', limits.OF_SUPERSEDED, found[i]), nil
    if written then
      e = { lane = unpack_bytes('>H', written), body = sub(written, OF_LANE.BODY_FIRST) }
    else
      e = load(sub(found[i], SUPERSEDED.ID_FIRST))
    end
    if e and e.lane == lane.n then limits.look_again(limits.record_superseded(lane, e, found[i])) end
  end
end

function agree.due(lane, found) limits.enter_all(lane.n, found) end

function agree.queues(lane, found)
  for i = 1, #found, 2 do
    local name = found[i]
    local key = limits.key(lane, sub(name, SIZED_KEY.KEY_FIRST, SIZED_KEY.KEY_OFFSET + unpack_bytes('>H', name)))
    local rest = sub(name, #key.prefix + 1)
    local place = tonumber(call('ZSCORE', due_key(lane.n), sub(rest, QUEUED.MEMBER_FIRST)))
    if place ~= (unpack_bytes('>I6', rest)) then limits.drop(key, name) end
  end
end

function agree.turns(lane, found)
  for i = 1, #found, 2 do limits.look_again(limits.key(lane, found[i])) end
end

local function write_step(lane, what, cursor)
  lane.step = what and what .. ' ' .. cursor
  if what then
    call('HSET', limits.ALL, 'step:' .. lane.n, lane.step)
  else
    call('HDEL', limits.ALL, 'step:' .. lane.n)
    limits.call_others(lane.n)
  end
end

-- Begins the steps of a lane with `what`. Steps that are already under way go on if they come before it.
function requeue.start(lane, what)
  local before = lane.step and string.match(lane.step, '^%l+')
  for _, each in ipairs(ORDER) do
    if each == before and each ~= what then return end
    if each == what then break end
  end
  write_step(lane, what, 0)
end

-- If the clock has stepped back, tickets may lie ahead of due messages: begins the step that gives new tickets.
function requeue.follow_clock(lane)
  if not limits.has_stepped_back(lane) then return end
  open_gate()
  limits.note_claim(lane)
  requeue.start(lane, 'turns')
end

-- Returns true if messages in flight of the lane may not be counted yet. A claim then takes nothing.
function requeue.is_counting(lane) return lane.step and COUNTS[string.match(lane.step, '^%l+')] end

local function key_to_scan(lane, what)
  if what == 'due' then return due_key(lane.n) end
  if what == 'leased' then return leased_key(lane.n) end
  if what == 'superseded' then return superseded.CLAIMS end
  return lane[string.upper(what)]
end

-- Takes the next step of a lane.
function requeue.step(lane)
  local what, cursor = string.match(lane.step, '^(%l+) (%d+)$')
  open_gate()
  local after, found = unpack(call(SCANS[what] or 'ZSCAN', key_to_scan(lane, what), cursor, 'COUNT', AT_ONCE))
  agree[what](lane, found)
  limits.count_again(lane)
  limits.flush(lane)
  if after ~= '0' then return write_step(lane, what, after) end
  local next_one = nil
  for i, each in ipairs(ORDER) do if each == what then next_one = ORDER[i + 1] end end
  write_step(lane, next_one, 0)
end

-- Forgets marks that no rate counts any more. The fields are chosen at random.
local function sweep(lane)
  for _ = 1, MOST_SWEPT do
    local found, gone = call('HRANDFIELD', lane.MARKS, MOST_FIELDS, 'WITHVALUES'), {}
    for i = 1, #found, 2 do
      local span = (found[i] == 'w' and lane.whole.limit or lane.each).span
      local last = sub(found[i + 1], -BEGINNING.SIZE)
      local is_over = not span or #last < BEGINNING.SIZE or now - unpack_bytes('>I6', last) >= span
      if is_over then gone[#gone + 1] = found[i] end
    end
    if #gone > 0 then call('HDEL', lane.MARKS, unpack(gone)) end
    if 4 * #gone < MOST_FIELDS then return end
  end
end

-- Compares the counts of a lane with its messages. If they differ, begins the steps that make them agree. Takes at most
-- `most` steps.
function requeue.check(n, most)
  local lane = limits.lane(n)
  limits.flush(lane)
  local replaced, queued = 0, call('ZCARD', lane.QUEUES)
  for _, written in ipairs(call('HVALS', limits.OF_SUPERSEDED)) do
    if unpack_bytes('>H', written) == n then replaced = replaced + 1 end
  end
  local leased = call('ZCARD', leased_key(n))
  local agrees = call('HLEN', lane.INFLIGHT) == leased and call('ZCARD', lane.RUNNING) == leased + replaced
    and call('ZCARD', due_key(n)) == queued and (queued == 0 or call('EXISTS', lane.TURNS) == 1)
  if not agrees and not lane.step then requeue.start(lane, 'inflight') end
  for _ = 1, most do
    if not lane.step then break end
    requeue.step(lane)
  end
  sweep(lane)
end
