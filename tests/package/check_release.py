"""Checks that a tag may become a release, and writes the release notes.

The tag is the version of the package, CHANGELOG.md has a dated section of this version, and no fragment waits in
`changelog.d/`. The session `release` of the noxfile runs it:
`python tests/package/check_release.py v0.1.0 --notes FILE`.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = r"^## {version} \((?P<date>[^)]*)\)\n(?P<notes>.*?)(?=^## |\Z)"
DATE = r"\d{4}-\d\d-\d\d"


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Return the release notes of the tag.

    Raises:
        ValueError: The tag may not become a release.
    """
    version = runpy.run_path(f"{root / 'src/aiodelay/core/version.py'}")["__version__"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and the package has version {version}: the tag must be v{version}")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(SECTION.format(version=re.escape(version)), text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError(f"CHANGELOG.md has no section {version}: run `nox -s changelog -- --version {version}`")
    if not re.fullmatch(DATE, section["date"]):
        raise ValueError(f"the section {version} of CHANGELOG.md has the date {section['date']!r}: write the day")
    if waiting := sorted(file.name for file in (root / "changelog.d").glob("*.*.md")):
        raise ValueError(f"changes wait in changelog.d: {', '.join(waiting)}")
    return section["notes"].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, required=True, help="the file for the release notes")
    given = parser.parse_args()
    try:
        notes = notes_of(given.tag)
    except ValueError as error:
        sys.exit(f"{error}")
    given.notes.parent.mkdir(parents=True, exist_ok=True)
    given.notes.write_text(notes, encoding="utf-8")


if __name__ == "__main__":
    main()
