-- publish: gives messages to all consumers of a topic, or to one consumer. All of them get a message, or none does.
--@ plain topic once
-- KEYS[1] the content of the topic
-- ARGV[2] the consumer; '' = all consumers
-- ARGV[3] the largest number of messages that the topic keeps; 0 = no limit
-- ARGV[4] the largest age of a message, ms; 0 = no limit
-- ARGV[5] a size in bytes. If an element is smaller, each consumer gets a copy of it.
-- From ARGV[6] on, 2 arguments for each message: delivery id, and element without the time of the push. The script does
-- not publish a delivery id again that it has published within the last 10 minutes. '' = no delivery id.
-- Returns how many messages were published, from the first one on. If the topic takes nothing, returns the reason
-- instead.
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
