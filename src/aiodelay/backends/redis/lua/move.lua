-- move: carries out one write of `aiodelay reshard`, unless a later mover has written into the shard.
-- KEYS[1] the key `meta` of the shard
-- ARGV[1] the number of the mover. A later mover of the namespace has a larger number.
-- ARGV[2] the name of the command
-- From ARGV[3] on: the arguments of the command. All its keys are in the shard.
-- Returns 1, or 0 if a later mover has written into the shard. Then nothing has changed.
if tonumber(redis.call('HGET', KEYS[1], 'mover') or 0) > tonumber(ARGV[1]) then return 0 end
redis.call(unpack(ARGV, 2))
-- This comes last: a server without memory refuses a write, unless an earlier command of the script has freed memory.
redis.call('HSET', KEYS[1], 'mover', ARGV[1])
return 1
