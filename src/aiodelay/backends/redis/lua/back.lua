-- back: stores messages that had left the store. Their revisions do not change.
--@ base record moves
-- From ARGV[4] on, 5 arguments for each message: id, lane, place, reason ('' = a retry, else a dead letter), record.
-- Returns one answer for each message: 's' stored or 'k' kept, with revision u48 and due u48; 'L' too many lanes.
local answers = {}

local function answer(letter, e) return letter .. u48(e.revision) .. u48(e.due) end

-- Returns true if a newer version of the message has ended, as far as the store remembers.
local function has_ended_newer(e)
  local revision, version = memory.recall_revision(e.id), e.version and memory.recall_version(e.id)
  return (revision and revision > e.revision) or (version and memory.is_newer(version, e.version))
end

local function put_back(a)
  local lane = known_lane(ARGV[a + 1]) or new_lane(ARGV[a + 1])
  if not lane then return 'L' end
  local e = parse(ARGV[a], u48(0) .. ARGV[a + 4])
  e.lane = lane
  body_of(e)
  if ARGV[a + 3] ~= '' then
    if call('HEXISTS', DEAD, e.id .. u48(e.revision)) == 1 then return answer('k', e) end
    dead.bury(e, ARGV[a + 3])
    return answer('s', e)
  end
  local there = load(e.id)
  if there then return answer('k', there) end
  if has_ended_newer(e) then return answer('k', e) end
  insert(e, math.max(tonumber(ARGV[a + 2]), e.due))
  if byte(e.id) == OCCURRENCE then occurrences.list_apart(e.id) end
  local error_text = fields.get(e, BODY.LAST_ERROR)
  note('again', e, error_text and cmsgpack.unpack(error_text))
  return answer('s', e)
end

for a = 4, #ARGV, 5 do -- Check all records before the first write.
  if not parse(ARGV[a], u48(0) .. ARGV[a + 4]) then error('back: a record cannot be read') end
end
for a = 4, #ARGV, 5 do answers[#answers + 1] = put_back(a) end
finish(true)
return answers
