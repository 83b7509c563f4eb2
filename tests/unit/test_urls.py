"""The options in the URLs of stores and sinks."""

from __future__ import annotations

import pytest

from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, masked_url


def refused(url: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        UrlOptions(url)
    return str(caught.value)


def test_parts_of_a_url_with_one_host() -> None:
    parts = UrlOptions("redis://user:pw@host:7000/2?x=1#f").parts
    assert (parts.scheme, parts.hostname, parts.port, parts.path, parts.fragment) == ("redis", "host", 7000, "/2", "f")


def test_parts_of_a_url_with_several_hosts() -> None:
    parts = UrlOptions("kafka://user:pw@one:1,two:2/topic?x=1").parts
    assert (parts.scheme, parts.netloc, parts.path) == ("kafka", "user:pw@one:1,two:2", "/topic")


def test_a_url_that_cannot_be_split_is_refused_without_its_password() -> None:
    text = refused("redis://user:secret@[host/0")
    assert "a URL" in text
    assert "secret" not in text


def test_an_option_that_is_given_twice_is_refused() -> None:
    assert "given twice" in refused("sqlite:///f?journal=1&journal=2")


def test_options_are_read_and_have_defaults() -> None:
    options = UrlOptions("x://h?number=7&text=a%20b&yes=true&no=false")
    assert options.integer("number", 0, 0, 10) == 7
    assert options.integer("other", 5, 0, 10) == 5
    assert (options.text("text"), options.text("absent", "default")) == ("a b", "default")
    assert (options.flag("yes"), options.flag("no"), options.flag("absent")) == (True, False, False)
    options.finish()


@pytest.mark.parametrize("text", ["", "x", "-1", "11", "1.5", "٣", "1" * 19])
def test_a_number_that_is_none_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="an integer from 0 to 10"):
        UrlOptions(f"x://h?n={text}").integer("n", 0, 0, 10)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError, match="true or false"):
        UrlOptions("x://h?f=1").flag("f")


def test_an_unknown_option_is_refused_and_the_known_ones_are_named() -> None:
    options = UrlOptions("x://h?known=1&other=2")
    options.text("known")
    with pytest.raises(ConfigurationError, match=r"other.*known"):
        options.finish()
    with pytest.raises(ConfigurationError, match="none"):
        UrlOptions("x://h?other=2").finish()


@pytest.mark.parametrize("url", ["memory://host", "memory:///path", "memory://#f"])
def test_a_scheme_that_says_all_takes_neither_host_nor_path(url: str) -> None:
    with pytest.raises(ConfigurationError, match="without host or path"):
        UrlOptions(url).finish(bare=True)
    UrlOptions("memory://").finish(bare=True)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://user:pw@host/0", "redis://user:***@host/0"),
        ("user:pw@host", "user:***@host"),
        ("pw@host", "***@host"),
        ("redis://user@host", "redis://user@host"),
        ("redis://host:secret/0", "redis://host:***/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("sqlite:///f?password=x&journal=3", "sqlite:///f?password=***&journal=3"),
    ],
)
def test_secrets_of_a_url_are_masked(url: str, masked: str) -> None:
    assert masked_url(url) == masked
