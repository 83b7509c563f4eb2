-- settle: ends claims, each in one step with what follows from it.
--@ base record memory moves
-- ARGV[4] how many plain ones come first: messages that are over, neither recurring nor an occurrence, without a version,
--   whose record the sender has. 4 arguments each: id, lane's number, token; op, revision u48 and due u48 in one.
-- Then 8 arguments each: id, revision, token, what, due, attempt, error, then.
--   what  'd' + outcome done, 'a' again, 'x' + reason dead
--   due   of 'a', epoch ms
--   error 'e' + text, '' = none
--   then  the next occurrence's due time, '' = the series ends
-- Returns a letter for each, in order: 's' settled, 'u' superseded, 'g' gone.
local PLAIN = tonumber(ARGV[4])
local answers = {}

open_gate()

local function not_held(id, revision)
  local e = load(id)
  return e and e.revision > revision and 'u' or 'g'
end

-- As remember_end() does, in a few calls.
local function remember_plain(ended)
  local memories, ops = {}, {}
  local last, list, written = nil, nil, nil
  local function add(ends, what, value)
    if ends ~= last then
      local key = window_for('o', ends)
      memories[key] = memories[key] or {}
      last, list, written = ends, memories[key], u48(ends)
    end
    list[#list + 1] = what
    list[#list + 1] = written .. value
  end
  for _, a in ipairs(ended) do
    local known = ARGV[a + 3]
    if unpack_bytes('>I6', known, 9) + WINDOW > now then ops[#ops + 1] = 'o' .. sub(known, 1, 8) end
  end
  if #ops > 0 then prefetch_ops(ops) end
  for _, a in ipairs(ended) do
    local id, known = ARGV[a], ARGV[a + 3]
    local op, revision = sub(known, 1, 8), unpack_bytes('>I6', known, 9)
    if recalled['o' .. op] == false and op ~= NO_OP then add(revision + WINDOW, 'o' .. op, 's' .. sub(known, 9)) end
    if byte(id) ~= 1 then add(now + WINDOW, 'r' .. id, sub(known, 9, 14)) end
  end
  for key, list in pairs(memories) do call('HSET', key, unpack(list)) end
end

local function end_plain(n, list) -- those of one lane
  local ids = {}
  for i, a in ipairs(list) do ids[i] = ARGV[a] end
  local tokens = call('ZMSCORE', leased_key(n), unpack(ids))
  local ended, kept, keys = {}, {}, {}
  for i, a in ipairs(list) do
    if tokens[i] and tonumber(tokens[i]) == tonumber(ARGV[a + 2]) then
      ended[#ended + 1] = a
      keys[#keys + 1] = ids[i]
      answers[(a - 5) / 4 + 1] = 's'
    else
      kept[#kept + 1] = a
    end
  end
  if #keys > 0 then
    call('ZREM', leased_key(n), unpack(keys))
    call('HDEL', MSG, unpack(keys))
  end
  remember_plain(ended)
  for _, a in ipairs(kept) do
    answers[(a - 5) / 4 + 1] = not_held(ARGV[a], (unpack_bytes('>I6', ARGV[a + 3], 9)))
  end
end

local function written_error(e, error_text)
  if error_text == '' then return {} end
  local written = cmsgpack.pack(sub(error_text, 2))
  local changes = { g = written }
  if not field(e, 'f') then changes.f = written end
  return changes
end

local function count_attempt(e, a)
  e.attempt = math.min(tonumber(ARGV[a + 5]), MOST_ATTEMPTS)
  e.lapses, e.kills = 0, 0
  unset(e, ALONE)
  local is_readable, changes = pcall(written_error, e, ARGV[a + 6])
  if is_readable then rewrite(e, changes) end -- else it is given up because its body cannot be read
end

local function rearm(e, due, retrying)
  remember_answer(e)
  local live = live_of(e)
  if retrying then live[#live + 1] = e.due end
  rewrite(e, { l = written_list(live), f = false, g = false })
  move(e, due)
  e.attempt, e.lapses, e.kills = 0, 0, 0
  unset(e, ALONE)
  insert(e, e.due)
end

local function retry(e, a, beside)
  local failed = copy(e)
  body_of(failed)
  count_attempt(failed, a)
  if beside then
    failed = as_occurrence(failed)
    local there = load(failed.id)
    if there then take_out(there) end
  end
  insert(failed, math.max(tonumber(ARGV[a + 4]), failed.due))
  note('again', failed, sub(ARGV[a + 6], 2))
end

local function end_attempt(e, a, beside) -- says whether it is tried again
  local what = sub(ARGV[a + 3], 1, 1)
  if what == 'a' and not has(e, NO_RETRY) then
    retry(e, a, beside)
    return true
  elseif what == 'a' then
    note('dropped', e, 'cancelled in flight')
  elseif what == 'x' then
    local failed = copy(e)
    body_of(failed)
    count_attempt(failed, a)
    bury(failed, sub(ARGV[a + 3], 2))
  else
    note(sub(ARGV[a + 3], 2), e)
  end
  return false
end

local function settle(a)
  local e = load(ARGV[a])
  if not e or token_of(e) ~= tonumber(ARGV[a + 2]) then return not_held(ARGV[a], tonumber(ARGV[a + 1])) end
  local recurs = has(e, RECURRING) and not has(e, NO_RETRY)
  local due = recurs and tonumber(ARGV[a + 7]) or nil
  take_out(e)
  local lives_on = end_attempt(e, a, due ~= nil)
  if due then
    rearm(e, due, lives_on)
  elseif not lives_on then
    forget(e)
  end
  return 's'
end

local by_lane = {}
for i = 0, PLAIN - 1 do
  local a = 5 + i * 4
  local n = tonumber(ARGV[a + 1])
  by_lane[n] = by_lane[n] or {}
  table.insert(by_lane[n], a)
end
for n, list in pairs(by_lane) do end_plain(n, list) end
local from = 5 + PLAIN * 4
for i = 0, (#ARGV - from + 1) / 8 - 1 do answers[PLAIN + i + 1] = settle(from + i * 8) end
finish()
return table.concat(answers)
