-- lists: the `destination` of `transfer`, which is a list. ARGV[7] is the largest number of elements in a list; 0 =
-- no limit.
local destination = { FULL = 'full: ' .. ARGV[7] .. ' elements', MOST_COST = 0, cost = 0 }

function destination.look_at(t)
  local key, options = string.match(t.address, '^([^?]*)(.*)$')
  t.key, t.is_raw = key, options == '?format=raw'
  if sub(key, 1, #TAG) == TAG then return 'its key is one of this namespace', 0 end
  local length, most = redis.pcall('LLEN', key), tonumber(ARGV[7])
  if type(length) == 'table' then return length.err, 0 end
  return nil, most > 0 and most - length or math.huge
end

function destination.append(t, elements)
  local length = redis.pcall('RPUSH', t.key, unpack(elements))
  return type(length) == 'table' and length.err or nil
end
