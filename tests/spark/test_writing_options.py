"""What `format("aiodelay")` is told when it writes: read on the driver, refused there with the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiodelay.errors import ConfigurationError
from aiodelay.spark.options import store_url


def test_a_store_is_named_by_url_variable_or_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORE", "redis://:secret@host\n")
    secret = tmp_path / "store"
    secret.write_text("redis://:other@host\n")
    assert store_url("redis://host") == "redis://host"
    assert store_url("env:STORE") == "redis://:secret@host"
    assert store_url(f"file:{secret}") == "redis://:other@host"


def test_a_missing_variable_or_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigurationError, match="'env:NO_SUCH'"):
        store_url("env:NO_SUCH")
    with pytest.raises(ConfigurationError, match="absent"):
        store_url(f"file:{tmp_path / 'absent'}")
    with pytest.raises(ConfigurationError, match="empty"):
        store_url(f"file:{empty}")
