"""The names of the keys of a namespace, and the encoding of ids. An encoded id is a tag byte and a short form."""

from __future__ import annotations

import re

from aiodelay.core.features import REDIS_LAYOUT
from aiodelay.core.transitions import occurrence_id
from aiodelay.errors import ConfigurationError, TargetError, shortened

from .layouts import OCCURRENCE, OWN, TEXT, span

__all__ = [
    "DEFAULT_NAMESPACE",
    "DERIVED",
    "EXPECTED",
    "FIXED",
    "GUARD",
    "MARKS",
    "Keys",
    "guard_of",
    "hash_tag_of",
    "keys_of",
    "member_of",
    "text_of",
]

DEFAULT_NAMESPACE = "default"

FIXED = (
    "lanes",
    "msg",
    "dead",
    "graves",
    "done",
    "src",
    "holds",
    "late",
    "late:held",
    "parked",
    "workers",
    "wake",
    "journal",
    "meta",
)
"""The names of the keys that every script of the store receives, in this order."""
EXPECTED = "layout:"
"""The beginning of the name of a key that never exists. The rest of the name is the layout that the caller expects."""
DERIVED = (
    *("due:", "leased:", "parked:", "blocked:", "why:", "done:", "ended:", "req:", "cut:", "fanout:", "log:", "logs"),
    *("graves:ids", "superseded", "superseded:ids", "retries", "series", "trials", "pulses", "held:", "appended"),
    *("limits", "queues:", "turns:", "inflight:", "running:", "superseded:keys", "marks:"),
)
"""Other keys. Names that end with `:` are beginnings: a script adds a lane, address, time window, worker or topic."""

MARKS = ("schema", "features", "uuid", "holds", "sources", "seq", "claims")
"""The fields of `meta` that are the marks of a store, in order. The function `marks` in `base.lua` explains them."""

GUARD = ":aiodelay:never"
"""The end of the key that `guard_of` returns."""
_TAG = re.compile(r"[^{]*\{([^}]+)\}")
_UUID7 = re.compile(r"[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}")
_OCCURRENCE = re.compile(r"(.*)~(\d{10,15})", re.DOTALL)
_OWN, _TEXT, _SERIES = bytes([OWN]), bytes([TEXT]), bytes([OCCURRENCE])
_SERIES_ID, _DUE_MS = span("OCCURRENCE_ID", "series"), span("OCCURRENCE_ID", "due")
_LEAST_OCCURRENCE = 7  # bytes: a tag, and a due time
_MOST_MS = (1 << 48) - 1


class Keys:
    """The keys of one shard of a namespace. All have the same hash tag, so they are in the same slot of a cluster.

    Args:
        namespace: The name of the namespace, without braces.
        shard: The number of the shard, from 0 on.
        schema: The layout that scripts must find: the value of the field `schema` of `meta`.
        shards: The number of shards of the namespace. If there are several, scripts receive one more key, whose name
            ends with `schema`.
    """

    namespace: str
    shard: int
    tag: str
    schema: str
    shards: int
    fixed: tuple[str, ...]

    def __init__(self, namespace: str, shard: int = 0, schema: str = f"{REDIS_LAYOUT}", shards: int = 1) -> None:
        self.namespace, self.shard, self.schema, self.shards = namespace, shard, schema, shards
        self.tag = f"{{{namespace}:{shard:02d}}}:"
        fixed = FIXED if shards == 1 else (*FIXED, EXPECTED + schema)
        self.fixed = tuple(self.tag + name for name in fixed)

    def key(self, name: str) -> str:
        """Return the whole name of a key: the hash tag and `name`."""
        return self.tag + name


def keys_of(namespace: str) -> Keys:
    """Return the keys of a namespace. The name "" means the default namespace.

    Raises:
        ConfigurationError: The name contains braces.
    """
    if set("{}") & set(namespace):
        raise ConfigurationError("namespace", shortened(namespace), "text without { and }")
    return Keys(namespace or DEFAULT_NAMESPACE)


def hash_tag_of(key: str) -> str:
    """Return the hash tag of a key without its braces, or "" if the key has none."""
    tag = _TAG.match(key)
    return "" if tag is None else tag[1]


def guard_of(key: str) -> str:
    """Return a key in the same hash slot that never exists. On a cluster, each script receives such a key.

    While a slot moves to another node, a node refuses a script if one of its keys is missing. So no script begins that
    could end half-way, at a key that has moved already.

    Raises:
        TargetError: No other key can share the hash slot of this key.
    """
    tag = hash_tag_of(key)
    if not tag and set("{}") & set(key):
        raise TargetError(
            "key on a cluster", shortened(key), "a key without braces, or with a hash tag, as in {tag}key"
        )
    return f"{{{tag or key}}}{GUARD}"


def member_of(message_id: str) -> bytes:
    """Return the encoded form of a message id.

    Raises:
        UnicodeEncodeError: The id has a lone surrogate.
    """
    tags = dues = b""
    while "~" in message_id and (found := _OCCURRENCE.fullmatch(message_id)):
        due_ms = int(found[2])
        if due_ms > _MOST_MS or occurrence_id(found[1], due_ms) != message_id:
            break
        message_id, tags, dues = found[1], tags + _SERIES, due_ms.to_bytes(6, "big") + dues
    if len(message_id) == 32 and _UUID7.fullmatch(message_id):
        return tags + _OWN + bytes.fromhex(message_id) + dues
    return tags + _TEXT + message_id.encode() + dues


def text_of(member: bytes) -> str:
    """Return the message id that has this encoded form."""
    dues: list[int] = []
    while member[:1] == _SERIES and len(member) > _LEAST_OCCURRENCE:
        dues.append(int.from_bytes(member[_DUE_MS], "big"))
        member = member[_SERIES_ID]
    rest = member[1:]
    text = rest.hex() if member[:1] == _OWN and len(rest) == 16 else rest.decode("utf-8", "backslashreplace")
    for due_ms in reversed(dues):
        text = occurrence_id(text, due_ms)
    return text
