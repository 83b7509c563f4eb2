-- known: refuses to dispatch if the namespace uses a feature that this version does not know. The scripts that dispatch
-- contain this part. The error is NEWER features, then <name>=<version> for each unknown feature. <version> is the
-- version of aiodelay that switched the feature on.
do
  local known, unknown = MARKER.KNOWN, {}
  for name, version in string.gmatch(features or '', '(%S+)=(%S+)') do
    if not known[name] then unknown[#unknown + 1] = name .. '=' .. version end
  end
  if #unknown > 0 then return redis.error_reply('NEWER features ' .. table.concat(unknown, ' ')) end
end
