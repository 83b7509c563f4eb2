"""The programs of aiodelay and its peers: `python -m benchmarks.peers.programs.NAME schedule|work`.

`schedule` reads messages from standard input, schedules them and ends. `work` handles messages until it is killed.
"""
