-- topics: the `destination` of `transfer_topics`, which is a fan-out topic or one consumer of it. `transfer_topics`
-- describes ARGV[7].
local destination = { MOST_COST = topic.REFS_AT_ONCE, cost = 0 }
do
  local most_kept, max_age, inline = string.match(ARGV[7], '^(%d+) (%d+) (%d+)$')

  function destination.look_at(t)
    local name, consumer = string.match(t.address, '^([^@]*)@?(.*)$')
    t.topic = TAG .. 'fanout:' .. name
    local fault = topic.fault_of(t.topic)
    if fault then return fault, 0 end
    t.all = call('SMEMBERS', t.topic .. ':consumers')
    t.names, t.is_for_one = t.all, consumer ~= ''
    if t.is_for_one then
      t.names = call('SISMEMBER', t.topic .. ':consumers', consumer) == 1 and { consumer } or {}
    end
    t.cost = #t.names
    if #t.names == 0 then return topic.NOBODY, 0 end
    return topic.missing_right(t.topic, t.names[1]), math.huge
  end

  function destination.append(t, elements)
    topic.publish(t.topic, t.names, elements, t.is_for_one and math.huge or tonumber(inline))
    topic.tend(t.topic, t.all, tonumber(most_kept), tonumber(max_age))
  end
end
