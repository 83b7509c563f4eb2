-- pulses: the numbers by which other processes notice that a process has ended. They follow core/pulse.py.
--
--   pulses              incarnation of a process -> its number; -1 = it was declared dead
--   held:<incarnation>  lane number, space and token of each of its claims -> the token
pulses.KEY, pulses.DEAD = TAG .. 'pulses', -1
local MOST_UNANSWERED = 1000

function pulses.held_key(incarnation) return TAG .. 'held:' .. incarnation end

-- Returns true if claims may be recorded under an incarnation. `is_registered` is '1' if its process knows that the
-- store holds its number.
function pulses.is_open(incarnation, is_registered)
  local known = tonumber(call('HGET', pulses.KEY, incarnation))
  if not known then return is_registered ~= '1' end
  return known > pulses.DEAD
end

-- Returns true if the number of an incarnation is the number that its process knows, or a few more. A number that was
-- deleted and written again is far from it, because a new number is the time.
function pulses.lives(incarnation, acknowledged)
  local ahead = tonumber(call('HGET', pulses.KEY, incarnation) or pulses.DEAD) - tonumber(acknowledged)
  return ahead >= 0 and ahead < MOST_UNANSWERED
end

-- Forgets claims of an incarnation whose tokens are smaller than `least`: they have ended. '' = forget none.
function pulses.forget(incarnation, least)
  if least == '' then return end
  local ended = call('ZRANGEBYSCORE', pulses.held_key(incarnation), '-inf', '(' .. least, 'LIMIT', 0, 1000)
  if #ended > 0 then call('ZREM', pulses.held_key(incarnation), unpack(ended)) end
end

-- Records claims under an incarnation, and returns its number; 0 = it was registered before. The number of a process
-- that was not registered changes, so that the time in which others wait for the next number begins now.
-- `held` maps a lane number to a map with the tokens of the claims as its keys.
function pulses.hold(incarnation, is_registered, held)
  local marks = {}
  for n, each in pairs(held) do
    for token in pairs(each) do
      marks[#marks + 1] = token
      marks[#marks + 1] = text(n) .. ' ' .. token
      if #marks == 1000 then
        call('ZADD', pulses.held_key(incarnation), unpack(marks))
        marks = {}
      end
    end
  end
  if #marks > 0 then call('ZADD', pulses.held_key(incarnation), unpack(marks)) end
  if is_registered == '1' then return 0 end
  call('HSETNX', pulses.KEY, incarnation, text(now))
  return call('HINCRBY', pulses.KEY, incarnation, 1)
end
