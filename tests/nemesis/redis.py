"""`RedisStage`: a primary and a replica. Proxies stand between clients and primary, and between primary and replica."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from typing import ClassVar

from aiodelay.testing import history as h
from tests.faults.scene import RedisScene
from tests.support.proxy import Mode, proxied_by_thread
from tests.support.server_clock import clock_shim
from tests.support.servers import RedisServer, redis_programs, replicate, replicated_until_ns

from .checked import CLOCK_STEPPED, CheckedStage
from .schedule import Fault, Kind
from .stage import CLIENTS, PROCESS_KINDS, SERVICES, Act, Acts

__all__ = ["RedisStage", "ValkeyStage"]

OPTIONS = (
    *("--appendfsync", "always", "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
    *("--client-output-buffer-limit", "replica 0 0 0"),
)
LITTLE_MEMORY = "1mb"
"""Less than a server uses with an empty store."""


class RedisStage(CheckedStage):
    scene: RedisScene
    name = "redis"
    kinds: ClassVar[tuple[Kind, ...]] = (
        *PROCESS_KINDS,
        CLOCK_STEPPED,
        Kind("server killed", "server", lasts_s=(0.1, 4.0)),
        Kind("server stopped", "server", lasts_s=(0.3, 6.0)),
        Kind("failover", "server", lasts_s=(0.1, 2.0)),
        Kind("disk full", "server", lasts_s=(0.5, 3.0)),
        Kind("memory limit", "server", lasts_s=(0.5, 4.0)),
        Kind("scripts flushed", "server"),
        Kind("connections cut", "link"),
        Kind("connections half-open", "link"),
        Kind("black hole", "link", lasts_s=(0.3, 5.0)),
        Kind("answers lost", "link", lasts_s=(0.2, 2.0)),
        Kind("requests lost", "link", lasts_s=(0.2, 2.0)),
        Kind("lossy connections", "link", lasts_s=(0.5, 3.0)),
        Kind("slow answers", "link", lasts_s=(0.5, 4.0), value=(0.02, 0.5)),
    )
    targets: ClassVar = {"service": SERVICES, "client": CLIENTS, "clock": 1, "server": 1, "link": 1}
    product: ClassVar = ""
    """The product of the servers; "" = the newest Redis that is found, or else a Valkey."""

    def open(self, stack: ExitStack) -> None:
        self.clock, environment = clock_shim(self.folder)
        if not environment:
            self.clock_of_stores = f"{self.folder / 'offset'}"
        program = next((found.program for found in redis_programs() if found.name.startswith(self.product)), None)
        assert program is not None, f"no {self.product} was found: the stack {self.name} needs one"
        self.primary, self.replica = (RedisServer(program, *OPTIONS, environment=environment) for _ in range(2))
        for server in (self.primary, self.replica):
            stack.callback(server.stop)
            server.start()
        self._front = stack.enter_context(proxied_by_thread(self.primary.port))
        self._link = stack.enter_context(proxied_by_thread(self.primary.port))
        replicate(self.replica, self._link.port)
        self.scene = RedisScene(self.crew, self.folder, self.primary)
        self.scene.url = f"redis://127.0.0.1:{self._front.port}?durability=replicated:1&timeout_ms=1000"

    def acts(self) -> Mapping[str, Acts]:
        return {
            **self.clock_acts(),
            "server killed": (lambda fault: self.primary.kill(), lambda fault: self.primary.start()),
            "server stopped": (self._signal(signal.SIGSTOP), self._signal(signal.SIGCONT)),
            "failover": (self._fall_behind, self._fail_over),
            "disk full": (self._fill_disk, self._restart),
            "memory limit": (self._limit_memory(LITTLE_MEMORY), self._limit_memory("0")),
            "scripts flushed": (lambda fault: self._tell("SCRIPT", "FLUSH"), lambda fault: None),
            "connections cut": (lambda fault: self._front.cut(), lambda fault: None),
            "connections half-open": (lambda fault: self._front.freeze(), lambda fault: None),
            "black hole": (self._pass("black hole"), self._pass("pass")),
            "answers lost": (self._pass("lose answers"), self._pass("pass")),
            "requests lost": (self._pass("lose requests"), self._pass("pass")),
            "lossy connections": (self._pass("lossy"), self._pass("pass")),
            "slow answers": (self._delay, self._hurry),
        }

    # --- the server ---------------------------------------------------------------------------------------

    def _tell(self, *command: str) -> None:
        answer = self.primary.command(*command)
        assert answer == b"+OK\r\n", answer

    def _signal(self, number: signal.Signals) -> Act:
        return lambda fault: os.kill(self.primary.pid, number)

    def _limit_memory(self, size: str) -> Act:
        return lambda fault: self._tell("CONFIG", "SET", "maxmemory", size)

    def _fill_disk(self, fault: Fault) -> None:
        """Let no file of the server grow: with `appendfsync always`, the server ends at its next write."""
        resource.prlimit(self.primary.pid, resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(self.primary.pid, resource.RLIMIT_FSIZE, (1, 1))

    def _restart(self, fault: Fault) -> None:
        self.primary.kill()
        self.primary.start()

    def _fall_behind(self, fault: Fault) -> None:
        self._since_ns = replicated_until_ns(self.primary, self.replica)
        self._link.mode = "black hole"

    def _fail_over(self, fault: Fault) -> None:
        """Kill the primary. The replica takes its place, and the former primary comes back as the replica."""
        former, heir = self.primary, self.replica
        former.kill()
        heir.command("REPLICAOF", "NO", "ONE")
        self.crew.history.write(h.Loss(since_ns=self._since_ns, commands=False))
        self._front.point_to(heir.port)
        self._link.point_to(heir.port)
        self._link.mode = "pass"
        self.primary, self.replica, self.scene.server = heir, former, heir
        former.start()
        replicate(former, self._link.port)

    # --- the connections ----------------------------------------------------------------------------------

    def _pass(self, mode: Mode) -> Act:
        def act(fault: Fault) -> None:
            self._front.mode = mode

        return act

    def _delay(self, fault: Fault) -> None:
        self._front.delay_answers_s = fault.value

    def _hurry(self, fault: Fault) -> None:
        self._front.delay_answers_s = 0.0


class ValkeyStage(RedisStage):
    """The same on Valkey."""

    name = "valkey"
    product = "valkey"
