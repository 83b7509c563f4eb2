-- renew: gives leases new tokens. A lease is lost if another worker has claimed its message.
--@ base record moves
-- From ARGV[4] on, 5 arguments for each lease: id, revision, token, new token, '1' if the trial of a suspect is over.
-- Returns now, and a string with a letter for each lease, in order: 'r' renewed, 'c' renewed but cancelled, 'u'
-- superseded, 'l' lost. If the messages are large, there are fewer letters than leases. The caller then sends the other
-- leases again.
local answers, bytes = {}, 0

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
  if ends_trial then
    trials.stop(e)
    if has(e, ALONE) then
      unset(e, ALONE)
      store(e)
    end
  end
  return has(e, NO_RETRY) and 'c' or 'r'
end

for a = 4, #ARGV, 5 do
  if bytes >= MOST_BYTES then break end
  local revision, token, to = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  answers[#answers + 1] = renew(ARGV[a], revision, token, to, ARGV[a + 4] == '1')
end
return { text(now), table.concat(answers) }
