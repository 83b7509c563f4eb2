-- known: refuses to dispatch while the namespace uses a feature that this version does not know. Part of the scripts
-- that dispatch. The error is: NEWER features, then each unknown one as <name>=<version of aiodelay that switched it
-- on>.
do
  local known, unknown = MARKER.KNOWN, {}
  for name, version in string.gmatch(call('HGET', META, 'features') or '', '(%S+)=(%S+)') do
    if not known[name] then unknown[#unknown + 1] = name .. '=' .. version end
  end
  if #unknown > 0 then return redis.error_reply('NEWER features ' .. table.concat(unknown, ' ')) end
end
