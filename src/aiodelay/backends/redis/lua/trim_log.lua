-- trim_log: drops entries from a log's head, a bounded number at a time.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] most messages to keep, 0 = any number
-- ARGV[3] for how long, ms, 0 = for ever
-- ARGV[4] '1': what all its consumers have passed is dropped
-- Returns the first and the last index, and 1 if nothing more is to be dropped; or why it cannot be.
local p = topic.of(KEYS[1])
local first, fault = topic.ends(p)
if not first then return redis.error_reply(fault) end
local is_over = topic.trim(p, tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]))
local last
first, last = topic.ends(p)
return { text(first), text(last), is_over and 1 or 0 }
