-- topic: the messages that a fan-out topic keeps, and their retention. The scripts that publish and take contain this
-- part.
--
-- `p` is the common beginning of a topic's keys. The keys of a consumer begin with p@<name>. docs/formats.md lists the
-- keys. The list `refs` of a consumer has *entries*: an element, or a reference to the content of an element, which the
-- topic stores once for all consumers.
local topic = { MOST_CONSUMERS = 2000, REFS_AT_ONCE = 20000, CHUNK = 32, NOBODY = 'no such consumer is registered' }
do
  local DROPPED_AT_ONCE, READ_AT_ONCE, SWEPT_AT_ONCE, CHUNK = 1000, 1048576, 8, topic.CHUNK
  local PUSHED = ELEMENT.PUSHED

  function topic.of(content) return sub(content, 1, -#':content' - 1) end

  function topic.is_known(p, name) return call('SISMEMBER', p .. ':consumers', name) == 1 end

  function topic.contents(p, indexes) return call('HMGET', p .. ':content', unpack(indexes)) end

  function topic.is_reference(entry) return entry and byte(entry) < 58 end

  -- Records that a consumer no longer needs these entries. Deletes the contents that no other consumer needs.
  function topic.release(p, entries)
    local indexes, gone, fewer = {}, {}, {}
    for i = 1, #entries do
      if topic.is_reference(entries[i]) then indexes[#indexes + 1] = string.match(entries[i], '^%d+') end
    end
    if #indexes == 0 then return end
    for i, left in ipairs(call('HMGET', p .. ':left', unpack(indexes))) do
      left = tonumber(left)
      if left and left > 1 then
        fewer[#fewer + 1], fewer[#fewer + 2] = indexes[i], text(left - 1)
      elseif left then
        gone[#gone + 1] = indexes[i]
      end
    end
    if #gone > 0 then
      call('HDEL', p .. ':content', unpack(gone))
      call('HDEL', p .. ':left', unpack(gone))
    end
    if #fewer > 0 then call('HSET', p .. ':left', unpack(fewer)) end
  end

  -- Returns four values of a consumer: the number of waiting messages, then three values that only a log has.
  function topic.standing(p, name) return call('LLEN', p .. '@' .. name .. ':refs'), 0, '', 0 end

  -- Adds to the number of messages that a consumer missed. Does nothing if another program has overwritten the key.
  function topic.missed(p, name, n) redis.pcall('HINCRBY', p .. '@' .. name .. ':state', 'missed', n) end

  -- Returns the server's error if a key of the topic has the wrong type, or nil.
  function topic.fault_of(p)
    for _, key in ipairs({ ':content', ':left', ':meta' }) do
      local length = redis.pcall('HLEN', p .. key)
      if type(length) == 'table' then return length.err end
    end
    local count = redis.pcall('SCARD', p .. ':consumers')
    return type(count) == 'table' and count.err or nil
  end

  -- Returns an error if the user lacks a right to publish, or nil. Without this check, a publish could stop halfway,
  -- and messages could be lost or doubled. Redis before 7.0 has no acl_check_cmd. There, the check runs commands that
  -- change nothing, because the key has another type, the member exists already, or the key does not exist.
  function topic.missing_right(p, name)
    local refs, consumers = p .. '@' .. name .. ':refs', p .. ':consumers'
    local needed = { RPUSH = refs, HSET = p .. ':content', SADD = p .. ':seen:0', PEXPIRE = p .. ':seen:0' }
    local probes = { RPUSH = { consumers, '' }, HSET = { consumers, '', '' }, SADD = { consumers, name },
      PEXPIRE = { p .. ':seen:0', '1' }, LLEN = { refs } }
    for command, key in pairs(redis.acl_check_cmd and needed or {}) do
      if not redis.acl_check_cmd(command, key, '0', '') then return 'NOPERM ' .. command .. ' ' .. key end
    end
    for command, arguments in pairs(redis.acl_check_cmd and {} or probes) do
      local answer = redis.pcall(command, unpack(arguments))
      if type(answer) == 'table' and not string.find(answer.err, 'WRONGTYPE', 1, true) then
        return 'NOPERM ' .. command .. ' ' .. arguments[1]
      end
    end
  end

  -- Gives each consumer a reference to each element. If an element has fewer than `inline` bytes, gives each consumer a
  -- copy of it instead.
  function topic.publish(p, names, elements, inline)
    local last, entries, content, left = tonumber(call('HGET', p .. ':meta', 'last') or 0), {}, {}, {}
    for i, element in ipairs(elements) do
      entries[i] = element
      if #element >= inline then
        last = last + 1
        entries[i] = text(last)
        content[#content + 1], content[#content + 2] = entries[i], element
        left[#left + 1], left[#left + 2] = entries[i], #names
      end
    end
    if #content > 0 then
      call('HSET', p .. ':meta', 'last', text(last))
      call('HSET', p .. ':left', unpack(left))
      call('HSET', p .. ':content', unpack(content))
    end
    local own = p .. '@'
    for _, name in ipairs(names) do
      if type(redis.pcall('RPUSH', own .. name .. ':refs', unpack(entries))) == 'table' then -- The key is not a list.
        topic.missed(p, name, #entries)
        topic.release(p, entries)
      end
    end
  end

  -- --- retention -------------------------------------------------------------------------------------------------------

  local function was_pushed_before(element, oldest)
    return oldest > 0 and sub(element, ELEMENT.PUSHED_KEY_FIRST, ELEMENT.PUSHED_KEY_LAST) == PUSHED
      and struct.unpack('>I8', sub(element, ELEMENT.PUSHED_MS_FIRST)) < oldest
  end

  -- Drops a bounded number of contents: the oldest if there are more than `most`, and those that were published before
  -- `oldest`. 0 means no limit. Returns the first index that the topic may still keep.
  local function retain(p, most, oldest)
    local first, last = unpack(call('HMGET', p .. ':meta', 'first', 'last'))
    first, last = tonumber(first or 1), tonumber(last or 0)
    local kept, read, before = call('HLEN', p .. ':content'), 0, first
    for _ = 1, DROPPED_AT_ONCE do
      local index = text(first)
      if first > last or read > READ_AT_ONCE then break end
      if call('HEXISTS', p .. ':left', index) == 1 then
        if most == 0 or kept <= most then
          local element = oldest > 0 and call('HGET', p .. ':content', index)
          if not element or not was_pushed_before(element, oldest) then break end
          read = read + #element
        end
        call('HDEL', p .. ':content', index)
        call('HDEL', p .. ':left', index)
        kept = kept - 1
      end
      first = first + 1
    end
    if first > before then call('HSET', p .. ':meta', 'first', text(first)) end
    return first
  end

  -- Removes entries from the head of a consumer's list while is_over(entry, n) returns true, but at most a bounded
  -- number. Returns the number of entries that it has removed.
  local function behead(p, name, is_over)
    local key, total, read = p .. '@' .. name .. ':refs', 0, 0
    while total < DROPPED_AT_ONCE and read <= READ_AT_ONCE do
      local fits = total > 0 and math.floor(READ_AT_ONCE / (read / total + 1)) or 1 -- An estimate from average size.
      local entries, n = call('LRANGE', key, 0, math.max(1, math.min(CHUNK, fits)) - 1), 0
      while n < #entries and is_over(entries[n + 1], total + n) do n, read = n + 1, read + #entries[n + 1] end
      if n == 0 then break end
      topic.release(p, { unpack(entries, 1, n) })
      call('LTRIM', key, n, -1)
      total = total + n
      if n < #entries then break end
    end
    return total
  end

  -- Removes dropped messages from the list of one consumer, and counts them as missed.
  local function sweep(p, name, first, most, oldest)
    local over = most > 0 and call('LLEN', p .. '@' .. name .. ':refs') - most or 0
    local dropped = behead(p, name, function(entry, n)
      if n < over then return true end
      if topic.is_reference(entry) then return tonumber(string.match(entry, '^%d+')) < first end
      return was_pushed_before(entry, oldest)
    end)
    if dropped > 0 then topic.missed(p, name, dropped) end
  end

  -- Sweeps some consumers, and other consumers in the next call. If another program has overwritten a key of one
  -- consumer, the other consumers are still swept.
  local function sweep_some(p, names, ...)
    local at = tonumber(call('HGET', p .. ':meta', 'swept') or 0)
    for _ = 1, math.min(SWEPT_AT_ONCE, #names) do
      at = at % #names + 1
      pcall(sweep, p, names[at], ...)
    end
    call('HSET', p .. ':meta', 'swept', at)
  end

  -- Deletes a bounded part of the data of a consumer that was removed. Returns true if no data are left.
  function topic.leave(p, name)
    local own = p .. '@' .. name
    behead(p, name, function() return true end)
    if call('EXISTS', own .. ':refs') == 1 then return false end
    local instance = call('ZRANGE', own .. ':consumers', 0, 0)[1]
    if instance then
      local taken = own .. ':taken:' .. instance
      local numbers = call('HKEYS', taken)
      for i = #numbers, CHUNK + 1, -1 do numbers[i] = nil end
      if #numbers > 0 then
        topic.release(p, call('HMGET', taken, unpack(numbers)))
        call('HDEL', taken, unpack(numbers))
      end
      if call('EXISTS', taken) == 0 then call('ZREM', own .. ':consumers', instance) end
      return false
    end
    call('UNLINK', own .. ':refs', own .. ':later', own .. ':state', own .. ':trials')
    call('SREM', p .. ':leaving', name)
    return true
  end

  local function tend(p, names, most, max_age)
    local oldest = max_age > 0 and now - max_age or 0
    local first = retain(p, most, oldest)
    if most > 0 or oldest > 0 then sweep_some(p, names, first, most, oldest) end
    local leaving = call('SMEMBERS', p .. ':leaving')
    if #leaving > 0 then topic.leave(p, leaving[now % #leaving + 1]) end
  end

  -- Does the work after each publish: retention, and the removal of consumers. It ignores errors. Otherwise the caller
  -- would think that the publish had failed, and repeat it.
  function topic.tend(...) pcall(tend, ...) end

  -- Gives a new consumer references to a bounded part of the kept messages, from the newest to the oldest. Returns true
  -- if no message is left.
  function topic.fill(p, name)
    local state = p .. '@' .. name .. ':state'
    local at = tonumber(call('HGET', state, 'fill') or 0)
    local first = tonumber(call('HGET', p .. ':meta', 'first') or 1)
    local ends, indexes, entries, more = math.max(first, at - DROPPED_AT_ONCE + 1), {}, {}, {}
    for index = at, ends, -1 do indexes[#indexes + 1] = text(index) end
    if #indexes > 0 then
      for i, left in ipairs(call('HMGET', p .. ':left', unpack(indexes))) do
        if left then
          entries[#entries + 1] = indexes[i]
          more[#more + 1], more[#more + 2] = indexes[i], text(left + 1)
        end
      end
    end
    if #entries > 0 then
      call('HSET', p .. ':left', unpack(more))
      call('LPUSH', p .. '@' .. name .. ':refs', unpack(entries))
    end
    if ends > first then
      call('HSET', state, 'fill', text(ends - 1))
      return false
    end
    call('HDEL', state, 'fill')
    return true
  end
end
