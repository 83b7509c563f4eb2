-- look: reads messages as they stand; writes nothing.
--@ base record memory moves
-- From ARGV[4] on: ids.
-- Returns now, what is held (as in `holds`), then the value ('' = there is none) and the token ('' = it is not leased)
-- of each.
local answer = { text(now), call('SMEMBERS', HOLDS) }
for a = 4, #ARGV do
  local e = load(ARGV[a])
  local token = e and token_of(e)
  answer[#answer + 1] = e and e.value or ''
  answer[#answer + 1] = token and text(token) or ''
end
return answer
