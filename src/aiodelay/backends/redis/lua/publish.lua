-- publish: gives messages to a topic's consumers, to all or to one; each message to all of them or to none.
--@ plain topic once
-- KEYS[1] the topic's content
-- ARGV[2] whom, '' = all consumers
-- ARGV[3] most messages that the topic may keep, 0 = any number
-- ARGV[4] for how long, ms, 0 = for ever
-- ARGV[5] elements smaller than so many bytes are given to each consumer themselves
-- From ARGV[6] on, 2 arguments each: delivery id, '' = none: what was published under it within 10 minutes is not
--   published again; element, without the time of its push.
-- Returns how many are published, the first of those given; or why nothing can be.
local p = topic.of(KEYS[1])
local fault = topic.fault_of(p)
if fault then return fault end
local names = { ARGV[2] }
if ARGV[2] == '' then
  names = call('SMEMBERS', p .. ':consumers')
elseif call('SISMEMBER', p .. ':consumers', ARGV[2]) == 0 then
  names = {}
end
if #names == 0 then return topic.NOBODY end
local missing = topic.missing_right(p, names[1])
if missing then return missing end

local count = math.min((#ARGV - 5) / 2, math.max(1, math.floor(topic.REFS_AT_ONCE / #names)))
local elements, _, remember = new_elements(p, 6, count)
if #elements > 0 then
  topic.publish(p, names, elements, ARGV[2] == '' and tonumber(ARGV[5]) or math.huge)
  remember()
  topic.tend(p, ARGV[2] == '' and names or call('SMEMBERS', p .. ':consumers'), tonumber(ARGV[3]), tonumber(ARGV[4]))
end
return count
