-- switch_on: records features as in use from now on; a feature that is in use already keeps its record.
--@ base
-- ARGV[4] the version of aiodelay that switches them on
-- From ARGV[5] on: their names.
-- Returns all that are in use now, as `meta` holds them.
local features = call('HGET', META, 'features') or ''
local recorded = {}
for name in string.gmatch(features, '(%S+)=') do recorded[name] = true end
for a = 5, #ARGV do
  if not recorded[ARGV[a]] then features = features .. (features == '' and '' or ' ') .. ARGV[a] .. '=' .. ARGV[4] end
end
call('HSET', META, 'features', features)
return features
