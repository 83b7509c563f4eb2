"""What Lua knows of the record is what `model.FIELDS` and `codecs` say; ids and scripts are put together rightly."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay import model, transitions
from aiodelay.identifiers import new_id
from aiodelay.redis import checks
from aiodelay.redis.keys import FIXED, member_of, text_of
from aiodelay.redis.scripts import NAMES, STANDALONE, packed, script, source_of

WIDTHS = {"u8": "B", "u16": "H", "u48": "I6", "8s": "c8"}
FLAGS = {"rule": "RECURRING", "alone": "ALONE", "no_retry": "NO_RETRY"}


def constant(name: str) -> str:
    """Return what a Lua constant is set to."""
    for part in ("base", "record", "memory", "moves", "claim"):
        if found := re.search(rf"^local ([\w, ]*\b{name}\b[\w, ]*) = (.+)$", source_of(part), re.MULTILINE):
            names, values = found[1].split(", "), found[2].split(", ")
            return values[names.index(name)].strip("'")
    raise AssertionError(f"no Lua constant {name}")


def test_the_prefix_in_lua_is_that_of_fields() -> None:
    widths = [WIDTHS[each.prefix] for each in model.FIELDS if each.prefix in WIDTHS]
    assert constant("PREFIX") == ">BB" + "".join(widths)
    assert constant("HEADED") == ">I6BB" + "".join(widths)
    sizes = {"B": 1, "H": 2, "I6": 6, "c8": 8}
    assert int(constant("PREFIX_SIZE")) == 2 + sum(sizes[each] for each in widths)
    assert int(constant("FORMAT")) == model.FORMAT_VERSION


def test_the_flags_in_lua_are_those_of_fields() -> None:
    flags = [(each.name, each.prefix) for each in model.FIELDS if each.prefix and each.prefix.startswith("flag:")]
    bits = {name: prefix.removeprefix("flag:") for name, prefix in flags}
    assert {name: int(constant(FLAGS[name])) for name in FLAGS} == {name: 1 << int(bits[name]) for name in FLAGS}
    assert constant("LATE_SHIFT") == bits["late"].partition("-")[0]
    assert int(constant("VERSIONED")) == 32


def test_the_numbers_in_lua_are_those_of_the_model() -> None:
    known = {
        "WINDOW": model.RETRY_WINDOW_MS,
        "TOMBSTONE_WINDOW": model.TOMBSTONE_WINDOW_MS,
        "MAX_LEASE": model.MAX_LEASE_MS,
        "SUSPECT_LAPSES": transitions.SUSPECT_LAPSES,
        "KILLS_TO_DEATH": transitions.KILLS_TO_DEATH,
        "TOKEN_EPOCH": transitions.TOKEN_EPOCH_MS,
        "COUNTERS": 4096,
        "MOST": model.MAX_CLAIM_MESSAGES,
        "MOST_BYTES": model.MAX_CLAIM_BYTES,
    }
    assert {name: int(constant(name)) for name in known} == known
    in_tables = {
        "RIGHTING": transitions.RIGHTING_MS,
        "SILENT_LEASES": transitions.SILENT_LEASES,
        "DEAD_LEASES": transitions.DEAD_LEASES,
        "FIRST": transitions.TRIAL_MS,
        "LONGEST": transitions.LONGEST_TRIAL_MS,
    }
    found = {name: re.search(rf"\b{name} = (\d+)", source_of("moves")) for name in in_tables}
    assert {name: each and int(each[1]) for name, each in found.items()} == in_tables


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_takes_and_is_whole(name: str) -> None:
    own = source_of(name)
    assert own.startswith(f"-- {name}: ")
    assert re.search(r"^-- Returns ", own, re.MULTILINE)
    assert source_of("base") in script(name).text.decode()
    assert script(name) is script(name)


@pytest.mark.parametrize("name", STANDALONE)
def test_every_script_of_lists_and_topics_says_what_it_takes(name: str) -> None:
    assert source_of(name).startswith(f"-- {name}: ")
    assert re.search(r"^-- Returns ", source_of(name), re.MULTILINE)


def test_every_file_is_a_script_or_a_part_of_one() -> None:
    parts = {part for name in NAMES + STANDALONE for part in re.findall(r"\w+", _parts_of(name))}
    assert {*NAMES, *STANDALONE} | parts == set(LUA)


def _parts_of(name: str) -> str:
    found = re.search(r"^--@ (.+)$", source_of(name), re.MULTILINE)
    return found[1] if found else ""


def test_every_fixed_key_has_its_place_in_lua() -> None:
    assert re.findall(r"KEYS\[(\d+)\]", source_of("base")) == [str(i) for i in range(1, len(FIXED) + 1)]


@given(st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_an_id_comes_back_as_it_was(text: str) -> None:
    assert text_of(member_of(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "01a1fd8ff42777ee9a6ea48aee47607e",
        "03a45df61003483db582a3ff2f0d5ded",
        "m",
        "é ✓",
        "01a1fd8ff42777ee9a6ea48aee47607e~1893456000000",
        "s~1893456000000",
        "s~0000000000",
        "s~01893456000000",
        "a~1893456000000~1893456000000",
        "s~" + "9" * 15,
    ],
)
def test_ids_of_each_kind_come_back(text: str) -> None:
    assert text_of(member_of(text)) == text


def test_own_ids_are_short() -> None:
    assert len(member_of(new_id())) == 17
    assert len(member_of(f"{new_id()}~1893456000000")) == 24


def test_commands_are_packed_as_redis_reads_them() -> None:
    assert packed(["GET", b"\xff", 7]) == b"*3\r\n$3\r\nGET\r\n$1\r\n\xff\r\n$1\r\n7\r\n"


LUA = [each.name.removesuffix(".lua") for each in files("aiodelay.redis").joinpath("lua").iterdir()]
SINCE = {
    "1.0": "DEL EXISTS GET INFO LLEN LPUSH LRANGE LTRIM MGET PING RPUSH SADD SCARD SELECT SET SISMEMBER SMEMBERS "
    "SREM TYPE ZSCORE",
    "1.2": "ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREM",
    "2.0": "CONFIG|GET HDEL HEXISTS HGET HGETALL HKEYS HLEN HMGET HSET HSETNX HINCRBY HVALS ZCOUNT",
    "2.6": "EVAL EVALSHA PEXPIRE SCRIPT|EXISTS SCRIPT|LOAD TIME",
    "2.8": "SCAN",
    "3.0": "WAIT",
    "4.0": "MEMORY UNLINK",
    "5.0": "XADD XINFO XRANGE XREAD XREVRANGE XTRIM",
    "6.2": "BLMOVE SMISMEMBER ZMSCORE",
    "7.2": "WAITAOF",
}
"""Every command that is sent, by the version of Redis that brought it; all are in Valkey 7.2."""


def test_no_command_is_newer_than_the_oldest_server() -> None:
    """That their options are not either is seen on a real 6.2, which the suites run on where its wheel is."""
    known = {command: since for since, commands in SINCE.items() for command in commands.split()}
    sent = set(re.findall(r"(?:call|redis\.pcall)\('([A-Z]+)'", "".join(map(source_of, LUA))))
    for module in files("aiodelay.redis").iterdir():
        if module.name.endswith(".py"):
            calls = r'(?:command\(|packed\(\[)\s*"([A-Z]+)"(?:, "(GET|EXISTS|LOAD)")?'
            found = re.findall(calls, module.read_text("utf-8"))
            sent |= {f"{first}|{second}" if second else first for first, second in found}
    assert sent <= known.keys(), "say since when it is there"
    newer = {command for command in sent if tuple(map(int, known[command].split("."))) > checks.LEAST_REDIS}
    assert newer == {"WAITAOF"}, "which is asked for only with durability=fsynced, and refused on older servers"
    assert (checks.LEAST_REDIS, checks.LEAST_VALKEY, checks.LEAST_FSYNCED) == ((6, 2), (7, 2), (7, 2))
