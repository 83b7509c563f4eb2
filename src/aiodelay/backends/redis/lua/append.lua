-- append: appends messages to a log, or gives them to one of its consumers.
--@ plain log once
-- KEYS[1] the log
-- KEYS[2] the logs of the namespace
-- ARGV[2] whom, '' = the log
-- ARGV[3] most messages that the log may keep, 0 = any number
-- ARGV[4] for how long, ms, 0 = for ever
-- ARGV[5] '1': what all its consumers have passed is dropped
-- From ARGV[6] on, 2 arguments each: delivery id, '' = none: what was appended under it within 10 minutes is not appended
--   again; element, without the time of its push.
-- Returns the last index before them, and a letter for each: 'n' appended, 'k' it was known; or why nothing can be.
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
