"""`Table`: the narrow interface through which the rules read and change a store's messages.

The stores implement it with dicts, SQL or a change log. A table decides nothing; `rules.py` decides. Each command,
settlement or lapse is one step (a transaction, if the store has transactions). Every method takes part in that step.

The *place* of a message (`place_ms`) is the time of its next attempt, epoch ms. It orders the messages of a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from .transitions import Trials
from .values import Command, DeadKey, DeadLetter, Outcome, Record

__all__ = ["Answers", "Letters", "Row", "SupersededClaims", "Table", "TrialTable"]


class Row(Protocol):
    """A message of a table: pending or claimed."""

    @property
    def record(self) -> Record:
        """The message."""
        ...

    @property
    def place_ms(self) -> int:
        """The place of the message in its lane: the time of its next attempt, epoch ms."""
        ...

    @property
    def token(self) -> int:
        """The token of the claim on the message; 0 = not claimed."""
        ...


R = TypeVar("R", bound=Row)
R_contra = TypeVar("R_contra", bound=Row, contravariant=True)


class Answers(Protocol):
    """Answers, versions and revisions that outlive a message."""

    def answer(self, command: Command, now: int) -> Outcome | None:
        """Return the kept answer to a command; None if no answer is kept.

        As long as a message is stored, the answer `stored` to its put is not kept, because the record implies it.
        """
        ...

    def add(self, op: bytes, outcome: Outcome, *, until_ms: int) -> None:
        """Keep the answer to a command."""
        ...

    def keep(self, record: Record, now: int) -> None:
        """Keep the answer to the put that made this record, before the record is removed or changed."""
        ...

    def last_revision(self, message_id: str, now: int) -> int | None:
        """Return the revision of the last message that ended under this id; None if it is not kept."""
        ...

    def ended_version(self, message_id: str, now: int) -> int | None:
        """Return the highest version that ended or was replaced under this id; None if no version is kept."""
        ...

    def add_version(self, message_id: str, version: int, *, until_ms: int) -> None:
        """Keep a version instead of the version that is kept under this id."""
        ...


class SupersededClaims(Protocol[R_contra]):
    """Claims on messages that were replaced in flight, by id and revision.

    A claim stays here until it is settled or lapses.
    """

    def add(self, row: R_contra) -> None:
        """Keep the claim of a row that is about to be replaced. For a row without a claim, do nothing."""
        ...

    def tokens(self, message_id: str) -> Sequence[int]:
        """Return the tokens of the claims on replaced messages of this id, and on retries of a series of this id."""
        ...

    def renew(self, message_id: str, revision: int, token: int, to: int) -> bool:
        """Give a claim another token, unless it has that token already. Return whether the table holds the claim."""
        ...

    def end(self, message_id: str, revision: int, token: int) -> bool:
        """Remove a claim. Return whether the table held it."""
        ...


class Letters(Protocol):
    """Dead letters, by id and revision."""

    def has(self, key: DeadKey) -> bool:
        """Return whether a letter has this key."""
        ...

    def get(self, key: DeadKey) -> DeadLetter | None:
        """Return the letter with this key; None if there is none.

        Raises:
            RecordFormatError: The letter's record cannot be read.
        """
        ...

    def add(self, letter: DeadLetter) -> None:
        """Keep a letter. It replaces a letter with the same key."""
        ...

    def remove(self, key: DeadKey) -> bool:
        """Delete the letter with this key. Return whether there was a letter."""
        ...


class TrialTable(Protocol[R_contra]):
    """Trials of suspects, and the state of the search for killers among them."""

    def heard_ms(self, row: R_contra) -> int | None:
        """Return when the process that tries a row last confirmed it, epoch ms; None = the row is not in a trial."""
        ...

    def has_died(self, row: R_contra, now: int) -> bool:
        """Return whether the process that tries a row has ended."""
        ...

    def group_size(self) -> int:
        """Return how many suspects are in the current trial."""
        ...

    def search(self) -> Trials:
        """Return the state of the search."""
        ...

    def set_search(self, search: Trials) -> None:
        """Set the state of the search."""
        ...

    def end(self, row: R_contra) -> None:
        """Remove the trial of a row."""
        ...


class Table(Protocol[R]):
    """The messages of a namespace (on Kafka: of a partition), and the data of a store that outlive them."""

    @property
    def answers(self) -> Answers:
        """Answers, versions and revisions that outlive a message."""
        ...

    @property
    def superseded(self) -> SupersededClaims[R]:
        """Claims on messages that were replaced in flight."""
        ...

    @property
    def letters(self) -> Letters:
        """Dead letters."""
        ...

    @property
    def trials(self) -> TrialTable[R]:
        """Trials of suspects."""
        ...

    def find(self, message_id: str) -> R | None:
        """Return the message that is stored under an id; None if the id is free."""
        ...

    def retries_of(self, series_id: str) -> Sequence[R]:
        """Return the retried occurrences of a series, also if the series itself has ended."""
        ...

    def insert(self, record: Record, place_ms: int) -> None:
        """Add a message to its lane, behind messages of the same place. The caller has just found the id free."""
        ...

    def move(self, row: R, record: Record, place_ms: int, *, keeps_turn: bool = False) -> None:
        """Put a message back into its lane, with this record. A claim on the message ends.

        Args:
            row: The stored message.
            record: The new record, with the same id and lane.
            place_ms: The time of the message's next attempt.
            keeps_turn: Whether the message stays before messages of the same place that were scheduled later.
        """
        ...

    def update(self, row: R, record: Record) -> None:
        """Give a message the `no_retry`, `alone`, `kills`, `live` and appended items of this record.

        The message keeps its place.
        """
        ...

    def set_token(self, row: R, token: int) -> None:
        """Set the token of a claim."""
        ...

    def remove(self, row: R) -> None:
        """Delete a message and free its id. The rules themselves keep its answer and version."""
        ...

    def retire(self, row: R, now: int) -> None:
        """End a message. Its revision and the answer to its put are kept for the retry window."""
        ...

    def changing(self, row: R) -> AbstractContextManager[object]:
        """Combine the calls of a block into one change of this message."""
        ...

    def note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        """Add an entry to the journal, if there is one."""
        ...
