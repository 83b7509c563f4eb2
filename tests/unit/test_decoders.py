"""Every decoder, fuzzed: any bytes are read or refused by a documented error, and what was read is written back equal.

The gate draws few inputs, always the same; the storm draws many new ones. An input that breaks a decoder goes into
`tests/fixtures/decoders/`, in hexadecimal. Each run reads it again. The failing test prints the file.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.decoders import CORPUS, DECODERS, Decoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SLOW = ("recorded-history", "settings", "url")
"""Decoders that take milliseconds for one input."""
DEEP = 20_000
TOKENS = [
    *(b"", b"\x00", b"\xff", b"\x80", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xc2\xb2", b"\xd9\xa5", b"\xef\xbb\xbf"),
    *(b"-1", b"0", b"1e9", b"1.5", b"9" * 20, b"9" * 40, b"1" * 5000, b"1e99999999999999999999", b"NaN", b"Infinity"),
    *(b"null", b"true", b"\\u0000", b"\\ud800", b"{}", b"[]"),
    *(bytes([each]) for each in b'",:/?#@&=%'),
    *(b"%00", b"%ff", b"[::1]", b"[", b"]", b" ", b"\n", b"\t", b"\r\n", b"~1893456000000", b"*", b"L", b"#2", b"-"),
    *(b"\xc0", b"\xc1", b"\xd4\x00\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xdb\xff\xff\xff\xff"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xcb\x7f\xf8" + bytes(6), b"\x80", b"\x90", b"\xa0"),
]
"""Texts and MessagePack values at the edges of what decoders accept."""
HUGE = [
    *(each * DEEP for each in (b"[", b'{"a":', b"\x91", b"\x81\xa1x", b"9", b"a", b"\x00", b"\xff", b" ", b"(", b"%")),
    *(each * DEEP for each in (b"\x03", b"\x03" + bytes(6), b"a:", b"a=1&", b",", b"P1D", b"* ", b"1-2,")),
]


def edited(base: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Replace spans of bytes, each given by its place, its length and the new bytes."""
    for place, length, new in edits:
        at = place % (len(base) + 1)
        base = base[:at] + new + base[at + length :]
    return base


def inputs(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Return bytes near those that the decoder accepts, and any bytes."""
    pieces = st.sampled_from(TOKENS) | st.binary(max_size=9) | st.sampled_from(decoder.samples)
    edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 9), pieces), max_size=4)
    return st.builds(edited, st.sampled_from(decoder.samples), edits) | st.binary(max_size=99)


def check(name: str, data: bytes) -> bool:
    """Decode bytes; write back what was read, and read it again. Return whether the bytes were accepted."""
    decoder = DECODERS[name]
    try:
        try:
            found = decoder.decode(data)
        except decoder.errors:
            return False
        written = decoder.encode(found)
        if written is not None:
            assert decoder.decode(written) == found
    except Exception as error:
        error.add_note(keeping(name, data))
        raise
    return True


def keeping(name: str, data: bytes) -> str:
    """Return the text that says how to keep an input."""
    file = (CORPUS / name / f"{sha256(data).hexdigest()[:12]}.hex").relative_to(ROOT)
    return f"{name} is broken by {data[:2000]!r}; to keep this input, write {data[:2000].hex()} into {file}"


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*/*.hex")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_what_once_broke_a_decoder(file: Path) -> None:
    check(file.parent.name, bytes.fromhex(file.read_text(encoding="ascii")))


@pytest.mark.parametrize("name", DECODERS)
def test_samples_are_accepted(name: str) -> None:
    accepted = [check(name, data) for data in DECODERS[name].samples]
    assert any(accepted)


@pytest.mark.parametrize("name", DECODERS)
def test_long_and_deep_inputs(name: str) -> None:
    sample, most = DECODERS[name].samples[0], 5_000 if name in SLOW else None
    for data in HUGE:
        for at in (len(sample) // 2, len(sample)):
            check(name, sample[:at] + data[:most] + sample[at:])
        check(name, data[:most])


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    examples = 20 if name in SLOW else 100

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs(DECODERS[name]))
    @example(b"")
    def play(data: bytes) -> None:
        check(name, data)

    play()


@pytest.mark.storm
@pytest.mark.parametrize("name", DECODERS)
def test_many_bytes_are_read_or_refused(name: str) -> None:
    examples = 1_000 if name in SLOW else 20_000

    @settings(max_examples=examples, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs(DECODERS[name]))
    def play(data: bytes) -> None:
        check(name, data)

    play()
