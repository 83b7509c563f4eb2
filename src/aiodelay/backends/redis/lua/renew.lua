-- renew: gives leases new tokens. A lease is lost if another worker has claimed its message.
--@ base record moves
-- ARGV[4] incarnation of the worker, under which the leases are recorded; '' = others do not notice the worker's end
-- ARGV[5] '1' if the worker knows that the store holds a number for the incarnation
-- From ARGV[6] on, 5 arguments for each lease: id, revision, token, new token, '1' if the trial of a suspect is over.
-- Returns now, and a string with a letter for each lease, in order: 'r' renewed, 'c' renewed but cancelled, 'u'
-- superseded, 'l' lost. If the messages are large, there are fewer letters than leases. The caller then sends the other
-- leases again. Then the new number of the incarnation; 0 = it was registered before, or nothing was recorded.
local answers, bytes, held_now = {}, 0, {}

open_gate()

local function renew(id, revision, token, to, ends_trial)
  local e = load(id)
  bytes = bytes + (e and #e.value or 0)
  local held = e and token_of(e)
  if not held or (held ~= token and held ~= to) then
    return superseded.renew(id, revision, token, to) and 'u' or 'l'
  end
  call('ZADD', leased_key(e.lane), to, id)
  e.token = to
  held_now[e.lane] = held_now[e.lane] or {}
  held_now[e.lane][text(to)] = true
  if ends_trial then
    trials.stop(e)
    if has(e, ALONE) then
      unset(e, ALONE)
      store(e)
    end
  end
  return has(e, NO_RETRY) and 'c' or 'r'
end

for a = 6, #ARGV, 5 do
  if bytes >= MOST_BYTES then break end
  local revision, token, to = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  answers[#answers + 1] = renew(ARGV[a], revision, token, to, ARGV[a + 4] == '1')
end
local number = 0
if ARGV[4] ~= '' and next(held_now) and pulses.is_open(ARGV[4], ARGV[5]) then
  number = pulses.hold(ARGV[4], ARGV[5], held_now)
end
return { text(now), table.concat(answers), number }
