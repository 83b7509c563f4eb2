-- find_log: searches a log for the first entry that was appended at or after a time. It may need several calls.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the time, epoch ms
-- ARGV[3], ARGV[4] the two indexes that the last call returned; '' in the first call
-- Returns two indexes. The entry is between them. If they are equal, they are the index of the entry. If the key is not
-- a log, returns an error.
local p = topic.of(KEYS[1])
local first, last = topic.ends(p)
if not first then return redis.error_reply(last) end
local low, high = tonumber(ARGV[3]) or first, tonumber(ARGV[4]) or last + 1
low, high = topic.search(p, tonumber(ARGV[2]), low, high, 1048576)
return { text(low), text(high) }
