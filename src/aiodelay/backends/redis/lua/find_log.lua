-- find_log: narrows down from where on entries of a log were appended at or after a time.
--@ plain log
-- KEYS[1] the log
-- ARGV[2] the time, epoch ms
-- ARGV[3] '' at first, then the two indexes that the last call returned
-- ARGV[4] the second of them
-- Returns two indexes, which are equal once it is found; or why it cannot be.
local p = topic.of(KEYS[1])
local first, last = topic.ends(p)
if not first then return redis.error_reply(last) end
local low, high = tonumber(ARGV[3]) or first, tonumber(ARGV[4]) or last + 1
low, high = topic.search(p, tonumber(ARGV[2]), low, high, 1048576)
return { text(low), text(high) }
