"""docs/architecture.md names only files that exist, and every part of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = re.findall(r"`((?:src|tests|docs|\.ci)/[^`\s]*)`", PAGE)


def test_every_path_on_the_page_exists() -> None:
    missing = [path for path in PATHS if not (ROOT / path).exists() or path.endswith("/") != (ROOT / path).is_dir()]
    assert missing == []


def test_the_page_names_every_part() -> None:
    source = ROOT / "src" / "aiodelay"
    packages = {f"src/aiodelay/{each.name}/" for each in source.iterdir() if (each / "__init__.py").exists()}
    public_paths = {"src/aiodelay/kafka/", "src/aiodelay/redis/"}
    assert packages - public_paths <= set(PATHS)


def test_the_way_of_a_message_has_ten_steps() -> None:
    way = PAGE.partition("## A message's way in ten steps\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^(\d+)\. ((?:.+\n?(?!\d+\. |\n))*.*)", way, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert all("`src/aiodelay/" in text for _, text in steps)


def test_every_folder_says_what_is_inside() -> None:
    """Where a folder has more than ten modules, its docstring also says where to begin; the page says so of the top."""
    for folder in [each.parent for each in (ROOT / "src" / "aiodelay").glob("*/**/__init__.py")]:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        modules = [each for each in folder.glob("*.py") if each.name != "__init__.py"]
        assert text.startswith('"""'), folder
        if len(modules) > 10:
            has_start = "egin with" in text.partition('"""\n')[0] or (folder / "README.md").exists()
            assert has_start, f"{folder} has {len(modules)} modules, and does not say where to begin"
