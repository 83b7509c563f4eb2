-- lapsing: returns messages whose leases have ended.

function lapsing.lapse(e)
  local kind, _, beat
  if e.lapses >= SUSPECT_LAPSES then kind, _, beat = trials.of(e.id) end
  if kind == 'g' then trials.note_death() end
  local kills = has(e, ALONE) and trials.has_died(e.id) and math.min(e.kills + 1, MOST_LAPSES) or e.kills
  take_out(e)
  unset(e, ALONE)
  if kills >= KILLS_TO_DEATH and not has(e, RECURRING) and not has(e, NO_RETRY) then
    e.kills = KILLS_TO_DEATH
    dead.bury(appending.bare(e), 'killed_worker')
    appending.finish(e)
    return
  end
  if kills > e.kills then call('HSET', META, 'killed', text(beat or now)) end
  e.kills, e.lapses = kills, kind and e.lapses or math.min(e.lapses + 1, MOST_LAPSES)
  if not kind and e.lapses == SUSPECT_LAPSES then call('HSET', META, 'suspected', text(now)) end
  if has(e, NO_RETRY) then
    note('dropped', e, 'cancelled in flight')
    appending.finish(e)
  else
    insert(e, e.place, not appending.join(e) and kind)
    note('lapsed', e)
  end
end

-- Returns lapsed messages of a lane to the lane, at most `limit`. Returns the number of messages that
-- it has handled.
function lapsing.return_lapsed(n, limit)
  local key = leased_key(n)
  local suspects = call('HLEN', trials.KEY)
  local ids = tokens.over(key, limit + suspects)
  if suspects > 0 then ids = trials.without_doubt(ids, limit) end
  if #ids > 0 then open_gate() end
  local bytes = 0
  for i, id in ipairs(ids) do
    if bytes >= MOST_BYTES then return i - 1 end
    local e = load(id)
    bytes = bytes + (e and #e.value or 0)
    if e and e.lane == n then
      lapsing.lapse(e)
    else
      call('ZREM', key, id)
      if limited and is_limited(n) then limits.ended(n, { id }) end
      local value = call('HGET', MSG, id)
      if not e and value then dead.set_aside(n, id, value) end
    end
  end
  return #ids
end
