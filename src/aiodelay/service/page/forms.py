"""Forms that browsers have sent, and drafts: refused forms to show again."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NO_DRAFT", "Draft", "Drafts", "Form"]

DRAFTS = 64


class Form:
    """The fields of a form that a browser sent."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        self._fields = fields

    def one(self, name: str) -> str:
        """Return the last value of a field without surrounding spaces; "" if the field is missing."""
        return self._fields.get(name, [""])[-1].strip()

    def all(self, name: str) -> Sequence[str]:
        """Return all values of a field."""
        return self._fields.get(name, [])


@dataclass(frozen=True, slots=True)
class Draft:
    """A form that was refused. The screen shows it again with the values that were typed.

    Attributes:
        by: The name of the caller that sent the form.
        form: The fields of the form.
        mistake: The reason of the refusal.
        wrong: The names of the wrong fields; empty = any of the filled fields.
    """

    by: str
    form: Form
    mistake: str
    wrong: Sequence[str] = ()


NO_DRAFT = Draft("", Form({}), "")


class Drafts:
    """The latest drafts by token. The URL of the screen that shows a draft holds its token."""

    def __init__(self) -> None:
        self._drafts: OrderedDict[str, Draft] = OrderedDict()

    def add(self, draft: Draft) -> str:
        """Keep a draft; return its token."""
        token = secrets.token_urlsafe(8)
        self._drafts[token] = draft
        while len(self._drafts) > DRAFTS:
            self._drafts.popitem(last=False)
        return token

    def find(self, token: str, *, by: str) -> Draft:
        """Return the draft of this token; `NO_DRAFT` if this caller has no such draft."""
        draft = self._drafts.get(token, NO_DRAFT)
        return draft if draft.by == by else NO_DRAFT
