-- beat: records that a worker is alive and holds these suspects. Their leases may have ended.
--@ base record moves
-- ARGV[4] worker
-- Then the ids of the suspects.
-- Returns nothing.
local serves = call('HGET', WORKERS, ARGV[4])
local is_read, known = pcall(cmsgpack.unpack, serves or '')
if is_read and type(known) == 'table' then
  open_gate()
  known[1] = now
  call('HSET', WORKERS, ARGV[4], cmsgpack.pack(known))
  for a = 5, #ARGV do
    local kind, lease, _, worker = trials.of(ARGV[a])
    if worker == ARGV[4] then trials.write(ARGV[a], kind, lease, worker) end
  end
end
