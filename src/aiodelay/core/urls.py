"""Options in the URL of a store, sink or source: `sqlite:///delay.db?journal=1000`. Every error names the option."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from aiodelay.errors import ConfigurationError, masked_url, shortened

__all__ = ["UrlOptions"]

_MOST_DIGITS = 18
_HOSTS = re.compile(r"[^/?#]*,[^/?#]*")  # several hosts with commas between them, as for a Kafka cluster


def _split(url: str, masked: str) -> SplitResult:
    scheme, _, rest = url.partition("://")
    hosts = _HOSTS.match(rest)
    try:
        if hosts is None:
            return urlsplit(url)
        return urlsplit(f"{scheme}://{rest[hosts.end() :]}")._replace(netloc=hosts[0])  # urlsplit accepts only one host
    except ValueError:
        pass
    raise ConfigurationError("url", masked, "a URL")  # not inside the `except`: urlsplit's error quotes the password


def _shown(text: str) -> str:
    """Return the name or the value of an option for an error. A part of a URL in the wrong place may be a password."""
    return shortened(masked_url(text) if "@" in text else text)


class UrlOptions:
    """Reads a URL's query, one option at a time. `finish` refuses options that were not read."""

    parts: SplitResult
    """The URL, split into its parts."""
    masked: str
    """The URL without its secrets, for messages and logs."""

    def __init__(self, url: str) -> None:
        self.masked = masked_url(url)
        self.parts = _split(url, self.masked)
        given = parse_qsl(self.parts.query, keep_blank_values=True)
        self._options = dict(given)
        self._known: list[str] = []
        if len(self._options) < len(given):
            raise ConfigurationError(f"an option of {self.masked}", "given twice", "each option once")

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer option.

        Raises:
            ConfigurationError: The option is not an integer from `least` to `most`.
        """
        self._known.append(name)
        text = self._options.pop(name, None)
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not is_number or not least <= int(text) <= most:
            raise ConfigurationError(f"{name} in {self.masked}", _shown(text), f"an integer from {least} to {most}")
        return int(text)

    def text(self, name: str, default: str = "") -> str:
        """Return an option as text."""
        self._known.append(name)
        return self._options.pop(name, default)

    def flag(self, name: str) -> bool:
        """Return whether an option is `true`. A missing option counts as `false`.

        Raises:
            ConfigurationError: The option is neither `true` nor `false`.
        """
        text = self.text(name, "false")
        if text not in ("true", "false"):
            raise ConfigurationError(f"{name} in {self.masked}", _shown(text), "true or false")
        return text == "true"

    def finish(self, *, bare: bool = False) -> None:
        """Refuse options that were not read.

        Args:
            bare: Whether to refuse a host, a path and a fragment too, for a URL that needs only its scheme.

        Raises:
            ConfigurationError: An option is unknown. The error names the first unknown option, and the known options.
        """
        if bare and (self.parts.netloc or self.parts.path or self.parts.fragment):
            raise ConfigurationError("url", self.masked, f"'{self.parts.scheme}:' without host or path")
        for name in self._options:
            raise ConfigurationError(f"option of {self.masked}", _shown(name), ", ".join(self._known) or "none")
