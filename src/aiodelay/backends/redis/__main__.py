"""`python -m aiodelay.redis <script>` writes a whole script; `--keys <namespace>` the keys that it is given."""

from __future__ import annotations

import sys

from .connection.scripts import NAMES, STANDALONE, script
from .records.keys import Keys


def main() -> int:
    """Write what is asked for."""
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
