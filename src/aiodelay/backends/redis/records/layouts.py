"""The layouts of the byte strings in Redis: values, members, answers and arguments, part by part.

Python code cuts a part out with its `span`. A script names a part, as in `VALUE.DUE_MS_FIRST`, and the module `scripts`
replaces the name by a number. The parts of a record come from `record_format`. So no script contains an offset itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from aiodelay.core.record_format import FIELDS, FORMAT_VERSION, Field, body_keys, prefix_of

__all__ = [
    "NAMESPACES",
    "OCCURRENCE",
    "OWN",
    "PLACED",
    "PLACED_BYTE",
    "PUSHED",
    "TEXT",
    "UNREADABLE",
    "Layout",
    "layouts_of",
    "lua_constants",
    "size_of",
    "span",
]

OWN, TEXT, OCCURRENCE = 1, 2, 3
"""The first byte of an encoded id. The id is a UUIDv7 of aiodelay, a text of the caller, or an occurrence's id."""
UNREADABLE = 255
"""The first byte of a dead letter whose record cannot be read.

In other dead letters, this byte is the reason's length.
"""
PLACED = 1 << 47
"""The top bit of the sequence number in a value of `msg`. If it is set, the message's place follows the number."""
PLACED_BYTE = PLACED >> 40
"""The bit `PLACED` within the first byte of the value."""
PUSHED = b"\xa1q\xcf"
"""The bytes before the time of the push in a list element: the key `q`, and MessagePack's type byte of a `u64`."""
U48, U64 = 6, 8
_LUA = {"u8": "B", "u16": "H", "u48": "I6", "8s": "c8"}
"""Formats of Lua's `struct`, by the type in `Field.prefix`."""

Layout: TypeAlias = Mapping[str, int | None]
"""The parts in order, with their sizes in bytes. One part may have the size None: it has the remaining bytes."""


def layouts_of(fields: Sequence[Field]) -> dict[str, Layout]:
    """Return all layouts by their names in scripts. `fields` are the fields of a record."""
    prefix = prefix_of(fields)
    record = {name: place.size for name, place in prefix.fixed.items()}
    return {
        "RECORD": {**record, "body": None},
        "VALUE": {"sequence": U48, **record, "body": None},  # in `msg`, of a message whose place is its due time
        "PLACED_VALUE": {"sequence": U48, "place": U48, "record": None},  # in `msg`, of any other message
        "MEMBER": {"sequence": U48, "id": None},  # in `due` and `parked`
        "OCCURRENCE_ID": {"tag": 1, "series": None, "due": U48},
        "LETTER": {"reason_size": 1, "reason": None},  # in `dead`; the record follows the reason
        "LETTER_KEY": {"id": None, "revision": U48},
        "UNREADABLE_LETTER": {"mark": 1, "lane": 2, "value": None},
        "SUPERSEDED": {"revision": U48, "id": None},
        "SUPERSEDED_VERSION": {"revision": U48, "due": U48},  # side by side in `superseded:ids`
        "SIZED_KEY": {"size": 2, "key": None},  # in `queues` and `running`; the rest follows the key
        "QUEUED": {"place": U48, "member": None},  # in `queues`, behind the key
        "OF_LANE": {"lane": 2, "body": None},  # in `superseded:keys`
        "BEGINNING": {"at": U48, "number": 4},  # side by side in `marks`
        "REMEMBERED": {"until": U48, "content": None},  # in `done` and `ended`
        "ANSWER": {"letter": 1, "revision": U48, "due": U48, "version": None},  # to a command
        "ELEMENT": {"message": None, "pushed_key": len(PUSHED), "pushed_ms": U64},  # in a list
        "RETRY": {"number": U64, "element": None},  # in a topic's `later`
        "ENTRY_ID": {"zero": 2, "index": None},  # in a log's stream: 0-<index>
        "WHAT": {"verb": 1, "recurs": 1, "operand": None},  # the first argument of a command
        "LATENESS": {"action": 1, "colon": 1, "ms": None},  # an argument of a put
        "LETTERED": {"letter": 1, "rest": None},  # an argument or a value whose first letter names its kind
    }


