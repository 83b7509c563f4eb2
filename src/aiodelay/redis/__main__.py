"""Old path of `aiodelay.backends.redis.__main__`: `python -m aiodelay.redis` goes on working."""

import sys

from aiodelay.backends.redis.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
