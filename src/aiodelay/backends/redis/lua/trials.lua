-- trials: finds a *killer*, the message that ends its process, among suspects. core/transitions.py has the same rules.
--
-- The hash `trials` maps the id of a suspect to four values with spaces between them:
--   'a' if the suspect is tried alone, 'g' if it is tried in a group
--   the length of the lease in ms
--   the last time at which the process recorded that it holds the suspect, epoch ms
--   the worker
trials.KEY = TAG .. 'trials'
trials.MOST = 500
trials.FIRST = 1000
trials.LONGEST = 60000
trials.SILENT_LEASES = 4
trials.DEAD_LEASES = 2

function trials.write(id, kind, lease, worker)
  call('HSET', trials.KEY, id, string.format('%s %d %.0f %s', kind, lease, now, worker))
end

-- Two fields of META belong to the search for a killer. `tried` is the size of the last group of suspects, or 0 after
-- the process of the group has ended. `hot` is the number of suspects that contain a killer, counted from the heads of
-- their lanes.
--
-- Returns `hot` without the group of the last trial, which did not end its process.
function trials.hot()
  local known = call('HMGET', META, 'tried', 'hot')
  return math.max(tonumber(known[2] or 0) - tonumber(known[1] or 0), 0)
end

-- Returns the largest size of the next group. It is half of the suspects that contain a killer. If no killer is known,
-- it is trials.MOST.
function trials.most()
  local hot = trials.hot()
  return hot > 0 and floor((hot + 1) / 2) or trials.MOST
end

-- Two more fields of META are times. `suspected` is the time at which a message last became a suspect. `killed` is the
-- last sign of life of the process that ended last during a trial. If `suspected` is later than `killed`, the new
-- suspect may have ended that process. The function then returns true, because the suspect that was tried is not to
-- blame.
function trials.are_kills_void()
  local known = call('HMGET', META, 'suspected', 'killed')
  return tonumber(known[1] or 0) > tonumber(known[2] or 0)
end

function trials.begin(taken, lease, worker)
  local kind = #taken == 1 and 'a' or 'g'
  if taken[1].kills == 0 then call('HSET', META, 'tried', #taken, 'hot', trials.hot()) end
  for _, e in ipairs(taken) do
    trials.write(e.id, kind, lease, worker)
    if kind == 'a' then
      set(e, ALONE)
      if trials.are_kills_void() then e.kills = 0 end
      store(e)
    end
  end
end

-- Records that the lease of a group has ended. The group then contains a killer.
function trials.note_death()
  if call('HGET', META, 'tried') == '0' then return end
  local left = 0
  for _, value in ipairs(call('HVALS', trials.KEY)) do
    if sub(value, LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST) == 'g' then left = left + 1 end
  end
  call('HSET', META, 'tried', 0, 'hot', left)
end

function trials.stop(e)
  if e.lapses >= SUSPECT_LAPSES then call('HDEL', trials.KEY, e.id) end
end

-- Returns the last sign of life of a worker in epoch ms, or nil if the worker is not registered.
function trials.seen(worker)
  local is_read, serves = pcall(cmsgpack.unpack, call('HGET', WORKERS, worker) or '')
  return is_read and type(serves) == 'table' and tonumber(serves[1]) or nil
end

function trials.parse(value)
  local kind, lease, beat, worker = string.match(value, '^(%l) (%d+) (%d+) (.*)$')
  return kind, tonumber(lease), tonumber(beat), worker
end

function trials.of(id) return trials.parse(call('HGET', trials.KEY, id) or '') end

-- Returns true if the process of a suspect may still hold it, although its lease has ended. This is so if the suspect
-- is tried alone, and its process is registered and has recorded recently that it holds the suspect.
function trials.is_in_doubt(id)
  local kind, lease, beat, worker = trials.of(id)
  return kind == 'a' and trials.seen(worker) and math.abs(now - beat) < trials.SILENT_LEASES * lease
end

-- Returns true if the process that tried this suspect has ended.
function trials.has_died(id)
  local _, lease, _, worker = trials.of(id)
  local seen = lease and trials.seen(worker)
  return not seen or math.abs(now - seen) >= trials.DEAD_LEASES * lease
end

function trials.without_doubt(ids, limit)
  local found = {}
  for _, id in ipairs(ids) do
    if #found < limit and not trials.is_in_doubt(id) then found[#found + 1] = id end
  end
  return found
end

-- Returns true if a trial is in progress. The trial of a single suspect counts only until its lease ends, even if its
-- process may still hold the suspect. An entry that is older than the longest trial remains from a failover. The
-- function deletes such an entry.
function trials.are_on()
  local known, are_on = call('HGETALL', trials.KEY), false
  for i = 1, #known, 2 do
    local kind, _, beat = trials.parse(known[i + 1])
    local e = kind == 'a' and load(known[i])
    if not kind or math.abs(now - beat) >= trials.LONGEST + MAX_LEASE then
      call('HDEL', trials.KEY, known[i])
    elseif kind == 'g' or (e and (token_of(e) or 0) >= tokens.LEAST) then
      are_on = true
    end
  end
  return are_on
end
