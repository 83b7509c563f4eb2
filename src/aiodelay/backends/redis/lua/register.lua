-- register: registers a consumer with a topic. It can also change whether a registered consumer keeps order.
--@ plain topic
-- KEYS[1] the content of the topic
-- KEYS[2] the set of the topics of the namespace
-- ARGV[2] the consumer
-- ARGV[3] '1' = the consumer keeps order: at most one of its messages is in flight
-- ARGV[4] 'oldest' = a new consumer also gets the messages that the topic keeps now; 'now' = only later messages
-- Returns 'new', 'known' if the consumer was registered already, 'more' if the caller must call again, or 'full' if the
-- topic has the largest number of consumers.
local p, name = topic.of(KEYS[1]), ARGV[2]
local state, answer = p .. '@' .. name .. ':state', 'known'

-- If the server is out of memory, a script may write only if its first command frees memory. This ZREM changes nothing,
-- but allows the later writes.
call('SREM', p .. ':leaving', '')
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
