-- seek_log: moves a consumer of a log to another index. Messages in flight and retries are not affected.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the consumer
-- ARGV[3] its next index, 'oldest' or 'now'
-- ARGV[4] '1' = a commit of the consumer itself: move it only forward
-- Returns the next index; '' if no consumer of that name is registered. If the key is not a log, an error.
local p, name = topic.of(KEYS[1]), ARGV[2]
local first, fault = topic.ends(p)
if not first then return redis.error_reply(fault) end
if not topic.is_known(p, name) then return '' end
if ARGV[4] == '1' then call('HSET', p .. '@' .. name .. ':state', 'seen', text(now)) end
return text(topic.place(p, name, ARGV[3], ARGV[4] == '1'))
