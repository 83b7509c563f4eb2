"""Forms that browsers have sent, and drafts of forms that were refused."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NO_DRAFT", "Draft", "Drafts", "Form"]

DRAFTS = 64


class Form:
    """The fields that a form has sent."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        self._fields = fields

    def one(self, name: str) -> str:
        """Return a field, stripped; "" where it is missing."""
        return self._fields.get(name, [""])[-1].strip()

    def all(self, name: str) -> Sequence[str]:
        """Return all values of a field."""
        return self._fields.get(name, [])


@dataclass(frozen=True, slots=True)
class Draft:
    """A form that was refused, to be shown again as it was typed.

    Attributes:
        by: Who sent it.
        form: Its fields.
        mistake: Why it was refused.
    """

    by: str
    form: Form
    mistake: str


NO_DRAFT = Draft("", Form({}), "")


class Drafts:
    """The latest drafts, each by a token, which is in the URL of the screen that shows the form again."""

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
        """Return a draft of this caller; an empty one where there is none such."""
        draft = self._drafts.get(token, NO_DRAFT)
        return draft if draft.by == by else NO_DRAFT
