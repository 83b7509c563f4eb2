"""Plans to set and to end a limit, from the form of the screen "Sinks and handlers"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import asdict

from aiodelay.core.values import Limit
from aiodelay.engine.control import check_limits
from aiodelay.operations.limit_change import find_limit
from aiodelay.service.api.plans import Plan
from aiodelay.service.api.problems import ApiError
from aiodelay.service.api.served import Opened

from .forms import Form

__all__ = ["WRONG_FIELDS", "limit_facts", "limit_plan"]

WRONG_FIELDS: Mapping[str, Sequence[str]] = {
    "what": ("limited",),
    "limit.key": ("key",),
    "limit.concurrency": ("concurrency",),
    "limit.rate": ("rate",),
    "limit": ("concurrency", "rate"),
}
"""The fields of the form that are wrong, by the field that an error names."""
MOST_DIGITS = 9


async def limit_plan(store: Opened, action: str, form: Form, *, by: str) -> Plan:
    """Return the plan that sets or ends a limit.

    Raises:
        ConfigurationError: The limit is wrong, or does not fit the handler or sink.
        UnsupportedByStoreError: The store has no limits, or moves messages into this sink by itself.
        ApiError: The limit to end does not exist.
    """
    what, key = form.one("limited"), form.one("key") or None
    if action == "limit":
        limit = Limit(key, _concurrency_in(form), form.one("rate") or None)
        check_limits(store.scheduler, what, limit)
        return Plan(action, by, store.name, [what], options=asdict(limit))
    if await find_limit(store.scheduler, what, key) is None:
        raise ApiError(422, "NoLimitError", f"{what} has no such limit any more")
    return Plan(action, by, store.name, [what], options={"key": key})


def _concurrency_in(form: Form) -> int | None:
    """Return the concurrency of the form. A text that is no number stays a text, which `Limit` refuses."""
    text = form.one("concurrency")
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number else text or None  # type: ignore[return-value]


async def limit_facts(store: Opened, plan: Plan) -> Mapping[str, str]:
    """Return what a plan changes, for its confirmation: the new limit, and the limit that it ends or replaces."""
    (what,) = plan.names
    standing = await find_limit(store.scheduler, what, plan.options["key"])
    facts = {"New limit": _text(Limit(**plan.options))} if plan.action == "limit" else {}
    return facts if standing is None else {**facts, "Limit until now": _text(standing)}


def _text(limit: Limit) -> str:
    whose = "all messages together" if limit.key is None else f"each {limit.key}"
    in_flight = [] if limit.concurrency is None else [f"at most {limit.concurrency} in flight"]
    rate = [] if limit.rate is None else [f"at most {limit.rate} begin"]
    return f"{whose}: {', '.join(in_flight + rate)}"
