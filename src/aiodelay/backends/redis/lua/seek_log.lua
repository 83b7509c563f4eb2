-- seek_log: moves a consumer of a log to another index. Messages in flight and retries stay as they are.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the consumer
-- ARGV[3] the index of its next entry, 'oldest' or 'now'
-- ARGV[4] '1' = the consumer itself commits: never move it back
-- Returns the index of its next entry, or '' if no consumer with that name is registered. If the key is not a log,
-- returns an error.
local p, name = topic.of(KEYS[1]), ARGV[2]
local first, fault = topic.ends(p)
if not first then return redis.error_reply(fault) end
if not topic.is_known(p, name) then return '' end
if ARGV[4] == '1' then call('HSET', p .. '@' .. name .. ':state', 'seen', text(now)) end
return text(topic.place(p, name, ARGV[3], ARGV[4] == '1'))
