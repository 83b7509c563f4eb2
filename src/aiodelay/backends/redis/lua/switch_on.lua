-- switch_on: records that the namespace uses features from now on. The entry of a feature that is already in use stays.
--@ base
-- ARGV[4] the version of aiodelay that switches the features on
-- From ARGV[5] on: the names of the features.
-- Returns all features that are now in use, in the form of the field `features` of `meta`.
features = features or ''
local recorded = {}
for name in string.gmatch(features, '(%S+)=') do recorded[name] = true end
for a = 5, #ARGV do
  if not recorded[ARGV[a]] then features = features .. (features == '' and '' or ' ') .. ARGV[a] .. '=' .. ARGV[4] end
end
call('HSET', META, 'features', features)
return features
