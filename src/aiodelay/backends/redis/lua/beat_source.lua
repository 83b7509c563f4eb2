-- beat_source: notes that a consumer's process lives and holds the suspects that it tries, though its lease may be over.
--@ plain taken
-- Returns nothing.
call('ZREM', CONSUMERS, '')
local lease, _, first, last, doubt = trials.of(ARGV[2])
if lease then trials.write(ARGV[2], lease, now, first, last, doubt) end
