"""`Turns`: the store and the source of one handler claim in turn, so that neither keeps the other waiting."""

from __future__ import annotations

from collections.abc import Callable

from .lease_book import LeaseBook

__all__ = ["Turns"]


class Turns:
    """Decides whether the store or the source may claim messages for one handler.

    While both have messages, they claim in turn. Else the faster of the two would always take the free places, and
    retries from the store might wait for ever. Each is known by its lease book.

    Args:
        on_turn: Called when a feed may claim that could not claim before.
    """

    def __init__(self, on_turn: Callable[[], None]) -> None:
        self._on_turn = on_turn
        self._have_more: set[LeaseBook] = set()
        self._last: LeaseBook | None = None

    def may_claim(self, book: LeaseBook) -> bool:
        """Return whether a feed may claim now: not if it has claimed last, and the other feed has messages too."""
        return self._last is not book or self._have_more <= {book}

    def answered(self, book: LeaseBook, *, has_given: bool) -> None:
        """Note whether a claim has given messages for the handler. A claim that failed has given none."""
        had_turns = len(self._have_more) > 1
        if has_given:
            self._have_more.add(book)
            self._last = book
        else:
            self._have_more.discard(book)
        if had_turns or len(self._have_more) > 1:
            self._on_turn()
