-- log: the entries of a log, and the positions of its consumers. The scripts of logs contain this part.
--
-- `p` is the key of the entries, a stream with the ids 0-<index>. docs/formats.md lists the fields of an entry and the
-- other keys. Some functions have the same names as functions of `topic`, because `taking`, `dropping`, `trying` and
-- `lagging` call them.
local topic = { CHUNK = 32, MOST_CONSUMERS = 2000, NOBODY = 'no such consumer is registered' }
do
  local DROPPED_AT_ONCE, char = 1000, string.char
  local PREFIX, PUSHED = RECORD.PREFIX, ELEMENT.PUSHED
  local next_read, first_read = nil, nil

  function topic.of(content) return content end

  function topic.id(index) return '0-' .. text(index) end

  function topic.is_reference(entry) return entry and byte(entry) < 58 end

  function topic.is_known(p, name) return call('ZSCORE', p .. ':consumers', name) and true end

  function topic.missed(p, name, n) call('HINCRBY', p .. '@' .. name .. ':state', 'missed', n) end

  -- --- entries -------------------------------------------------------------------------------------------------------

  local function bin(s)
    local size = #s
    if size < 256 then return '\196' .. char(size) .. s end
    return (size < 65536 and struct.pack('>BI2', 0xc5, size) or struct.pack('>BI4', 0xc6, size)) .. s
  end

  local function map(size) return size < 16 and char(0x80 + size) or struct.pack('>BI2', 0xde, size) end

  -- Returns a list element with the contents of an entry that another program has appended. Such an entry has a field
  -- for each part of the message.
  local function plain_element(p, index, fields)
    local body, headers, at, n = {}, {}, 0, 1
    local value = { payload = '' }
    for i = 1, #fields, 2 do
      local header = string.match(fields[i], '^header%.(.+)$')
      if header then
        headers[#headers + 1] = struct.pack('>BI2', 0xda, #header) .. header .. bin(fields[i + 1])
      else
        value[fields[i]] = fields[i + 1]
      end
    end
    at = math.floor(math.min(math.max(tonumber(value.at) or 0, 0), 2 ^ 47))
    body[1] = BODY.PAYLOAD_KEY .. bin(value.payload)
    if value.key then body[#body + 1] = BODY.KEY_KEY .. bin(value.key) end
    if #headers > 0 then body[#body + 1] = BODY.HEADERS_KEY .. map(#headers) .. table.concat(headers) end
    if value.at then body[#body + 1] = PUSHED .. struct.pack('>I8', at) end
    local id = char(ID.TEXT) .. string.match(p, '^[^}]*}:log:(.*)$') .. '/' .. index
    local prefix = struct.pack(PREFIX, RECORD.FORMAT_VERSION, 0, 0, at, at, 0, 0, 0, 0, string.rep('\0', RECORD.OP_SIZE))
    return bin(id) .. bin(prefix) .. map(#body) .. table.concat(body)
  end

  local function element_of(p, index, fields)
    if #fields == 2 and fields[1] == 'm' then return fields[2] end
    return plain_element(p, index, fields)
  end

  -- Returns the indexes and the elements of the first entries from `index` on.
  local function read(p, index, limit)
    local found, indexes, elements = redis.pcall('XRANGE', p, topic.id(index), '0', 'COUNT', limit), {}, {}
    if found.err then return found end
    for i, entry in ipairs(found) do
      indexes[i] = sub(entry[1], ENTRY_ID.INDEX_FIRST)
      elements[i] = element_of(p, indexes[i], entry[2])
    end
    return indexes, elements
  end

  function topic.contents(p, indexes)
    local contents, i = {}, 1
    while i <= #indexes do -- One call reads all indexes that are consecutive.
      local index, n = tonumber(indexes[i]), 1
      while n < topic.CHUNK and tonumber(indexes[i + n]) == index + n do n = n + 1 end
      local found, elements = read(p, index, n)
      for j = i, i + n - 1 do contents[j] = false end
      for j, each in ipairs(found) do
        if tonumber(each) < index + n then contents[i + tonumber(each) - index] = elements[j] end
      end
      i = i + n
    end
    return contents
  end

  -- Returns the first and the last index. In an empty log, `last` is `first` - 1. If the key is not a log, returns nil
  -- and the reason.
  function topic.ends(p)
    local info = redis.pcall('XINFO', 'STREAM', p)
    if info.err then
      if string.find(info.err, 'no such key', 1, true) then return 1, 0 end
      return nil, info.err
    end
    local first, last = nil, nil
    for i = 1, #info, 2 do
      if info[i] == 'last-generated-id' then last = string.match(info[i + 1], '^0%-(%d+)$') end
      if info[i] == 'first-entry' and info[i + 1] then first = tonumber(sub(info[i + 1][1], ENTRY_ID.INDEX_FIRST)) end
    end
    if not last then return nil, 'it is no log: its last id is not 0-<index>' end
    return first or last + 1, tonumber(last)
  end

  -- Appends elements. Returns the last index before these elements. If this fails, returns nil and the reason.
  function topic.append(p, elements)
    local _, last = topic.ends(p)
    if not _ then return nil, last end
    for i, element in ipairs(elements) do
      local id = redis.pcall('XADD', p, topic.id(last + i), 'm', element)
      if type(id) == 'table' then return nil, id.err end
    end
    return last
  end

  -- --- retention -----------------------------------------------------------------------------------------------------

  -- Searches the indexes from `low` to `high` for the first entry that was appended at or after `time`. An entry
  -- without a time counts as later than `time`. Returns the two ends of a smaller range. If they are equal, the entry
  -- is found. One call reads about `most_bytes`, so the search may need several calls.
  function topic.search(p, time, low, high, most_bytes)
    local bytes = 0
    while low < high and bytes <= most_bytes do
      local middle = math.floor((low + high) / 2)
      local indexes, elements = read(p, middle, 1)
      local index = tonumber(indexes[1])
      if not index or index >= high then
        high = middle
      else
        local element = elements[1]
        bytes = bytes + #element
        local key = sub(element, ELEMENT.PUSHED_KEY_FIRST, ELEMENT.PUSHED_KEY_LAST)
        if key == PUSHED and struct.unpack('>I8', sub(element, ELEMENT.PUSHED_MS_FIRST)) < time then
          low = index + 1
        else
          high = middle
        end
      end
    end
    return low, high
  end

  -- Drops a bounded number of entries. An entry is dropped if there are `most` newer entries, or if it is older than
  -- `max_age`. If `passed` is 1, an entry that all consumers have passed is dropped too. 0 means no limit. Returns true
  -- if there is nothing more to drop.
  function topic.trim(p, most, max_age, passed)
    if most == 0 and max_age == 0 and passed == 0 then return true end
    local first, last = topic.ends(p)
    local slowest, drop = passed > 0 and call('ZRANGE', p .. ':consumers', 0, 0, 'WITHSCORES')[2], first
    if most > 0 then drop = last - most + 1 end
    if slowest then drop = math.max(drop, slowest + 1) end
    local bound = math.min(first + DROPPED_AT_ONCE, last + 1)
    if max_age > 0 then drop = math.max(drop, (topic.search(p, now - max_age, first, bound, math.huge))) end
    if drop > first then call('XTRIM', p, 'MINID', '=', topic.id(math.min(drop, bound))) end
    return drop < bound or bound > last
  end

  -- Trims the log after each append, and ignores errors. Otherwise the caller would think that the append had failed,
  -- and repeat it.
  function topic.tend(...) pcall(topic.trim, ...) end

  -- --- consumers -----------------------------------------------------------------------------------------------------

  local function next_of(p, name) return tonumber(call('HGET', p .. '@' .. name .. ':state', 'next') or 1) end

  local function name_of(p) return sub(KEYS[2], #p + #'@' + 1, -#':consumers' - 1) end

  -- Moves the cursor of a consumer to the index before the first entry that has not ended for this consumer.
  function topic.move_cursor(p, name)
    local open = call('ZRANGE', p .. '@' .. name .. ':open', 0, 0)[1]
    local cursor = math.min(open and tonumber(open) or math.huge, next_of(p, name)) - 1
    call('ZADD', p .. ':consumers', 'XX', text(cursor), name)
  end

  -- Moves a consumer to an index, 'oldest' or 'now'. Entries before the index that were dropped before the consumer had
  -- them count as missed. With `is_forward`, never moves the consumer back, and takes all entries before the index as
  -- read. Returns the index of the consumer's next entry.
  function topic.place(p, name, start, is_forward)
    local first, last = topic.ends(p)
    local index = start == 'oldest' and first or start == 'now' and last + 1 or tonumber(start)
    local state = p .. '@' .. name .. ':state'
    index = math.max(1, math.min(index, last + 1))
    if is_forward then
      index = math.max(index, next_of(p, name))
    else
      local before, dropped_to = tonumber(call('HGET', state, 'next') or index), math.min(index, first)
      if dropped_to > before then topic.missed(p, name, dropped_to - before) end
    end
    call('HSET', state, 'next', text(index))
    call('ZADD', p .. ':consumers', text(index - 1), name)
    topic.move_cursor(p, name)
    return index
  end

  -- Records that a consumer no longer needs these entries.
  function topic.release(p, entries)
    local indexes = {}
    for i = 1, #entries do
      if topic.is_reference(entries[i]) then indexes[#indexes + 1] = string.match(entries[i], '^%d+') end
    end
    if #indexes == 0 then return end
    call('ZREM', p .. '@' .. name_of(p) .. ':open', unpack(indexes))
    topic.move_cursor(p, name_of(p))
  end

  -- Returns the indexes and the elements of the next entries of the log. Each call continues after the last call.
  function topic.ahead(p, limit)
    next_read = next_read or next_of(p, name_of(p))
    first_read = first_read or next_read
    local indexes, elements = read(p, next_read, limit)
    if #indexes > 0 then next_read = tonumber(indexes[#indexes]) + 1 end
    return indexes, elements
  end

  -- Records that the last `n` of the entries came from the log. Entries between them that were dropped count as missed.
  function topic.go_on(p, entries, n)
    if n <= 0 then return end
    local name, open = name_of(p), {}
    for i = #entries - n + 1, #entries do
      local index = string.match(entries[i], '^%d+')
      open[#open + 1], open[#open + 2] = index, index
    end
    local after = tonumber(open[#open]) + 1
    call('ZADD', p .. '@' .. name .. ':open', unpack(open))
    call('HSET', p .. '@' .. name .. ':state', 'next', text(after))
    if after - first_read > n then topic.missed(p, name, after - first_read - n) end
    topic.move_cursor(p, name)
  end

  -- Returns four values of a consumer: the number of waiting messages; the number of messages that were dropped since
  -- it last took any; its cursor; and the bytes of its key `open`.
  function topic.standing(p, name)
    local own, after = p .. '@' .. name, next_of(p, name)
    local first, last = topic.ends(p)
    if not first then first, last = 1, 0 end
    return call('LLEN', own .. ':refs') + math.max(last - math.max(after, first) + 1, 0), math.max(first - after, 0),
      call('ZSCORE', p .. ':consumers', name) or '0', call('MEMORY', 'USAGE', own .. ':open') or 0
  end
end
