"""A tag becomes a release only if version, changelog and fragments agree with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.package.check_release import notes_of

CHANGELOG = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- More.\n\n## 0.1.0 (2026-11-01)\n\n- First.\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    version = tmp_path / "src" / "aiodelay" / "core" / "version.py"
    version.parent.mkdir(parents=True)
    version.write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").touch()
    return tmp_path


def test_the_notes_are_the_section_of_the_version(project: Path) -> None:
    assert notes_of("v0.2.0", project) == "### Added\n\n- More.\n"


def test_the_tag_is_the_version(project: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("the tag must be v0.2.0")):
        notes_of("v0.1.0", project)


def test_the_changelog_has_the_version(project: Path) -> None:
    (project / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(ValueError, match=re.escape("CHANGELOG.md has no section 0.2.0")):
        notes_of("v0.2.0", project)


def test_the_section_has_a_day(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(CHANGELOG.replace("2026-12-01", "unreleased"))
    with pytest.raises(ValueError, match=re.escape("has the date 'unreleased'")):
        notes_of("v0.2.0", project)


def test_no_change_waits(project: Path) -> None:
    (project / "changelog.d" / "+more.added.md").touch()
    with pytest.raises(ValueError, match=re.escape("changes wait in changelog.d: +more.added.md")):
        notes_of("v0.2.0", project)
