-- beat_source: records that the process of a consumer is alive and holds its suspects. Its lease may have ended.
--@ plain taken
-- Returns nothing.
call('ZREM', CONSUMERS, '')
local lease, _, first, last, doubt = trials.of(ARGV[2])
if lease then trials.write(ARGV[2], lease, now, first, last, doubt) end
