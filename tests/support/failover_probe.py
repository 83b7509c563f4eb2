"""`FailoverProbe`: notes when a cluster serves a key again, and how long a client of the cluster needs from then on."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from .servers import RedisServer
from .topologies import Cluster
from .waiting import until_sync

__all__ = ["FailoverProbe"]

STEP_S = 0.05
FAILOVER_S = 60.0


class FailoverProbe:
    """Asks all nodes of a cluster but one, until they name another owner of a key, and this owner serves the key.

    The probe counts its steps as its clock. A slow machine slows down the probe together with the client to measure.

    Args:
        cluster: The cluster.
        key: A key of the node that fails.
        former: The node that fails. The probe does not ask it.

    Attributes:
        serves_ns: When the cluster has first served the key again; 0 while it does not.
    """

    def __init__(self, cluster: Cluster, key: str, former: RedisServer) -> None:
        self._cluster, self._key, self._former = cluster, key, former
        self._steps_ns: list[int] = []
        self.serves_ns: int = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failover probe")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the cluster serves the key."""
        until_sync(lambda: self.serves_ns > 0, "the cluster serves the key again", FAILOVER_S)

    def seconds_until(self, at_ns: int) -> float:
        """Return the probe's seconds from the cluster's first answer until a monotonic time; 0 if it is earlier."""
        assert self.serves_ns, "the cluster does not serve the key"
        return STEP_S * sum(self.serves_ns <= each <= at_ns for each in self._steps_ns)

    def _run(self) -> None:
        while not self._is_over.wait(STEP_S):
            if not self.serves_ns and self._serves():
                self.serves_ns = time.monotonic_ns()
            self._steps_ns.append(time.monotonic_ns())

    def _serves(self) -> bool:
        asked = (each for each in self._cluster.nodes if each is not self._former)
        try:
            owner, *others = {self._cluster.owner_by(each, self._key) for each in asked}
            if others or owner is self._former:
                return False
            return owner.command("EXISTS", self._key).startswith(b":")
        except (OSError, AssertionError):
            return False
