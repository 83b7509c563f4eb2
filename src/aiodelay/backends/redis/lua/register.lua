-- register: makes a consumer known to a topic, or changes whether it keeps order; repeated until its answer is not 'more'.
--@ plain topic
-- KEYS[1] the topic's content
-- KEYS[2] the topics of the namespace
-- ARGV[2] the consumer
-- ARGV[3] '1': it keeps order: one message is in flight at a time
-- ARGV[4] 'oldest': it begins with what is kept, else with what is published from now on; of one that is known, nothing
-- Returns 'new' or 'known'; 'more' if it is to be called again; 'full' if the topic has as many as may be.
local p, name = topic.of(KEYS[1]), ARGV[2]
local state, answer = p .. '@' .. name .. ':state', 'known'

call('SREM', p .. ':leaving', '') -- under OOM a script may write only if its first write frees memory
if call('SISMEMBER', p .. ':leaving', name) == 1 and not topic.leave(p, name) then return 'more' end
if call('SISMEMBER', p .. ':consumers', name) == 0 then
  if call('SCARD', p .. ':consumers') >= topic.MOST_CONSUMERS then return 'full' end
  answer = 'new'
  call('SADD', p .. ':consumers', name)
  call('SADD', KEYS[2], sub(p, #KEYS[2] - #'topics' + 1))
  call('HSET', state, 'since', text(now))
  if ARGV[4] == 'oldest' then call('HSET', state, 'fill', call('HGET', p .. ':meta', 'last') or '0') end
end
call('HSET', state, 'ordered', ARGV[3])
if call('HEXISTS', state, 'fill') == 1 and not topic.fill(p, name) then return 'more' end
return answer
