-- register_log: makes a consumer known to a log, or changes whether it keeps order.
--@ plain log
-- KEYS[1] the log
-- KEYS[2] the logs of the namespace
-- ARGV[2] the consumer
-- ARGV[3] '1': it keeps order: one message is in flight at a time
-- ARGV[4] the index with which it begins, 'oldest' or 'now'; of one that is known, nothing
-- Returns 'new', 'known', or 'full' if the log has as many as may be; or why it cannot be.
local p, name, start = topic.of(KEYS[1]), ARGV[2], ARGV[4]
local state, is_known = p .. '@' .. name .. ':state', topic.is_known(p, name)

call('SREM', KEYS[2], '') -- under OOM a script may write only if its first write frees memory
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
