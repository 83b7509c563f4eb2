-- dead: makes dead letters. The hash `dead` keeps them, and the sorted sets `graves` and `graves:ids` list them.
dead.BY_ID = TAG .. 'graves:ids'

-- Returns the member of the index BY_ID. The size of the key comes first. So all keys of one id are neighbours in the
-- index, because they have the same size.
function dead.by_id(key) return pack('>H', #key) .. key end

function dead.add(key)
  call('ZADD', GRAVES, now, key)
  call('ZADD', dead.BY_ID, 0, dead.by_id(key))
end

function dead.bury(e, reason)
  if has(e, RECURRING) then e = occurrences.copy_of(e) end
  local key = e.id .. u48(e.revision)
  local value = string.char(#reason) .. reason .. record_bytes(e)
  if call('HSET', DEAD, key, value) == 1 then call('HINCRBY', META, 'dead:' .. text(e.lane), 1) end
  dead.add(key)
  note('dead', e, reason)
end

-- Makes a dead letter of an unreadable value. The dead letter is a mark, the lane number u16, and the whole value. It
-- has no reason.
function dead.set_aside(lane, id, value)
  local key = id .. u48(0)
  if call('HSET', DEAD, key, string.char(UNREADABLE_LETTER.MARK) .. pack('>H', lane) .. value) == 1 then
    call('HINCRBY', META, 'dead:' .. text(lane), 1)
  end
  dead.add(key)
  call('HDEL', MSG, id)
  loaded[id] = false
end
