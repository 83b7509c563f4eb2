-- superseded: claims of messages that were replaced while they were in flight.
--
-- The sorted set CLAIMS holds the token of each claim until the claim is settled or its lease has ended. The hash
-- VERSIONS lists the claims by id. It lists the claim of a retry under the id of the series, with the due time of the
-- occurrence.
superseded.CLAIMS, superseded.VERSIONS = TAG .. 'superseded', TAG .. 'superseded:ids'
superseded.ITSELF = string.rep('\255', OCCURRENCE_ID.DUE_SIZE)

-- Returns two values: the id under which VERSIONS lists a message; and the due time of an occurrence, or ITSELF for any
-- other message.
function superseded.split(id)
  if byte(id) ~= OCCURRENCE then return id, superseded.ITSELF end
  return sub(id, OCCURRENCE_ID.SERIES_FIRST, OCCURRENCE_ID.SERIES_LAST), sub(id, OCCURRENCE_ID.DUE_FIRST)
end

-- Records the claim of a message that a command replaces. Call this before the message leaves `leased`.
function superseded.add(e)
  if not token_of(e) then return end
  if limited and is_limited(e.lane) then limits.supersede(e) end
  local id, due = superseded.split(e.id)
  call('ZADD', superseded.CLAIMS, text(e.token), u48(e.revision) .. e.id)
  parts.add(superseded.VERSIONS, id, u48(e.revision) .. due)
end

function superseded.is_any(id)
  local listed, wanted = superseded.split(id)
  local known = call('HGET', superseded.VERSIONS, listed) or ''
  for at = 0, #known - 1, SUPERSEDED_VERSION.SIZE do
    local revision = sub(known, at + SUPERSEDED_VERSION.REVISION_FIRST, at + SUPERSEDED_VERSION.REVISION_LAST)
    local due = sub(known, at + SUPERSEDED_VERSION.DUE_FIRST, at + SUPERSEDED_VERSION.DUE_LAST)
    local of = due == superseded.ITSELF and listed or occurrences.id(listed, due)
    local token = tonumber(call('ZSCORE', superseded.CLAIMS, revision .. of))
    if token and token >= tokens.LEAST and (wanted == superseded.ITSELF or wanted == due) then return true end
  end
  return false
end

-- Forgets a superseded claim. `name` is its member of CLAIMS: a revision u48 and an id.
function superseded.forget(name)
  local id, due = superseded.split(sub(name, SUPERSEDED.ID_FIRST))
  call('ZREM', superseded.CLAIMS, name)
  if limited then limits.end_superseded(name) end
  parts.remove(superseded.VERSIONS, id, sub(name, SUPERSEDED.REVISION_FIRST, SUPERSEDED.REVISION_LAST) .. due)
end

-- Ends a superseded claim. Returns true if the claim existed and had this token.
function superseded.settle(id, revision, token)
  local name = u48(revision) .. id
  local is_held = tonumber(call('ZSCORE', superseded.CLAIMS, name)) == token
  if is_held then superseded.forget(name) end
  return is_held
end

-- Renews a superseded claim. Returns true if the claim existed and had this token.
function superseded.renew(id, revision, token, to)
  local name = u48(revision) .. id
  local held = tonumber(call('ZSCORE', superseded.CLAIMS, name))
  if held ~= token and held ~= to then return false end
  call('ZADD', superseded.CLAIMS, text(to), name)
  return true
end

function superseded.forget_lapsed(limit)
  for _, name in ipairs(tokens.over(superseded.CLAIMS, limit)) do superseded.forget(name) end
end
