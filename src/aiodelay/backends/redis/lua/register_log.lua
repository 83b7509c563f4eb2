-- register_log: registers a consumer with a log. It can also change whether a registered consumer keeps order.
--@ plain log
-- KEYS[1] the log
-- KEYS[2] the set of the logs of the namespace
-- ARGV[2] the consumer
-- ARGV[3] '1' = the consumer keeps order: at most one of its messages is in flight
-- ARGV[4] the start of a new consumer: an index, 'oldest' or 'now'
-- Returns 'new', 'known' if the consumer was registered already, 'full' if the log has the largest number of consumers,
-- or the reason why the key is not a log.
local p, name, start = topic.of(KEYS[1]), ARGV[2], ARGV[4]
local state, is_known = p .. '@' .. name .. ':state', topic.is_known(p, name)

-- If the server is out of memory, a script may write only if its first command frees memory. This ZREM changes nothing,
-- but allows the later writes.
call('SREM', KEYS[2], '')
if not is_known then
  local first, last = topic.ends(p)
  if not first then return last end
  if call('ZCARD', p .. ':consumers') >= topic.MOST_CONSUMERS then return 'full' end
  topic.place(p, name, start)
  call('SADD', KEYS[2], string.match(p, '^[^}]*}:log:(.*)$'))
  call('HSET', state, 'since', text(now))
end
call('HSET', state, 'ordered', ARGV[3])
return is_known and 'known' or 'new'
