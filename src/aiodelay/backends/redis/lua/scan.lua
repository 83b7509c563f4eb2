-- scan: lists the members of one set from a place and a sequence number on, even if many members have the same place.
-- It writes nothing.
--@ base
-- ARGV[4] the name of the set after the tag: due:<lane>, or parked:<lane>:<address>
-- ARGV[5], ARGV[6] the first place, epoch ms, and the first sequence number at that place
-- ARGV[7] the most members to list
-- Returns members and places in turn, in the order of the set.
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
