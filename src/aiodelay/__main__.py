"""`python -m aiodelay` is `aiodelay`."""

from .cli import main

if __name__ == "__main__":
    main()
