-- look: reads messages by id. It writes nothing.
--@ base record moves
-- From ARGV[4] on: ids.
-- Returns now, the members of `holds` and the blocked addresses in the same form, then for each id its value ('' = no
-- such message) and its token ('' = not leased). If the messages are large, it returns fewer. The caller then asks
-- again for the other ids.
local held, seen = call('SMEMBERS', HOLDS), {}
local answer = { text(now), held }

local function add_blocked(n)
  seen[n] = true
  for _, address in ipairs(call('ZRANGE', blocked_key(n), 0, -1)) do held[#held + 1] = n .. ':' .. address end
end

local bytes = 0
for a = 4, #ARGV do
  if bytes >= MOST_BYTES then break end
  local e = load(ARGV[a])
  bytes = bytes + (e and #e.value or 0)
  if e and not seen[e.lane] then add_blocked(e.lane) end
  local token = e and token_of(e)
  answer[#answer + 1] = e and e.value or ''
  answer[#answer + 1] = token and text(token) or ''
end
return answer
