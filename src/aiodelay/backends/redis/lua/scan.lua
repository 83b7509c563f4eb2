-- scan: names what stands in one set from a place on, however much stands at one place; writes nothing.
--@ base
-- ARGV[4] the set behind the tag: due:<lane>, or parked:<lane>:<address>
-- ARGV[5], ARGV[6] from which place on, epoch ms, and from which sequence on of what stands there
-- ARGV[7] so many, at most
-- Returns members and places by turns, in their order.
local KEY, PLACE, SEQUENCE, MOST = TAG .. ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])

local low, high = call('ZCOUNT', KEY, '-inf', '(' .. PLACE), call('ZCOUNT', KEY, '-inf', PLACE)
while low < high do
  local middle = floor((low + high) / 2)
  if unpack_bytes('>I6', call('ZRANGE', KEY, middle, middle)[1]) < SEQUENCE then
    low = middle + 1
  else
    high = middle
  end
end
return call('ZRANGE', KEY, low, low + MOST - 1, 'WITHSCORES')
