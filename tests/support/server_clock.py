"""Step the clock of a Redis server, with a small C library that replaces the system's clock functions.

Without a C compiler, the store gets a clock instead, and its scripts use that clock. This tests the same code, except
for the command TIME.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiodelay.testing.servers import RedisServer

__all__ = ["FileClock", "ServerClock", "SteppedClock", "clock_shim", "serving_with_clock"]

NOTICES_S = 60.0
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long long *offset_ns;
__attribute__((constructor)) static void start(void) {
  const char *path = getenv("CLOCK_SHIM");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *seen = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (seen != MAP_FAILED) offset_ns = seen;
}
static void add(struct timespec *t) {
  if (!offset_ns) return;
  long long ns = (long long)t->tv_sec * 1000000000LL + t->tv_nsec + *offset_ns;
  t->tv_sec = ns / 1000000000LL;
  t->tv_nsec = ns % 1000000000LL;
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int failed = syscall(SYS_clock_gettime, id, t);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) add(t);
  return failed;
}
int gettimeofday(struct timeval *tv, void *zone) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  tv->tv_sec = t.tv_sec;
  tv->tv_usec = t.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""


class SteppedClock:
    """The clock of the machine plus an offset."""

    def __init__(self, offset_s: float = 0) -> None:
        self.offset_ns = int(offset_s * 1e9)

    def now_ms(self) -> int:
        return (time.time_ns() + self.offset_ns) // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at_ms: int) -> float:
        return (at_ms * 1_000_000 - time.time_ns() - self.offset_ns) / 1e9


class FileClock(SteppedClock):
    """A stepped clock that several processes share, because its offset is in a file of 8 bytes."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)

    @property
    def offset_ns(self) -> int:
        return int(struct.unpack("=q", self._shared[:8])[0])

    @offset_ns.setter
    def offset_ns(self, value: int) -> None:
        self._shared[:8] = struct.pack("=q", value)


class ServerClock:
    """The clock of a server.

    Attributes:
        clock: The clock for stores; None if the server's own clock can be stepped.
    """

    def __init__(self, server: RedisServer, stepped: SteppedClock, *, has_shim: bool) -> None:
        self.server, self._stepped, self._has_shim = server, stepped, has_shim
        self.clock = None if has_shim else stepped

    def step(self, seconds: float) -> None:
        """Set the clock forwards or backwards. Return when the server, which reads it now and then, has noticed."""
        self._stepped.offset_ns += int(seconds * 1e9)
        if not self._has_shim:
            return
        deadline = time.monotonic() + NOTICES_S
        while abs(self._told_ms() - self.now_ms()) > 1_000:
            assert time.monotonic() < deadline, "the server did not notice that its clock was set"
            time.sleep(0.01)

    def _told_ms(self) -> int:
        return int(self.server.command("EVAL", "return tonumber(redis.call('TIME')[1])", "0")[1:]) * 1_000

    def now_ms(self) -> int:
        """Return the time of this clock, in epoch ms."""
        return self._stepped.now_ms()


def clock_shim(folder: Path) -> tuple[FileClock, dict[str, str]]:
    """Return a clock, and the environment variables with which a program has this clock; none without a compiler.

    Args:
        folder: The folder for the library and for the file `offset` of the clock.
    """
    library, state, source = (folder / name for name in ("shim.so", "offset", "shim.c"))
    clock = FileClock(state)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return clock, {}
    source.write_text(SHIM)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return clock, {"LD_PRELOAD": str(library), "CLOCK_SHIM": str(state)}


@contextmanager
def serving_with_clock(program: str, folder: Path) -> Iterator[ServerClock]:
    """Start a server whose clock can be stepped."""
    clock, environment = clock_shim(folder)
    server = RedisServer(program, environment=environment)
    try:
        server.start()
        yield ServerClock(server, clock, has_shim=bool(environment))
    finally:
        server.stop()
