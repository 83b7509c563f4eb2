"""The Lua scripts agree with `record_format` and `codecs`, and ids and scripts are composed correctly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.backends.redis.connection import checks
from aiodelay.backends.redis.connection.scripts import (
    MODULES,
    NAMES,
    STANDALONE,
    filled,
    packed,
    part_of,
    script,
    source_of,
)
from aiodelay.backends.redis.records.keys import FIXED, member_of, text_of
from aiodelay.backends.redis.records.layouts import LAYOUTS, lua_constants, span
from aiodelay.backends.redis.store import commands
from aiodelay.core import pulse, transitions
from aiodelay.core import values as model
from aiodelay.core.ids import new_id
from tests.support.lua_code import LUA, calls, code_of

CONSTANTS = lua_constants(model.FIELDS)
WIDTHS = {"u8": "B", "u16": "H", "u48": "I6", "8s": "c8"}
FLAGS = {"rule": "RECURRING", "alone": "ALONE", "no_retry": "NO_RETRY"}


def constant(name: str, parts: Sequence[str] = ("base", "record", "moves")) -> str:
    """Return what a Lua constant is set to, in a script that has been put together."""
    for part in parts:
        if found := re.search(rf"^local ([\w, ]*\b{name}\b[\w, ]*) = (.+)$", part_of(part), re.MULTILINE):
            names, values = found[1].split(", "), found[2].split(", ")
            return values[names.index(name)].strip("'")
    raise AssertionError(f"no Lua constant {name}")


def test_the_prefix_in_lua_is_that_of_fields() -> None:
    widths = [WIDTHS[each.prefix] for each in model.FIELDS if each.prefix in WIDTHS]
    assert constant("PREFIX") == ">BB" + "".join(widths)
    assert constant("HEADED") == ">I6BB" + "".join(widths)
    sizes = {"B": 1, "H": 2, "I6": 6, "c8": 8}
    assert int(filled("RECORD.SIZE", CONSTANTS)) == 2 + sum(sizes[each] for each in widths)
    assert int(constant("FORMAT")) == model.FORMAT_VERSION


def test_the_flags_in_lua_are_those_of_fields() -> None:
    flags = [(each.name, each.prefix) for each in model.FIELDS if each.prefix and each.prefix.startswith("flag:")]
    bits = {name: prefix.removeprefix("flag:") for name, prefix in flags}
    assert {name: int(constant(FLAGS[name])) for name in FLAGS} == {name: 1 << int(bits[name]) for name in FLAGS}
    assert constant("LATE_SHIFT") == bits["late"].partition("-")[0]
    assert int(constant("VERSIONED")) == 32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lua_and_python_take_the_same_parts(layout: str) -> None:
    data = bytes(range(100))
    for part in LAYOUTS[layout]:
        first = int(CONSTANTS[f"{layout}.{part.upper()}_FIRST"])
        last = int(CONSTANTS[f"{layout}.{part.upper()}_LAST"])
        start = first - 1 if first > 0 else len(data) + first
        end = last if last > 0 else len(data) + last + 1
        assert data[span(layout, part)] == data[start:end], part


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_layout_follow_one_another(layout: str) -> None:
    data = bytes(range(100))
    parts = [data[span(layout, part)] for part in LAYOUTS[layout]]
    has_rest = None in LAYOUTS[layout].values()
    assert b"".join(parts) == (data if has_rest else data[: sum(map(len, parts))])


def test_offsets_of_the_record_in_a_value() -> None:
    """Golden: what programs in other languages and older versions have written stands at these places."""
    found = {name: CONSTANTS[f"VALUE.{name}"] for name in ("REVISION_FIRST", "DUE_MS_LAST", "LAPSES_FIRST", "OP_LAST")}
    assert found == {"REVISION_FIRST": "11", "DUE_MS_LAST": "22", "LAPSES_FIRST": "31", "OP_LAST": "40"}
    assert (CONSTANTS["RECORD.SIZE"], CONSTANTS["RECORD.VERSIONED_SIZE"], CONSTANTS["VALUE.BODY_FIRST"]) == (
        "34",
        "42",
        "41",
    )


def test_the_numbers_in_lua_are_those_of_the_model() -> None:
    known = {
        "MAX_LEASE": model.MAX_LEASE_MS,
        "SUSPECT_LAPSES": transitions.SUSPECT_LAPSES,
        "KILLS_TO_DEATH": transitions.KILLS_TO_DEATH,
        "TOKEN_EPOCH": transitions.TOKEN_EPOCH_MS,
        "COUNTERS": 4096,
        "MOST_BYTES": model.MAX_CLAIM_BYTES,
    }
    assert {name: int(constant(name)) for name in known} == known
    in_modules = {
        "WINDOW": model.RETRY_WINDOW_MS,
        "TOMBSTONE_WINDOW": model.TOMBSTONE_WINDOW_MS,
        "RIGHTING": transitions.RIGHTING_MS,
        "SILENT_LEASES": transitions.SILENT_LEASES,
        "DEAD_LEASES": transitions.DEAD_LEASES,
        "FIRST": transitions.TRIAL_MS,
        "LONGEST": transitions.LONGEST_TRIAL_MS,
        "MOST_UNANSWERED": pulse.MOST_UNANSWERED,
    }
    text = "\n".join(map(source_of, MODULES))
    found = {name: re.search(rf"\b{name} = (\d+)", text) for name in in_modules}
    assert {name: each and int(each[1]) for name, each in found.items()} == in_modules


def test_store_and_script_count_the_cost_of_commands_alike() -> None:
    known = {name: int(constant(name, ["apply"])) for name in ("MOST_COST", "CHANGE_COST")}
    assert known == {"MOST_COST": commands.MOST_COST, "CHANGE_COST": commands.CHANGE_COST}


# --- no bare offset ---------------------------------------------------------------------------------------

TAKES_POSITIONS = {"sub": 1, "byte": 1, "string.sub": 1, "string.byte": 1, "unpack_bytes": 2, "struct.unpack": 2}
"""Functions that take a part of a byte string, and which argument is the first that is a position."""


def is_bare(position: str) -> bool:
    """Say whether a position holds a number that no layout gives.

    Lua counts from 1 and ends are inclusive, so 1 may be added or taken off. A MessagePack value begins at `at`, and
    numbers added to `at` are the lengths of MessagePack's own marks.
    """
    if re.match(r"at\b", position):
        return False
    numbers = re.findall(r"(?<![\w.])\d\w*", re.sub(r"'[^']*'|\[[^\]]*\]", "", position))
    return position.lstrip("-").isdigit() or any(number != "1" for number in numbers)


@pytest.mark.parametrize("name", LUA)
def test_no_script_holds_a_bare_offset(name: str) -> None:
    bare = []
    for function, arguments in calls(code_of(name), *TAKES_POSITIONS):
        positions = arguments[TAKES_POSITIONS[function] :]
        if function == "sub" and positions[0] == "1":  # from the beginning
            positions = positions[1:]
        bare += [f"{function}({', '.join(arguments)})" for position in positions if is_bare(position)]
    assert bare == []


@pytest.mark.parametrize("name", LUA)
def test_no_script_spells_out_the_record(name: str) -> None:
    """Sizes of its prefix, the format of that, and keys of its body are constants that the declaration gives."""
    code = code_of(name)
    sizes = re.findall(r"\b(?:34|41|42)\b|\\34", code)
    formats = [each for each in re.findall(r"'>(\w+)'", code) if len(re.findall(r"[A-Za-z]", each)) > 2]
    keys = re.findall(r"field\([^()]*'\w'\)|value_at\([^()]*\d\)|changes\.\w|rewrite\(\w+, \{ ?\w+ =|'\\161[a-p]", code)
    assert (sizes, formats, keys) == ([], [], [])


def test_the_search_for_bare_offsets_finds_them() -> None:
    code = "local a = sub(value, 33, 40) .. sub(s, 1, #s - 8); b = unpack_bytes('>I6', id, #id - 5), byte(x, 7)"
    code += " c = sub(name, MEMBER.ID_FIRST), byte(s, at, at + 3), sub(s, from, from + length - 1), sub(t, #p + 2)"
    found = [
        [is_bare(each) for each in arguments[TAKES_POSITIONS[of] :]] for of, arguments in calls(code, *TAKES_POSITIONS)
    ]
    assert found == [[True, True], [True, True], [True], [True], [False], [False, False], [False, False], [True]]


def test_a_name_that_no_layout_has_is_told() -> None:
    with pytest.raises(KeyError, match=r"VALUE\.DUE_FIRST"):
        filled("local due = sub(value, VALUE.DUE_FIRST)", CONSTANTS)


@pytest.mark.parametrize("name", [*NAMES, *STANDALONE])
def test_no_name_of_a_constant_is_left_in_a_script(name: str) -> None:
    text = re.sub(r"--.*$", "", script(name).text.decode(), flags=re.MULTILINE)
    assert re.findall(r"\b[A-Z_]{2,}\.[A-Z_]+_(?:FIRST|LAST|OFFSET|SIZE)\b", text) == []


# --- scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_takes_and_is_whole(name: str) -> None:
    own = source_of(name)
    assert own.startswith(f"-- {name}: ")
    assert re.search(r"^-- Returns ", own, re.MULTILINE)
    assert part_of("base") in script(name).text.decode()
    assert script(name) is script(name)


@pytest.mark.parametrize("name", STANDALONE)
def test_every_script_of_lists_and_topics_says_what_it_takes(name: str) -> None:
    assert source_of(name).startswith(f"-- {name}: ")
    assert re.search(r"^-- Returns ", source_of(name), re.MULTILINE)


def test_every_file_is_a_script_or_a_part_of_one() -> None:
    parts = {part for name in NAMES + STANDALONE for part in re.findall(r"\w+", _parts_of(name))}
    assert {*NAMES, *STANDALONE, *MODULES} | parts == set(LUA)


def _parts_of(name: str) -> str:
    found = re.search(r"^--@ (.+)$", source_of(name), re.MULTILINE)
    return found[1] if found else ""


def test_every_fixed_key_has_its_place_in_lua() -> None:
    places = [str(i) for i in range(1, len(FIXED) + 1)]
    of_shards = [str(len(FIXED) + 1)] * 2  # the key whose name says which layout the caller expects
    assert re.findall(r"KEYS\[(\d+)\]", source_of("base")) == places + of_shards


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


SINCE = {
    "1.0": "DEL EXISTS GET INFO LLEN LPUSH LRANGE LTRIM MGET PING RPUSH SADD SCARD SELECT SET SISMEMBER SMEMBERS "
    "SREM TYPE ZSCORE",
    "1.2": "ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREM",
    "2.0": "CONFIG|GET HDEL HEXISTS HGET HGETALL HKEYS HLEN HMGET HSET HSETNX HINCRBY HVALS SUBSCRIBE ZCOUNT",
    "2.6": "CLIENT EVAL EVALSHA PEXPIRE SCRIPT|EXISTS SCRIPT|LOAD TIME",
    "2.8": "HSCAN SCAN ZLEXCOUNT ZRANGEBYLEX ZSCAN",
    "3.0": "WAIT",
    "4.0": "MEMORY UNLINK",
    "5.0": "XADD XINFO XLEN XRANGE XREAD XREVRANGE XTRIM",
    "6.2": "BLMOVE HRANDFIELD SMISMEMBER ZMSCORE",
    "7.2": "WAITAOF",
}
"""Every command that is sent, by the version of Redis that brought it; all are in Valkey 7.2."""


def test_no_command_is_newer_than_the_oldest_server() -> None:
    """That their options are not either is seen on a real 6.2, which the suites run on where its wheel is."""
    known = {command: since for since, commands in SINCE.items() for command in commands.split()}
    sent = set(re.findall(r"(?:call|redis\.pcall)\('([A-Z]+)'", "".join(map(source_of, LUA))))
    for module in Path(str(files("aiodelay.backends.redis"))).rglob("*.py"):
        if module.name.endswith(".py"):
            calls = r'(?:command\(|packed\(\[)\s*"([A-Z]+)"(?:, "(GET|EXISTS|LOAD)")?'
            found = re.findall(calls, module.read_text("utf-8"))
            sent |= {f"{first}|{second}" if second else first for first, second in found}
    assert sent <= known.keys(), "say since when it is there"
    newer = {command for command in sent if tuple(map(int, known[command].split("."))) > checks.LEAST_REDIS}
    assert newer == {"WAITAOF"}, "which is asked for only with durability=fsynced, and refused on older servers"
    assert (checks.LEAST_REDIS, checks.LEAST_VALKEY, checks.LEAST_FSYNCED) == ((6, 2), (7, 2), (7, 2))
