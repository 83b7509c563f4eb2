-- parts: hash fields whose values are lists. Such a value is a row of parts with the same length.

function parts.add(key, name, part)
  call('HSET', key, name, (call('HGET', key, name) or '') .. part)
end

function parts.remove(key, name, part)
  local known, left = call('HGET', key, name), ''
  if not known then return end
  for at = 1, #known, #part do
    local each = sub(known, at, at + #part - 1)
    if each ~= part then left = left .. each end
  end
  if left == '' then call('HDEL', key, name) else call('HSET', key, name, left) end
end
