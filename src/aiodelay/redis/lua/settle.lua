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

local function end_plain(n, list) -- those of one lane
  local ids = {}
  for i, a in ipairs(list) do ids[i] = ARGV[a] end
  local tokens = call('ZMSCORE', leased_key(n), unpack(ids))
  local ended, kept, keys = {}, {}, {}
  for i, a in ipairs(list) do
    if tokens[i] and tonumber(tokens[i]) == tonumber(ARGV[a + 2]) then
      ended[#ended + 1] = ARGV[a + 3]
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
  remember_ends(keys, ended)
  for _, a in ipairs(kept) do
    answers[(a - 5) / 4 + 1] = not_held(ARGV[a], (unpack_bytes('>I6', ARGV[a + 3], 9)))
  end
end

local function retry(e, a, beside)
  local failed = copy(e)
  body_of(failed)
  count_attempt(failed, ARGV[a + 5], ARGV[a + 6])
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
    count_attempt(failed, ARGV[a + 5], ARGV[a + 6])
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
