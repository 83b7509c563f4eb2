"""Old path of `aiodelay.backends.redis.__main__`. It keeps the command `python -m aiodelay.redis` working."""

import sys

from aiodelay.backends.redis.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
