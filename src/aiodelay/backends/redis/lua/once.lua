-- once: recognises delivery ids that were published within the last 10 minutes, so that no message is published twice.
-- `publish` and `append` contain this part.

-- Reads `count` pairs from ARGV[from] on: delivery id ('' = always new) and element. Returns three values: the new
-- elements, with the time of the push at their ends; a string with a letter for each pair, 'n' new or 'k' known; and a
-- function that remembers the new ids. Call this function after the elements are published.
local function new_elements(p, from, count)
  local SEEN_MS = 300000
  local function seen_key(n) return p .. ':seen:' .. text(math.floor(now / SEEN_MS) - n) end

  local ids, fresh = {}, {}
  for i = 1, count do ids[i], fresh[i] = ARGV[from + 2 * i - 2], true end
  for n = 0, 2 do
    for i, is_member in ipairs(call('SMISMEMBER', seen_key(n), unpack(ids))) do
      if is_member == 1 then fresh[i] = false end
    end
  end
  local elements, new, twice, letters = {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    letters[i] = 'k'
    if id == '' or (fresh[i] and not twice[id]) then
      letters[i] = 'n'
      elements[#elements + 1] = ARGV[from + 2 * i - 1] .. struct.pack('>I8', now)
      if id ~= '' then
        new[#new + 1], twice[id] = id, true
      end
    end
  end
  return elements, table.concat(letters), function()
    if #new == 0 then return end
    call('SADD', seen_key(0), unpack(new))
    call('PEXPIRE', seen_key(0), 3 * SEEN_MS)
  end
end
