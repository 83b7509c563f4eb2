-- unregister_log: removes a consumer of a log, with the messages that it has taken and its retries.
--@ plain log
-- KEYS[1] the log
-- KEYS[2] the set of the logs of the namespace
-- ARGV[2] the consumer
-- Returns 'gone' or 'unknown'.
local p, own = topic.of(KEYS[1]), topic.of(KEYS[1]) .. '@' .. ARGV[2]

for _, instance in ipairs(call('ZRANGE', own .. ':consumers', 0, -1)) do call('UNLINK', own .. ':taken:' .. instance) end
call('UNLINK', own .. ':refs', own .. ':consumers', own .. ':later', own .. ':state', own .. ':open',
  own .. ':trials')
local is_known = call('ZREM', p .. ':consumers', ARGV[2]) == 1
if call('EXISTS', p, p .. ':consumers') == 0 then call('SREM', KEYS[2], string.match(p, '^[^}]*}:log:(.*)$')) end
return is_known and 'gone' or 'unknown'
