-- logs: the `destination` of `transfer_logs`, which is a log or one consumer of it. `transfer_logs` describes ARGV[7].
local destination = { MOST_COST = 0, cost = 0 }
do
  local most_kept, max_age, passed = string.match(ARGV[7], '^(%d+) (%d+) (%d)$')

  function destination.look_at(t)
    local name, query = string.match(t.address, '^([^?]*)%??(.*)$')
    t.topic, t.consumer = TAG .. 'log:' .. name, nil
    for option, value in string.gmatch(query, '(%w+)=([^&]*)') do
      if option == 'consumer' or option == 'group' then t.consumer = value end
    end
    local first, fault = topic.ends(t.topic)
    if not first then return fault, 0 end
    if t.consumer and not topic.is_known(t.topic, t.consumer) then return topic.NOBODY, 0 end
    return nil, math.huge
  end

  function destination.append(t, elements)
    if t.consumer then
      local length = redis.pcall('RPUSH', t.topic .. '@' .. t.consumer .. ':refs', unpack(elements))
      return type(length) == 'table' and length.err or nil
    end
    local noted = redis.pcall('SADD', TAG .. 'logs', string.match(t.topic, '^[^}]*}:log:(.*)$'))
    if type(noted) == 'table' then return noted.err end
    local last, why = topic.append(t.topic, elements)
    if not last then return why end
    topic.tend(t.topic, tonumber(most_kept), tonumber(max_age), tonumber(passed))
    return nil
  end
end
