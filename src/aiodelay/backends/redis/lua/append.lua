-- append: appends messages to a log, or gives them to one consumer of the log.
--@ plain log once
-- KEYS[1] the log
-- KEYS[2] the set of the logs of the namespace
-- ARGV[2] the consumer; '' = append to the log
-- ARGV[3] the largest number of entries that the log keeps; 0 = no limit
-- ARGV[4] the largest age of an entry, ms; 0 = no limit
-- ARGV[5] '1' = drop the entries that all consumers have passed
-- From ARGV[6] on, 2 arguments for each message: delivery id, and element without the time of the push. The script does
-- not append a delivery id again that it has appended within the last 10 minutes. '' = no delivery id.
-- Returns two values: the last index before these messages; and a string with a letter for each message, 'n' appended
-- or 'k' already known. If the log takes nothing, returns the reason instead.
local p, name = topic.of(KEYS[1]), ARGV[2]
local first, fault = topic.ends(p)
if not first then return fault end
if name ~= '' and not topic.is_known(p, name) then return topic.NOBODY end
local elements, letters, remember = new_elements(p, 6, (#ARGV - 5) / 2)
if #elements == 0 then return { '0', letters } end
local last, why = 0, nil
if name ~= '' then
  call('RPUSH', p .. '@' .. name .. ':refs', unpack(elements))
else
  call('SADD', KEYS[2], string.match(p, '^[^}]*}:log:(.*)$'))
  last, why = topic.append(p, elements)
  if not last then return why end
end
remember()
topic.tend(p, tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]))
return { text(last), letters }
