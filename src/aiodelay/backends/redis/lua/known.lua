-- known: refuses to dispatch while a feature is in use that these scripts do not know; part of the scripts that dispatch.
-- Returns an error then: NEWER features, and each of these as <name>=<version of aiodelay that switched it on>.
do
  local known, unknown = MARKER.KNOWN, {}
  for name, version in string.gmatch(call('HGET', META, 'features') or '', '(%S+)=(%S+)') do
    if not known[name] then unknown[#unknown + 1] = name .. '=' .. version end
  end
  if #unknown > 0 then return redis.error_reply('NEWER features ' .. table.concat(unknown, ' ')) end
end
