"""The tests. They are a package, so that `tests.support` means this folder and no other `tests` on the path."""
