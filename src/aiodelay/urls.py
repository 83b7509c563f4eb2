"""Options in a store's or sink's URL: `sqlite:///delay.db?journal=1000`. Every mistake names the option."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, urlsplit

from .errors import ConfigurationError, masked_url, shortened

__all__ = ["UrlOptions"]


class UrlOptions:
    """Reads a URL's query, one option at a time; `finish` refuses what nobody asked for."""

    def __init__(self, url: str) -> None:
        self._url = masked_url(url)
        try:
            self.parts: SplitResult = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError("url", self._url, f"a URL ({error})") from None
        self._options = dict(parse_qsl(self.parts.query, keep_blank_values=True))
        self._known: list[str] = []

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer option.

        Raises:
            ConfigurationError: It is not an integer from `least` to `most`.
        """
        self._known.append(name)
        text = self._options.pop(name, None)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ConfigurationError(f"{name} in {self._url}", shortened(text), f"an integer from {least} to {most}")
        return int(text)

    def finish(self) -> None:
        """Refuse options that are left.

        Raises:
            ConfigurationError: Names the first unknown option, and those that are known.
        """
        for name in self._options:
            raise ConfigurationError(f"option of {self._url}", shortened(name), ", ".join(self._known) or "none")
