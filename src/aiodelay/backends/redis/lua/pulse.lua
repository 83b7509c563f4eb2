-- pulse: increases the number of a process that holds claims, and returns the numbers of all processes.
--@ base pulses
-- ARGV[4] incarnation
-- ARGV[5] the last number that the store has answered to the process
-- ARGV[6] the smallest token of the claims that the process holds; '' = it holds none
-- Returns the new number, or -1 if the incarnation was declared dead; then incarnation and number of each process.
local number = pulses.DEAD
if pulses.lives(ARGV[4], ARGV[5]) then
  open_gate()
  number = call('HINCRBY', pulses.KEY, ARGV[4], 1)
  pulses.forget(ARGV[4], ARGV[6])
end
return { number, call('HGETALL', pulses.KEY) }
