"""`Layers`: merges settings from a file, environment variables and flags, and knows the origin of each value."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Layer", "Layers", "Place", "dotted", "read_toml"]

Place: TypeAlias = tuple[str | int, ...]
"""The path of a value in the settings, such as `("intake", 0, "from")`."""


class Layer(NamedTuple):
    """The settings of one source.

    Attributes:
        values: The values, as nested mappings and lists.
        origins: The origin of each value, such as `aiodelay.toml:7`. A value without an entry has the origin of the
            value that contains it.
    """

    values: Mapping[str, Any]
    origins: Mapping[Place, str]

    def origin(self, place: Place) -> str | None:
        """Return the origin of a value; None if this layer does not hold the value."""
        if not _holds(self.values, place):
            return None
        return next((self.origins[place[:n]] for n in range(len(place), 0, -1) if place[:n] in self.origins), None)


class Layers:
    """The merged settings of several sources.

    Tables are merged value by value: a source adds the values that all stronger sources lack.

    Args:
        layers: The sources, strongest first.
    """

    def __init__(self, *layers: Layer) -> None:
        self._layers = layers
        self.values: dict[str, Any] = {}
        for layer in reversed(layers):
            self.values = _merged(self.values, layer.values)

    def origin(self, place: Place) -> str | None:
        """Return the origin of a value; None if no source holds the value."""
        return next((found for layer in self._layers if (found := layer.origin(place))), None)

    def nearest_origin(self, place: Place) -> str | None:
        """Return the origin of a value. For a missing value, return the origin of the nearest table around it."""
        return next((found for n in range(len(place), 0, -1) if (found := self.origin(place[:n]))), None)


def dotted(place: Place) -> str:
    """Return a path as text, such as `intake[0].from`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def read_toml(path: Path) -> Layer:
    """Read a TOML file, with the line of each value.

    Raises:
        OSError: The file cannot be read.
        tomllib.TOMLDecodeError: The file is not TOML.
        UnicodeDecodeError: The file is not UTF-8.
    """
    text = path.read_text(encoding="utf-8")
    values = tomllib.loads(text)
    return Layer(values, {place: f"{path}:{line}" for place, line in _lines(text).items()})


def _lines(text: str) -> dict[Place, int]:
    """Return the line at which each value begins.

    The TOML parser does not report lines. So this function parses the first line, then the first two lines, and so on.
    A value of several lines appears only when its last line is parsed too. Such a value begins in the line after the
    last successful parse.
    """
    lines, found, begin = text.splitlines(), dict[Place, int](), 1
    for n in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("\n".join(lines[:n]))
        except tomllib.TOMLDecodeError:
            continue
        for place in _places(values):
            found.setdefault(place, begin)
        begin = n + 1
    return found


def _places(value: object, at: Place = ()) -> Iterator[Place]:
    if at:
        yield at
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _places(inner, (*at, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _places(inner, (*at, i))


def _holds(value: object, place: Place) -> bool:
    for part in place:
        is_item = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if not is_item and not (isinstance(value, Mapping) and part in value):
            return False
        value = value[part]  # type: ignore[index]
    return True


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both_tables else value
    return merged
