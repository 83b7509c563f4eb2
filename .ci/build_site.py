"""Build the site in build/site from docs/, with its texts for programs, and check its links.

Usage: python .ci/build_site.py, at the root of the repository, with the dependency group `site` installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe
from site_links import broken_in_markdown, broken_in_site
from site_pages import expanded, full_text, overview, pages_of

ROOT = Path(__file__).resolve().parents[1]
COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""Zensical colours each character, also in a log."""
OUTSIDE = ("AGENTS.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "examples/README.md")
"""Markdown files outside docs/ that link into docs/."""


def main() -> None:
    build = ["zensical", "build", "--clean", "--strict"]
    built = subprocess.run(build, check=False, cwd=ROOT, capture_output=True, text=True)
    print(COLOUR.sub("", built.stdout + built.stderr))
    if built.returncode:
        sys.exit("Zensical has not built the site")
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    site, docs = ROOT / project["site_dir"], ROOT / project["docs_dir"]
    package = griffe.load("aiodelay", search_paths=[ROOT / "src"], resolve_aliases=True)
    texts = []
    for page in pages_of(project["nav"]):
        source = (docs / page.path).read_text(encoding="utf-8")
        text = expanded(source, ROOT, lambda name: "\n\n".join(docstrings(package, name)))
        (site / page.path).write_text(text, encoding="utf-8")
        if page.path.endswith("/README.md"):  # its HTML is index.html
            (site / page.path).with_name("index.md").write_text(text, encoding="utf-8")
        texts.append((page, text))
    (site / "llms.txt").write_text(overview(project["site_name"], project["site_description"], texts), encoding="utf-8")
    (site / "llms-full.txt").write_text(full_text(texts), encoding="utf-8")
    if broken := [*broken_in_site(site), *broken_in_markdown(ROOT, OUTSIDE)]:
        sys.exit("\n".join(broken))


def docstrings(package: griffe.Object | griffe.Alias, name: str) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a public name, and then of its public members."""
    found = package[name.partition(".")[2]]
    yield from described(found, name, "##")
    if found.is_class or found.is_module:
        names = found.exports or [each for each in found.all_members if not each.startswith("_")]
        for each in names:
            member = found.all_members[str(each)]
            if member.has_docstring or member.is_function:
                yield from described(member, f"{name}.{each}" if found.is_module else f"{found.name}.{each}", "###")


def described(found: griffe.Object | griffe.Alias, name: str, heading: str) -> Iterator[str]:
    yield f"{heading} {name}"
    if found.is_function:
        yield f"```python\n{found.signature()}\n```"
    if found.docstring:
        yield found.docstring.value


if __name__ == "__main__":
    main()
