"""Redis clusters and Sentinels for tests, from the same programs as single servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from redis.crc import key_slot

from aiodelay.errors import AiodelayError
from aiodelay.testing.servers import RedisServer

from .proxy import Proxy, proxied_by_thread
from .servers import replicate
from .waiting import until_sync

__all__ = [
    "PRIMARY",
    "SLOTS",
    "Cluster",
    "Sentinel",
    "SentinelTrio",
    "clustered",
    "node_of_a_cluster",
    "watched",
]

SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000
PRIMARY = "shop"
REPLICATION = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
READY_S = 60.0


def node_of_a_cluster(program: str, *options: str) -> RedisServer:
    """Start one; its second port, 10,000 above the first, may be taken: then another one."""
    while True:
        node = RedisServer(program, "--cluster-enabled", "yes", *options)
        try:
            if node.port <= 55_000:
                node.start()
                return node
        except AiodelayError:
            if "Address already in use" not in node.log:
                node.stop()
                raise
        node.stop()


class NoOwnerError(AssertionError):
    """A node knows no owner of a slot."""


class Cluster:
    """Primaries with equal shares of the slots, and a replica for each primary."""

    def __init__(self, nodes: list[RedisServer], primaries: int) -> None:
        self.nodes, self.primaries = nodes, nodes[:primaries]
        self.ids = {node.port: _text(node.command("CLUSTER", "MYID")) for node in nodes}

    @property
    def url(self) -> str:
        """The URL with the addresses of all nodes."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def owner(self, key: str) -> RedisServer:
        """Return the node that the first living node names as the owner of a key, once it knows the owner."""

        def named() -> RedisServer | None:
            for node in self.nodes:
                with suppress(OSError, NoOwnerError):
                    return self.owner_by(node, key)
            return None

        found = until_sync(named, f"a node names the owner of {key}")
        assert found is not None
        return found

    def owner_by(self, asked: RedisServer, key: str) -> RedisServer:
        """Return the node that one node names as the owner of a key.

        Raises:
            OSError: The node does not answer.
            NoOwnerError: The node knows no owner.
        """
        slot = key_slot(key.encode())
        for line in map(str.split, asked.command("CLUSTER", "NODES").decode().splitlines()[1:]):
            for each in line[8:]:
                first, _, last = each.partition("-")
                if first.isdigit() and int(first) <= slot <= int(last or first):
                    port = int(line[1].partition("@")[0].rpartition(":")[2])
                    return next(node for node in self.nodes if node.port == port)
        raise NoOwnerError(f"nobody owns slot {slot}")

    def replica_of(self, primary: RedisServer) -> RedisServer:
        """Return the node that has begun as the replica of a primary."""
        return self.nodes[len(self.primaries) + self.primaries.index(primary)]

    def works_without(self, former: RedisServer, key: str, *, replicas: int = 0) -> bool:
        """Whether all nodes but one name another owner of a key, which serves the key and has enough replicas."""
        owner, *others = {self.owner_by(each, key) for each in self.nodes if each is not former}
        if others or owner is former or _replicas(owner) < replicas:
            return False
        return owner.command("EXISTS", key).startswith(b":")

    def is_whole(self) -> bool:
        """Whether all nodes know each other and serve all slots, and all replicas have their data."""
        infos = [node.command("CLUSTER", "INFO").decode() for node in self.nodes]
        links = [node.command("INFO", "replication").decode() for node in self.nodes]
        return (
            all("cluster_state:ok" in each and f"cluster_known_nodes:{len(self.nodes)}\r" in each for each in infos)
            and all("role:master" in each or "master_link_status:up" in each for each in links)
            and sum("connected_slaves:1" in each for each in links) == len(self.nodes) - len(self.primaries)
        )

    def begin_move(self, key: str, target: RedisServer) -> RedisServer:
        """Begin to move the slot of a key to another node. Return the node that has it now."""
        source, slot = self.owner(key), str(key_slot(key.encode()))
        _ok(target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source.port]))
        _ok(source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target.port]))
        return source

    def move_keys(self, key: str, source: RedisServer, target: RedisServer, *, most: int = 0) -> int:
        """Move the keys of a slot, at most so many; return how many were moved."""
        slot, moved = str(key_slot(key.encode())), 0
        while not most or moved < most:
            count, keys = _keys(source.command("CLUSTER", "GETKEYSINSLOT", slot, "1"))
            if not count:
                break
            answer = source.command("MIGRATE", "127.0.0.1", str(target.port), keys, "0", "60000")
            assert answer[:1] == b"+", answer
            moved += 1
        return moved

    def end_move(self, key: str, source: RedisServer, target: RedisServer) -> None:
        """End the move of a slot: tell every node who owns it."""
        slot = str(key_slot(key.encode()))
        for node in [target, source, *(each for each in self.nodes if each not in (source, target))]:
            node.command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target.port])

    def move(self, key: str, target: RedisServer) -> None:
        """Move the slot of a key to another node."""
        source = self.begin_move(key, target)
        while self.move_keys(key, source, target):
            pass
        self.end_move(key, source, target)


