"""`aiodelay config`: checks the service's settings, shows them with their origins, and makes tokens."""

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
    """Check the settings of the service, and print every mistake on its own line.

    The check connects to nothing. Like `aiodelay serve`, it reads environment variables too.

    Args:
        file: The settings file, as for `aiodelay serve`.
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
    """Show the value of every setting, with secrets masked.

    Args:
        file: The settings file, as for `aiodelay serve`.
        origin: Also show the origin of each value: a file and line, an environment variable, or the default.
        json_: Write one JSON object per line.
    """
    for each in read(file).shown():
        fields = {"field": each.field, "value": each.value} | ({"origin": each.origin} if origin else {})
        print(
            json.dumps(fields) if json_ else f"{each.field} = {each.value}" + (f"  # {each.origin}" if origin else "")
        )


@config.command
def hash_token(*, stdin: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Make a token for the API. Give the token to its user, and put its hash into the settings file.

    Args:
        stdin: Hash the token on standard input instead of a new token.
    """
    from aiodelay.service import hash_token as hash_of  # noqa: PLC0415 - other commands do not need it

    token = sys.stdin.readline().strip() if stdin else secrets.token_urlsafe(32)
    if len(token) < LEAST_TOKEN:
        raise CommandError(
            f"the token has {len(token)} characters; allowed: at least {LEAST_TOKEN} random characters",
            exit_code=NOT_UNDERSTOOD,
        )
    if not stdin:
        print(f"# token, shown only now: {token}")
    print(f'[[api.tokens]]\nname = "..."\nhash = "{hash_of(token)}"')
    print('scopes = ["read", "schedule", "operate"]')
