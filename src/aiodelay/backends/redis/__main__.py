"""The command `python -m aiodelay.redis`. It shows operators the scripts and keys of the Redis backend.

With the name of a script, the command prints the complete Lua text of that script. With `--keys <namespace>`, it prints
the keys that a script of the store takes.
"""

from __future__ import annotations

import sys

from .connection.scripts import NAMES, STANDALONE, script
from .records.keys import Keys


def main() -> int:
    """Print a script, or the keys of a namespace. Return the exit status."""
    match sys.argv[1:]:
        case ["--keys", namespace]:
            sys.stdout.write("\n".join(Keys(namespace).fixed) + "\n")
        case [name] if name in NAMES + STANDALONE:
            sys.stdout.write(script(name).text.decode())
        case _:
            sys.stderr.write(f"usage: python -m aiodelay.redis <{'|'.join(NAMES + STANDALONE)}> | --keys <namespace>\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
