-- unregister: removes a consumer of a topic. It deletes the messages that no other consumer needs.
--@ plain topic
-- KEYS[1] the content of the topic
-- KEYS[2] the set of the topics of the namespace
-- ARGV[2] the consumer
-- Returns 'gone', 'unknown', or 'more' if the caller must call again. If the caller does not call again, later
-- publishing to the topic finishes the removal.
local p, name = topic.of(KEYS[1]), ARGV[2]
local is_known = call('SREM', p .. ':consumers', name) == 1

if is_known then call('SADD', p .. ':leaving', name) end
if call('SISMEMBER', p .. ':leaving', name) == 0 then return 'unknown' end
if not topic.leave(p, name) then return 'more' end
if call('SCARD', p .. ':consumers') == 0 and call('EXISTS', p .. ':leaving') == 0 then
  call('SREM', KEYS[2], sub(p, #KEYS[2] - #'topics' + 1))
end
return 'gone'
