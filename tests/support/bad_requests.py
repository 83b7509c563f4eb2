"""Requests that a delay box must refuse, each with a part of the expected reason."""

from __future__ import annotations

from aiodelay.core.validation import RESERVED_HEADERS

__all__ = ["ARTICLE", "BAD", "with_field"]

ARTICLE = '{"topic": "T", "message": "<message body>", "countdown": 120}'


def with_field(name: str, written: str) -> str:
    """Return a good request with another value in one field."""
    fields = {"topic": '"T"', "message": '"m"', "countdown": "1"}
    if name == "at":
        del fields["countdown"]
    return "{" + ", ".join(f'"{each}": {value}' for each, value in (fields | {name: written}).items()) + "}"


BAD: list[tuple[str | bytes | None, str]] = [
    (None, "it has no value"),
    (b"", "no JSON text"),
    (b"\xff", "byte 0 is not UTF-8"),
    ('"T"', "a text, not a JSON object"),
    ("[]", "an array, not a JSON object"),
    ("[" * 100_000, "nested too deeply"),
    (ARTICLE + "x", "no JSON text"),
    (ARTICLE[:-1], "no JSON text"),
    ("\ufeff" + ARTICLE, "no JSON text"),
    (ARTICLE.encode("utf-16"), "UTF-8"),
    ("{}", "it has no topic"),
    (with_field("topic", "null"), "it has no topic"),
    (with_field("topic", "7"), "its topic is a number"),
    (with_field("topic", '""'), "cannot be the name"),
    (with_field("topic", '"a b"'), "cannot be the name"),
    (with_field("topic", '"__consumer_offsets"'), "cannot be the name"),
    (with_field("topic", '"\\ud800"'), "cannot be the name"),
    (with_field("topic", '"T2"'), "topic T2 is not allowed"),
    ('{"topic": "T", "countdown": 1}', "no message"),
    *[(with_field("message", each), "as message") for each in ("null", "1", "1.5", "true")],
    (with_field("message", '"\\ud800"'), "lone surrogate"),
    (with_field("message", f'"{"x" * 1001}"'), "1001 bytes"),
    ('{"topic": "T", "message": "m"}', "neither countdown nor at"),
    (with_field("countdown", "null"), "neither countdown nor at"),
    ('{"topic": "T", "message": "m", "countdown": 1, "at": "2027-01-01T00:00:00Z"}', "both countdown and at"),
    *[
        (with_field("countdown", each), "not 0 to 315360000 seconds")
        for each in ("-1", "-1e-9", "315360001", "1e999999999", "1e99999999999999999999", "-1e99999999999999999999")
    ],
    *[
        (with_field("countdown", each), "NaN" if each == "NaN" else "Infinity")
        for each in ("NaN", "Infinity", "-Infinity")
    ],
    *[(with_field("countdown", each), "not a number of seconds") for each in ("true", '"5"', "[5]", "{}")],
    (with_field("countdown", "1" * 5000), "no JSON text"),
    (with_field("at", "1900000000"), "its at is a number"),
    (with_field("at", '"2027-01-01T00:00:00"'), "which has no offset"),
    (with_field("at", '"tomorrow"'), "with an offset, such as"),
    (with_field("at", '"9999-01-01T00:00:00Z"'), "at most 3650d ahead"),
    *[(with_field("id", each), f"its id is {kind}") for each, kind in (("7", "a number"), ("{}", "an object"))],
    *[(with_field("id", each), "id is") for each in ('""', '"\\n"', f'"{"x" * 256}"', '"a~1234567890123"')],
    (with_field("id", '"\\ud800"'), "UTF-8"),
    (with_field("key", "7"), "its key is a number"),
    (with_field("key", '"\\ud800"'), "lone surrogate"),
    (with_field("key", f'"{"x" * 16_385}"'), "16385 bytes"),
    (with_field("headers", "[]"), "its headers are an array"),
    (with_field("headers", '{"a": 1}'), "its header 'a' is a number"),
    (with_field("headers", '{"a b": "1"}'), "header name"),
    (with_field("headers", '{"aiodelay-x": "1"}'), "reserved"),
    *[(with_field("headers", f'{{"{each}": "1"}}'), f"header '{each}' is reserved") for each in RESERVED_HEADERS],
    (with_field("headers", '{"a": "1", "a": "2"}'), "more than once"),
    (with_field("countdwn", "1"), "it has a field 'countdwn'"),
    (ARTICLE.replace('"T",', '"T", "topic": "T",'), "the field 'topic' more than once"),
]
