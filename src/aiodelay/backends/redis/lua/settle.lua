-- settle: ends claims. In the same step it deletes their messages, schedules retries, or makes dead letters.
--@ base record moves
-- ARGV[4] number of lists of plain claims, followed by the lists. A plain claim is settled as `Done`. Its message does
--   not recur, is not an occurrence, and has no version. Each list: lane number, token, number of ids, ids.
-- Then the number of arguments with *memories* of the plain claims, and these arguments in threes. A memory is an entry
-- to remember after the end of a message: the place of the claim in the lists, from 1 on; then 'o' + op, until u48 +
-- answer; or 'r' + id, revision u48.
-- Then 10 arguments for each other claim: id, revision, token, what, due, attempt, error, then, trace, traceback.
--   what      'd' + outcome: done; 'a': again; 'x' + reason: dead
--   due       for 'a': the due time of the retry, epoch ms
--   error     'e' + text; '' = none
--   then      the due time of the next occurrence of a series; '' = the series ends
--   trace     the new value of the key 'c' of the body; '' = no change
--   traceback for 'x'; '' = none
-- Returns a letter for each claim, in order: 's' settled, 'u' superseded, 'g' gone. 'n' means that no plain claim has
-- this token, or that its message got items since the claim. The caller sends this claim again as one of the other claims. Then '+', if limits let other messages of the
-- lanes begin now.
local answers = {}

open_gate()

-- Ends the plain claims of a list that still have the token of the list. Returns the index of the next list in ARGV.
local function end_plain(a)
  local n, token, count = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local written, ended, got_items = ARGV[a + 1], {}, {}
  if appends and call('EXISTS', appending.IDS) == 1 then
    for i, is_in in ipairs(call('SMISMEMBER', appending.IDS, unpack(ARGV, a + 3, a + 2 + count))) do
      got_items[i] = is_in == 1
    end
  end
  for i, score in ipairs(call('ZMSCORE', leased_key(n), unpack(ARGV, a + 3, a + 2 + count))) do
    local is_held = score == written or (score and tonumber(score) == token)
    is_held = is_held and not got_items[i]
    if is_held then ended[#ended + 1] = ARGV[a + 2 + i] end
    answers[#answers + 1] = is_held and 's' or 'n'
  end
  if #ended > 0 then
    call('ZREM', leased_key(n), unpack(ended))
    if limited and is_limited(n) then limits.ended(n, ended) end
    call('HDEL', MSG, unpack(ended))
  end
  return a + 3 + count
end

-- Stores the memories of the plain claims that this call has ended. Another claim may be older than the message that is
-- stored now. After a failover, it may even be older than the stored message of the same op.
local function remember_plain(from, to)
  local memories = {}
  for a = from, to, 3 do
    if answers[tonumber(ARGV[a])] == 's' then
      memories[#memories + 1], memories[#memories + 2] = ARGV[a + 1], ARGV[a + 2]
    end
  end
  if #memories > 0 then memory.remember_all(memories) end
end

local function retry(e, a, beside)
  local failed = copy(e)
  body_of(failed)
  -- A message that is given back without a run keeps its lapses and kills.
  local is_release = ARGV[a + 6] == '' and tonumber(ARGV[a + 5]) == e.attempt and tonumber(ARGV[a + 4]) <= e.due
  attempts.count(failed, ARGV[a + 5], ARGV[a + 6], ARGV[a + 8], '', not is_release)
  if beside then
    failed = occurrences.copy_of(failed)
    local there = load(failed.id)
    if there then
      superseded.add(there)
      take_out(there)
    end
  end
  appending.join(failed)
  insert(failed, math.max(tonumber(ARGV[a + 4]), failed.due))
  note('again', failed, sub(ARGV[a + 6], LETTERED.REST_FIRST))
end

-- Carries out a settlement. Returns true if the message is tried again.
local function end_attempt(e, a, beside)
  local what = sub(ARGV[a + 3], LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST)
  if what == 'a' and not has(e, NO_RETRY) then
    retry(e, a, beside)
    return true
  elseif what == 'a' then
    note('dropped', e, 'cancelled in flight')
  elseif what == 'x' then
    local failed = copy(appending.bare(e))
    body_of(failed)
    attempts.count(failed, ARGV[a + 5], ARGV[a + 6], ARGV[a + 8], ARGV[a + 9], true)
    dead.bury(failed, sub(ARGV[a + 3], LETTERED.REST_FIRST))
  else
    note(sub(ARGV[a + 3], LETTERED.REST_FIRST), e)
  end
  return false
end

local function settle(a)
  local e, revision, token = load(ARGV[a]), tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  if not e or token_of(e) ~= token then
    local was_replaced = superseded.settle(ARGV[a], revision, token) or (e and e.revision > revision)
    return was_replaced and 'u' or 'g'
  end
  local recurs = has(e, RECURRING) and not has(e, NO_RETRY)
  local due = recurs and tonumber(ARGV[a + 7]) or nil
  take_out(e)
  local lives_on = end_attempt(e, a, due ~= nil)
  if due then
    attempts.rearm(e, due, lives_on)
  elseif not lives_on then
    appending.finish(e)
  end
  return 's'
end

local at = 5
for _ = 1, tonumber(ARGV[4]) do at = end_plain(at) end
local memories = tonumber(ARGV[at])
remember_plain(at + 1, at + memories)
for a = at + memories + 1, #ARGV, 10 do answers[#answers + 1] = settle(a) end
finish()
return table.concat(answers) .. (counted.has_room and '+' or '')
