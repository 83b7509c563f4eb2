"""`viewed`: shows a payload as JSON, text or hex, at most 64 kB."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["MOST_SHOWN", "VIEWS", "Payload", "viewed"]

MOST_SHOWN = 65_536
VIEWS = ("json", "text", "hex")
PER_LINE = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload in one view.

    Attributes:
        view: The name of the view, one of `VIEWS`.
        text: The text to show.
        size: The size of the whole payload, in bytes.
        is_cut: Whether the text shows only the first part of the payload.
        views: The views that this payload has.
    """

    view: str
    text: str
    size: int
    is_cut: bool
    views: tuple[str, ...]


def viewed(payload: bytes, view: str | None = None) -> Payload:
    """Return a payload in the given view. If it has no such view, return the first that fits of JSON, text and hex."""
    written = _as_json(payload)
    views = tuple(each for each in VIEWS if each != "json" or written is not None)
    if view not in views:
        view = "json" if written is not None else "text" if _is_text(payload) else "hex"
    if view == "json":
        assert written is not None
        return Payload(view, written[:MOST_SHOWN], len(payload), len(written) > MOST_SHOWN, views)
    part = payload[:MOST_SHOWN]
    text = _hex(part) if view == "hex" else part.decode(errors="replace")
    return Payload(view, text, len(payload), len(payload) > MOST_SHOWN, views)


def _as_json(payload: bytes) -> str | None:
    """Return a payload as indented JSON; None if it is not JSON, or too large to parse for a view."""
    if not payload or len(payload) > MOST_SHOWN:
        return None
    parts, length = list[str](), 0
    try:
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(json.loads(payload)):
            parts.append(part)
            length += len(part)
            if length > MOST_SHOWN:  # indentation can make a small payload a thousand times as long
                break
    except (ValueError, RecursionError):
        return None
    return "".join(parts)


def _is_text(payload: bytes) -> bool:
    try:
        text = payload[:MOST_SHOWN].decode(errors="strict" if len(payload) <= MOST_SHOWN else "ignore")
    except UnicodeDecodeError:
        return False
    return all(each.isprintable() or each in "\n\r\t" for each in text)


def _hex(payload: bytes) -> str:
    lines = []
    for start in range(0, len(payload), PER_LINE):
        part = payload[start : start + PER_LINE]
        text = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{start:08x}  {part[:8].hex(' '):<23}  {part[8:].hex(' '):<23}  {text}")
    return "\n".join(lines)
