-- seek_log: has a consumer of a log go on elsewhere; what it has taken, or is to try again, goes on beside that.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the consumer
-- ARGV[3] the index with which it goes on, 'oldest' or 'now'
-- ARGV[4] '1': only forward, by the consumer itself
-- Returns the index, '' if nobody of that name is registered; or why it cannot be.
local p, name = topic.of(KEYS[1]), ARGV[2]
local first, fault = topic.ends(p)
if not first then return redis.error_reply(fault) end
if not topic.is_known(p, name) then return '' end
if ARGV[4] == '1' then call('HSET', p .. '@' .. name .. ':state', 'seen', text(now)) end
return text(topic.place(p, name, ARGV[3], ARGV[4] == '1'))
