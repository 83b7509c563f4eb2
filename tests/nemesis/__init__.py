"""Seeded random schedules of faults against real processes; `python -m tests.nemesis --help` says how to run them."""