LAYOUTS = layouts_of(FIELDS)


def span(layout: str, part: str) -> slice:
    """Return the slice that cuts a part out of a byte string."""
    start, stop = _bounds(LAYOUTS[layout])[part]
    return slice(start, stop)


def size_of(layout: str) -> int:
    """Return the number of bytes of all parts that have a fixed size."""
    return _fixed(LAYOUTS[layout])


def _bounds(layout: Layout) -> dict[str, tuple[int, int | None]]:
    """Return the start and the end of each part, for a slice.

    For the parts behind the part without a fixed size, the start and the end are negative numbers, which count from the
    end of the bytes. In a layout with such a part, the end of the last part is None.
    """
    bounds: dict[str, tuple[int, int | None]] = {}
    at, left = 0, _fixed(layout)
    for part, size in layout.items():
        left -= size or 0
        end = -left if size is None else at + size
        bounds[part] = at, end or None
        at = end
    return bounds


def _fixed(layout: Layout) -> int:
    return sum(size or 0 for size in layout.values())


# --- for Lua ----------------------------------------------------------------------------------------------


def lua_constants(fields: Sequence[Field]) -> dict[str, str]:
    """Return the constants that scripts may name, as numbers and quoted strings of Lua.

    A layout has the constant `SIZE`, the number of bytes of all parts with a fixed size. A part has up to four
    constants. `_FIRST` and `_LAST` are arguments for `string.sub`. `_SIZE` is the number of bytes of the part, if it is
    fixed. `_OFFSET` is the number of bytes before the part, if it is fixed.
    """
    prefix, keys = prefix_of(fields), body_keys(fields)
    constants = dict(_parts(layouts_of(fields)))
    widths = "".join(_LUA[place.type] for place in prefix.fixed.values())
    version = prefix.places["version"]
    constants |= {
        "RECORD.FORMAT_VERSION": f"{FORMAT_VERSION}",
        "RECORD.PREFIX": f"'>{widths}'",
        "RECORD.VERSION_SIZE": f"{version.size}",
        "RECORD.VERSIONED_SIZE": f"{version.end}",
        "RECORD.BIN": f"'\\196\\{prefix.size}'",
        "VALUE.PREFIX": f"'>I6{widths}'",
        "VALUE.PLACED": f"{PLACED}",
        "VALUE.PLACED_BYTE": f"{PLACED_BYTE}",
        "ANSWER.PACKED": "'>c1I6I6'",
        "ELEMENT.PUSHED": "'" + "".join(f"\\{each}" for each in PUSHED) + "'",
        "UNREADABLE_LETTER.MARK": f"{UNREADABLE}",
        "ID.OWN": f"{OWN}",
        "ID.TEXT": f"{TEXT}",
        "ID.OCCURRENCE": f"{OCCURRENCE}",
    }
    for name, flag in prefix.flags.items():
        constants |= {f"FLAG.{name.upper()}": f"{flag.mask}", f"FLAG.{name.upper()}_SHIFT": f"{flag.shift}"}
    for name, key in keys.items():
        constants |= {f"BODY.{name.upper()}": f"'{key}'", f"BODY.{name.upper()}_BYTE": f"{ord(key)}"}
        constants[f"BODY.{name.upper()}_KEY"] = f"'\\161{key}'"
    return constants


def _parts(layouts: Mapping[str, Layout]) -> Iterator[tuple[str, str]]:
    for layout, parts in layouts.items():
        yield f"{layout}.SIZE", f"{_fixed(parts)}"
        for part, (start, stop) in _bounds(parts).items():
            name = f"{layout}.{part.upper()}"
            yield f"{name}_FIRST", f"{start if start < 0 else start + 1}"
            yield f"{name}_LAST", f"{-1 if stop is None else stop if stop >= 0 else stop - 1}"
            if start >= 0:
                yield f"{name}_OFFSET", f"{start}"
            if parts[part] is not None:
                yield f"{name}_SIZE", f"{parts[part]}"


NAMESPACES = (*LAYOUTS, "BODY", "FLAG", "ID")
"""The names before the dot in the constants of scripts, such as `VALUE` in `VALUE.DUE_MS_FIRST`."""
