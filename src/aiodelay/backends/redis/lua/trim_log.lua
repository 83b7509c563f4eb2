-- trim_log: drops the oldest entries of a log. One call drops a bounded number.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the largest number of entries to keep; 0 = no limit
-- ARGV[3] the largest age of an entry, ms; 0 = no limit
-- ARGV[4] '1' = drop the entries that all consumers have passed
-- Returns the first and the last index, and 1 if there is nothing more to drop, else 0. If the key is not a log,
-- returns an error.
local p = topic.of(KEYS[1])
local first, fault = topic.ends(p)
if not first then return redis.error_reply(fault) end
local is_over = topic.trim(p, tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]))
local last
first, last = topic.ends(p)
return { text(first), text(last), is_over and 1 or 0 }