@contextmanager
def clustered(program: str, *options: str, primaries: int = 3, replicas: bool = True) -> Iterator[Cluster]:
    """Start a cluster."""
    with ExitStack() as stack:
        nodes: list[RedisServer] = []
        for _ in range(2 * primaries if replicas else primaries):
            settings = ("--cluster-node-timeout", str(NODE_TIMEOUT_MS), *REPLICATION, *options)
            nodes.append(node_of_a_cluster(program, *settings))
            stack.callback(nodes[-1].stop)
        cluster = Cluster(nodes, primaries)
        share = -(-SLOTS // primaries)
        for i, node in enumerate(cluster.primaries):
            slots = range(i * share, min((i + 1) * share, SLOTS))
            _ok(node.command("CLUSTER", "ADDSLOTS", *map(str, slots)))
        for i, node in enumerate(nodes):
            _ok(node.command("CLUSTER", "SET-CONFIG-EPOCH", str(i + 1)))
        for node in nodes[1:]:
            _ok(node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port)))
        for i, node in enumerate(nodes[primaries:]):
            command = ("CLUSTER", "REPLICATE", cluster.ids[nodes[i].port])
            _until(partial(_accepts, node, *command), "the node knows its primary")
        _until(cluster.is_whole, "the cluster is whole")
        yield cluster


class Sentinel(RedisServer):
    """A Sentinel that watches one primary."""

    def __init__(self, program: str, primary: int, settings: str = "") -> None:
        super().__init__(program)
        self._file = self.folder / "sentinel.conf"
        self._file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
            f"sentinel monitor {PRIMARY} 127.0.0.1 {primary} 2\n"
            f"sentinel down-after-milliseconds {PRIMARY} {NODE_TIMEOUT_MS}\n"
            f"sentinel failover-timeout {PRIMARY} 5000\n{settings}"
        )

    def command_line(self) -> list[str]:
        return [self.program, str(self._file), "--sentinel"]


class SentinelTrio:
    """A primary, its replicas and three Sentinels, which reach the first primary through a proxy."""

    def __init__(self, servers: list[RedisServer], sentinels: list[Sentinel], link: Proxy) -> None:
        self.servers, self.sentinels, self.link = servers, sentinels, link

    @property
    def url(self) -> str:
        """The URL with the addresses of all Sentinels."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{PRIMARY}?{self.announce}"

    @property
    def announce(self) -> str:
        """The option of the URL that leads processes to the first primary without the proxy."""
        return f"announce=127.0.0.1:{self.link.port}=127.0.0.1:{self.servers[0].port}"

    def primary(self) -> RedisServer:
        """Return the server that a Sentinel names as the primary."""
        return self._primary_by(self.sentinels[0])

    def _primary_by(self, sentinel: Sentinel) -> RedisServer:
        reply = sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY).split(b"\r\n")
        port = int(reply[4])
        return self.servers[0] if port == self.link.port else next(each for each in self.servers if each.port == port)

    def works_without(self, former: RedisServer, *, replicas: int = 0) -> bool:
        """Whether all Sentinels name another primary, which knows its role and has enough replicas."""
        primary, *others = {self._primary_by(each) for each in self.sentinels}
        if others or primary is former or _replicas(primary) < replicas:
            return False
        return b"role:master" in primary.command("INFO", "replication")

    def is_whole(self) -> bool:
        """Whether all Sentinels know each other and the replicas."""
        infos = [each.command("SENTINEL", "MASTERS").decode() for each in self.sentinels]
        wanted = ("num-other-sentinels\r\n$1\r\n2", f"num-slaves\r\n$1\r\n{len(self.servers) - 1}")
        return all(text in each for each in infos for text in wanted)


@contextmanager
def watched(program: str, *options: str, settings: str = "", replicas: int = 1) -> Iterator[SentinelTrio]:
    """Start a primary, its replicas and three Sentinels."""
    with ExitStack() as stack:
        servers = [RedisServer(program, *REPLICATION, *options) for _ in range(1 + replicas)]
        for each in servers:
            stack.callback(each.stop)
            each.start()
        link = stack.enter_context(proxied_by_thread(servers[0].port))
        for each in servers[1:]:
            replicate(each, link.port)
        for each in servers[2:]:
            _ok(each.command("CONFIG", "SET", "replica-priority", "0"))  # A failover promotes the first replica.
        sentinels = [Sentinel(program, link.port, settings) for _ in range(3)]
        for sentinel in sentinels:
            stack.callback(sentinel.stop)
            sentinel.start()
        trio = SentinelTrio(servers, sentinels, link)
        _until(trio.is_whole, "the Sentinels know each other")
        yield trio


def _until(holds: Callable[[], bool], what: str) -> None:
    until_sync(holds, what, READY_S)


def _ok(reply: bytes) -> None:
    assert _is_ok(reply), reply


def _is_ok(reply: bytes) -> bool:
    return reply == b"+OK\r\n"


def _accepts(node: RedisServer, *command: str) -> bool:
    return _is_ok(node.command(*command))


def _replicas(primary: RedisServer) -> int:
    return primary.command("INFO", "replication").count(b"state=online")


def _text(reply: bytes) -> str:
    return reply.split(b"\r\n")[1].decode()


def _keys(reply: bytes) -> tuple[int, str]:
    lines = reply.split(b"\r\n")
    count = int(lines[0][1:])
    return count, lines[2].decode() if count else ""
