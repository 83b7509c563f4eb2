-- memory: remembers the answers of commands, and the revisions and versions of ended messages, for a limited time.
--
-- Each entry is in a hash, a *window*. The script deletes a window as a whole at the end of its time:
--   done:<k>   deleted at k * 30 s: 'o' + op -> until u48, answer; 'r' + id -> until u48, revision u48
--   ended:<k>  deleted at k * 1 h: id -> until u48, version u64
-- The sorted set `done` lists the windows: 'o' or 'v', then k -> the time of the deletion, epoch ms.
memory.WINDOW = 30000
local TOMBSTONE_WINDOW = 86400000
local STEP = { o = 30000, v = 3600000 }
local NAME = { o = 'done:', v = 'ended:' }

local windows = nil
local function known_windows()
  if not windows then
    windows = { o = {}, v = {}, known = {} }
    for _, name in ipairs(call('ZRANGE', DONE, 0, -1)) do
      local kind = sub(name, LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST)
      windows.known[name] = true
      table.insert(windows[kind], TAG .. NAME[kind] .. sub(name, LETTERED.REST_FIRST))
    end
  end
  return windows
end

function memory.forget_past(limit)
  for _, name in ipairs(call('ZRANGEBYSCORE', DONE, '-inf', text(now), 'LIMIT', 0, limit)) do
    local kind, k = sub(name, LETTERED.LETTER_FIRST, LETTERED.LETTER_LAST), sub(name, LETTERED.REST_FIRST)
    call('UNLINK', TAG .. NAME[kind] .. k)
    call('ZREM', DONE, name)
    windows = nil
  end
end

local window_keys = { o = {}, v = {} }
local function window_for(kind, ends)
  local k = math.ceil(ends / STEP[kind])
  local key = window_keys[kind][k]
  if key then return key end
  local name = kind .. k
  if not known_windows().known[name] then
    memory.forget_past(4)
    call('ZADD', DONE, k * STEP[kind], name)
    windows = nil
  end
  key = TAG .. NAME[kind] .. k
  window_keys[kind][k] = key
  return key
end

local recalled = {} -- A cache: 'o' + op or 'r' + id -> content. The content is false if nothing is remembered.
function memory.remember(what, ends, value)
  call('HSET', window_for('o', ends), what, u48(ends) .. value)
  recalled[what] = nil
end

-- Reads the entries of many ops and ids into the cache. This needs one call for each window.
function memory.prefetch(things)
  for _, what in ipairs(things) do recalled[what] = false end
  for _, key in ipairs(known_windows().o) do
    for i, value in ipairs(call('HMGET', key, unpack(things))) do
      if value and unpack_bytes('>I6', value) > now then
        local known, found = recalled[things[i]], sub(value, REMEMBERED.CONTENT_FIRST)
        if not known or #found > RECORD.REVISION_SIZE or unpack_bytes('>I6', found) > unpack_bytes('>I6', known) then
          recalled[things[i]] = found
        end
      end
    end
  end
end

function memory.recall(what)
  if recalled[what] == nil then memory.prefetch({ what }) end
  return recalled[what] or nil
end

function memory.recall_revision(id)
  local known = memory.recall('r' .. id)
  return known and unpack_bytes('>I6', known) or nil
end

-- Returns true if version `a` is newer than version `b`. A Lua number cannot hold a version of 8 bytes exactly.
function memory.is_newer(a, b)
  local a1, a2 = unpack_bytes('>I4I4', a)
  local b1, b2 = unpack_bytes('>I4I4', b)
  return a1 > b1 or (a1 == b1 and a2 > b2)
end

function memory.recall_version(id)
  local last = nil
  for _, key in ipairs(known_windows().v) do
    local value = call('HGET', key, id)
    if value and unpack_bytes('>I6', value) > now then
      local version = sub(value, REMEMBERED.CONTENT_FIRST)
      if not last or memory.is_newer(version, last) then last = version end
    end
  end
  return last
end

function memory.forget_version(id)
  for _, key in ipairs(known_windows().v) do call('HDEL', key, id) end
end

-- Returns the newest version of the stored message and of the ended messages of an id, or nil.
function memory.known_version(id, e)
  local known = memory.recall_version(id)
  if e and e.version and (not known or memory.is_newer(e.version, known)) then known = e.version end
  return known
end

function memory.next_revision(last)
  return (not last or last < now) and now or last + 1
end

function memory.first_answer(e)
  return 's' .. u48(e.revision) .. u48(e.due)
end

function memory.remember_answer(e)
  local ends = e.revision + memory.WINDOW
  if ends > now and e.op ~= NO_OP and not memory.recall('o' .. e.op) then memory.remember('o' .. e.op, ends, memory.first_answer(e)) end
end

function memory.remember_end(e)
  memory.remember_answer(e)
  -- aiodelay never uses an id again that it made itself. So the revision of such an id need not be remembered.
  if byte(e.id) ~= ID.OWN then memory.remember('r' .. e.id, now + memory.WINDOW, u48(e.revision)) end
  if e.version then
    local ends = now + TOMBSTONE_WINDOW
    call('HSET', window_for('v', ends), e.id, u48(ends) .. memory.known_version(e.id, e))
  end
end

-- Does the work of memory.remember_end() with few calls, for many messages without a version. `memories` has pairs: 'o' + op,
-- then until u48 and answer; or 'r' + id, then revision u48.
function memory.remember_all(memories)
  local ops, lists, of_ids = {}, {}, u48(now + memory.WINDOW)
  for i = 1, #memories, 2 do if byte(memories[i]) == 111 then ops[#ops + 1] = memories[i] end end
  if #ops > 0 then memory.prefetch(ops) end
  for i = 1, #memories, 2 do
    local what, value, ends = memories[i], memories[i + 1], now + memory.WINDOW
    if byte(what) == 111 then
      ends = recalled[what] and now or unpack_bytes('>I6', value)
    else
      value = of_ids .. value
    end
    if ends > now then
      local key = window_for('o', ends)
      local list = lists[key] or {}
      lists[key] = list
      list[#list + 1] = what
      list[#list + 1] = value
    end
  end
  for key, list in pairs(lists) do call('HSET', key, unpack(list)) end
end
