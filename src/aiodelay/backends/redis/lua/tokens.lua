-- tokens: the tokens of leases. A token contains the end of its lease.

tokens.RIGHTING = 20000

function tokens.at(deadline, counter) return (deadline - TOKEN_EPOCH) * COUNTERS + counter % COUNTERS end

-- Until `tokens.spared`, leases that had not ended when `aiodelay reshard` began do not end. So processes have time to
-- renew them after the move. META has both times in the field `spared`.
local ended = now
if spared then
  local began, ends = string.match(spared, '^(%d+) (%d+)$')
  if began and now < tonumber(ends) then ended, tokens.spared = math.min(now, tonumber(began)), tonumber(ends) end
end

-- LEAST is the smallest token of a lease that has not ended. TOO_LONG is the smallest token of a lease that is too
-- long: it ends later than any new lease. Such a lease exists only if the clock has stepped back.
tokens.LEAST, tokens.TOO_LONG = tokens.at(ended + 1, 0), tokens.at(now + MAX_LEASE + 1, 0)

-- Returns true if the script may now return the messages whose leases are too long. Live workers have then had time to
-- renew these leases with a correct end. The first call starts this time, so call the function only if such a lease
-- exists.
function tokens.is_righting_over()
  local since = tonumber(call('HGET', META, 'ahead') or 0)
  if since > now or now > since + 2 * tokens.RIGHTING then
    since = now
    open_gate()
    call('HSET', META, 'ahead', text(now))
  end
  return since + tokens.RIGHTING <= now
end

-- Returns members of a sorted set of tokens: those whose leases have ended, and perhaps those whose leases are too
-- long.
function tokens.over(key, limit)
  local found = call('ZRANGEBYSCORE', key, '-inf', '(' .. text(tokens.LEAST), 'LIMIT', 0, limit)
  local ahead = call('ZRANGEBYSCORE', key, text(tokens.TOO_LONG), '+inf', 'LIMIT', 0, limit - #found)
  if #ahead > 0 and tokens.is_righting_over() then
    for _, member in ipairs(ahead) do found[#found + 1] = member end
  end
  return found
end
