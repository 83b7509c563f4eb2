-- occurrences: the occurrences of a series, and their retries.
--
-- The body of a series lists the due times of its retries. After the series has ended, the hash LEFT lists them: id of
-- the series -> due times, each u48.
occurrences.LEFT = TAG .. 'retries'

-- Returns the id of an occurrence. `due` is its due time as u48.
function occurrences.id(series_id, due)
  return string.char(OCCURRENCE) .. series_id .. due
end

-- Returns two values: the series of an occurrence, or nil if the series no longer exists; and the occurrence's due
-- time.
function occurrences.series(id)
  if byte(id) ~= OCCURRENCE then return nil end
  local series = load(sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST))
  return series and has(series, RECURRING) and series or nil, (unpack_bytes('>I6', sub(id, OCCURRENCE_ID.DUE_FIRST)))
end

function occurrences.list(series, live)
  fields.rewrite(series, { [BODY.LIVE] = fields.written_list(live) })
  store(series)
end

-- Removes an occurrence that has ended from the lists of retries.
function occurrences.strike(id)
  parts.remove(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
  local series, due = occurrences.series(id)
  if not series then return end
  local live, left = fields.live_of(series), {}
  for _, each in ipairs(live) do if each ~= due then left[#left + 1] = each end end
  if #left < #live then occurrences.list(series, left) end
end

-- Adds the retry of an occurrence to LEFT. Call this if no series lists the retry.
function occurrences.list_apart(id)
  parts.add(
    occurrences.LEFT, sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
  )
end

-- Adds the retries of a series that has ended to LEFT.
function occurrences.leave(series)
  local is_readable, live = pcall(fields.live_of, series)
  for _, due in ipairs(is_readable and live or {}) do parts.add(occurrences.LEFT, series.id, u48(due)) end
end

-- Returns the due times of all retries of a series, each u48. Retries of an earlier series with the same id count too.
function occurrences.of(e)
  local dues, left = {}, call('HGET', occurrences.LEFT, e.id) or ''
  for at = 1, #left, OCCURRENCE_ID.DUE_SIZE do dues[#dues + 1] = sub(left, at, at + OCCURRENCE_ID.DUE_SIZE - 1) end
  for _, due in ipairs(has(e, RECURRING) and fields.live_of(e) or {}) do dues[#dues + 1] = u48(due) end
  return dues
end

-- Returns the present occurrence of a series as a message of its own.
function occurrences.copy_of(e)
  local o = copy(e)
  o.id, o.op = occurrences.id(e.id, u48(e.due)), NO_OP
  unset(o, RECURRING)
  body_of(o)
  -- If the body is unreadable, it stays unchanged. The message then becomes a dead letter.
  pcall(fields.rewrite, o, { [BODY.RULE] = false, [BODY.LIVE] = false })
  return o
end

-- Ends the retries of a series that a command replaces or cancels. Returns true if a retry is in flight. A replacement
-- supersedes the claim of that retry. After a cancel, that retry runs for the last time.
function occurrences.end_retries(e, is_replaced)
  local in_flight = false
  for _, due in ipairs(occurrences.of(e)) do
    local retry = load(occurrences.id(e.id, due))
    local is_held = retry and token_of(retry)
    if is_held and not is_replaced then
      set(retry, NO_RETRY)
      store(retry)
    elseif retry then
      superseded.add(retry)
      finish_off(retry)
    end
    in_flight = in_flight or (is_held and true)
  end
  return in_flight
end
