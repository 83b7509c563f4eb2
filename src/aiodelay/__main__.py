"""Run the `aiodelay` command as `python -m aiodelay`."""

from .cli import main

if __name__ == "__main__":
    main()
