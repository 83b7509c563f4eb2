-- attempts: what a message becomes after an attempt, and the change of its due time.

local function contains(list, value)
  for _, each in ipairs(list) do if each == value then return true end end
  return false
end

-- Keeps the first due time of a message for its delivery id. A series does not need it, because the due time of each
-- occurrence is already in the occurrence's delivery id.
local function keep_put_due(e)
  if has(e, RECURRING) or fields.get(e, BODY.PUT_DUE_MS) then return end
  fields.rewrite(e, { [BODY.PUT_DUE_MS] = pack('>BI8', 0xcf, e.due) })
end

-- Changes the due time of a message. The time after which the message is late moves by the same amount.
function attempts.move(e, due)
  pcall(keep_put_due, e) -- An unreadable body stays: the message becomes a dead letter later.
  local live = has(e, RECURRING) and fields.live_of(e) or {}
  while contains(live, due) do due = due + 1 end
  if e.expires ~= 0 then e.expires = e.expires - e.due + due end
  e.due = due
end

local EARLIER_ERRORS = 4

-- Returns the encoded list of earlier errors, with the last error `last` added at its end.
local function earlier_errors(e, last)
  local written, kept = fields.get(e, BODY.EARLIER_ERRORS), {}
  if written then
    local count, at = fields.items(written, 1)
    for i = 1, count do
      local ends = fields.skip(written, at)
      kept[i], at = sub(written, at, ends - 1), ends
    end
  end
  kept[#kept + 1] = last
  local first = math.max(1, #kept - EARLIER_ERRORS + 1)
  return string.char(0x90 + #kept - first + 1) .. table.concat(kept, '', first)
end

local function written_end(e, error_text, trace, traceback)
  local changes, last = {}, fields.get(e, BODY.LAST_ERROR)
  if error_text ~= '' then
    local told = sub(error_text, LETTERED.REST_FIRST)
    changes[BODY.LAST_ERROR] = cmsgpack.pack(told)
    if not fields.get(e, BODY.FIRST_ERROR) then changes[BODY.FIRST_ERROR] = changes[BODY.LAST_ERROR] end
    if last and cmsgpack.unpack(last) ~= told then changes[BODY.EARLIER_ERRORS] = earlier_errors(e, last) end
  end
  if trace ~= '' then changes[BODY.TRACE] = trace end
  if traceback ~= '' then changes[BODY.TRACEBACK] = cmsgpack.pack(traceback) end
  return changes
end

function attempts.count(e, attempt, error_text, trace, traceback, has_run)
  e.attempt = math.min(tonumber(attempt), MOST_ATTEMPTS)
  if has_run then e.lapses, e.kills = 0, 0 end
  unset(e, ALONE)
  local is_readable, changes = pcall(written_end, e, error_text, trace, traceback)
  if is_readable then fields.rewrite(e, changes) end -- An unreadable body stays: the message becomes a dead letter later.
end

function attempts.rearm(e, due, retrying)
  memory.remember_answer(e)
  local live = fields.live_of(e)
  if retrying then live[#live + 1] = e.due end
  local changes = { [BODY.FIRST_ERROR] = false, [BODY.LAST_ERROR] = false, [BODY.EARLIER_ERRORS] = false }
  changes[BODY.LIVE] = fields.written_list(live)
  fields.rewrite(e, changes)
  attempts.move(e, due)
  e.attempt, e.lapses, e.kills = 0, 0, 0
  unset(e, ALONE)
  insert(e, e.due)
end
