"""`python -m aiodelay` is `aiodelay`."""

from aiodelay.cli import main

if __name__ == "__main__":
    main()
