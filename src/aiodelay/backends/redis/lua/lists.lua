-- lists: the `destination` of `transfer`, which is a list. `transfer` describes ARGV[7].
local destination = { MOST_COST = 0, cost = 0, most = string.match(ARGV[7], '^%d+') }
destination.FULL, destination.is_shared = 'full: ' .. destination.most .. ' elements', destination.most ~= ARGV[7]

function destination.look_at(t)
  local key, options = string.match(t.address, '^([^?]*)(.*)$')
  t.key, t.is_raw = key, options == '?format=raw'
  t.is_elsewhere = destination.is_shared and not slot.has(key)
  if t.is_elsewhere then return nil, math.huge end
  if sub(key, 1, #TAG) == TAG then return 'its key is one of this namespace', 0 end
  local length, most = redis.pcall('LLEN', key), tonumber(destination.most)
  if type(length) == 'table' then return length.err, 0 end
  return nil, most > 0 and most - length or math.huge
end

function destination.append(t, elements)
  local length = redis.pcall('RPUSH', t.key, unpack(elements))
  return type(length) == 'table' and length.err or nil
end
