"""`aiodelay config`: is a file right, what holds and where does it come from, and tokens for it."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .errors import NOT_UNDERSTOOD, CommandError
from .serve import read

__all__ = ["config"]

LEAST_TOKEN = 20

config: App = App(name="config", help="Check and show the service's settings; make tokens.")
File = Annotated[Path | None, Parameter(name=["--config", "-c"])]


@config.command
def check(*, file: File = None) -> None:
    """Say whether the service can be started so; every mistake is named, each on a line.

    Nothing is connected. Environment variables count as they do for `aiodelay serve`.

    Args:
        file: As for `aiodelay serve`.
    """
    read(file).settings()
    print("no mistake was found")


@config.command
def show(
    *,
    file: File = None,
    origin: Annotated[bool, Parameter(negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show every setting that holds, secrets masked.

    Args:
        file: As for `aiodelay serve`.
        origin: Say where each comes from: a file and line, an environment variable, or a default.
        json_: One JSON object a line.
    """
    for each in read(file).shown():
        fields = {"field": each.field, "value": each.value} | ({"origin": each.origin} if origin else {})
        print(
            json.dumps(fields) if json_ else f"{each.field} = {each.value}" + (f"  # {each.origin}" if origin else "")
        )


@config.command
def hash_token(*, stdin: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Make a token for the API: the token goes to whoever uses it, its hash into the file.

    Args:
        stdin: Hash the token that standard input holds, in place of a new one.
    """
    from aiodelay.service import hash_token as hash_of  # noqa: PLC0415 - other commands do not need it

    token = sys.stdin.readline().strip() if stdin else secrets.token_urlsafe(32)
    if len(token) < LEAST_TOKEN:
        raise CommandError(
            f"the token is {len(token)} characters long; allowed: at least {LEAST_TOKEN}, chosen at random",
            exit_code=NOT_UNDERSTOOD,
        )
    if not stdin:
        print(f"# token, shown this once: {token}")
    print(f'[[api.tokens]]\nname = "..."\nhash = "{hash_of(token)}"')
    print('scopes = ["read", "schedule", "operate"]')
