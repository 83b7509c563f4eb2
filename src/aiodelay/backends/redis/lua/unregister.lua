-- unregister: forgets a consumer: at once it is given nothing more, and what only it had not settled is freed.
--@ plain topic
-- KEYS[1] the topic's content
-- KEYS[2] the topics of the namespace
-- ARGV[2] the consumer
-- Returns 'gone' or 'unknown'; 'more' if it is to be called again, though publishing goes on with it as well.
local p, name = topic.of(KEYS[1]), ARGV[2]
local is_known = call('SREM', p .. ':consumers', name) == 1

if is_known then call('SADD', p .. ':leaving', name) end
if call('SISMEMBER', p .. ':leaving', name) == 0 then return 'unknown' end
if not topic.leave(p, name) then return 'more' end
if call('SCARD', p .. ':consumers') == 0 and call('EXISTS', p .. ':leaving') == 0 then
  call('SREM', KEYS[2], sub(p, #KEYS[2] - #'topics' + 1))
end
return 'gone'
