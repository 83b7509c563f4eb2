import math
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.core.durations import (
    MAX_HORIZON_MS,
    check_horizon,
    format_duration,
    from_epoch_ms,
    parse_duration,
    parse_instant,
    to_epoch_ms,
)
from aiodelay.errors import ConfigurationError, ScheduleTimeError

DAY = 86_400_000
OFFSETS = st.integers(-86_399_999_999, 86_399_999_999).map(lambda us: timezone(timedelta(microseconds=us)))
ZONES = st.sampled_from(["Europe/Paris", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"]).map(ZoneInfo)
TEXT = st.text() | st.from_regex(r"[0-9]{1,70}(\.[0-9]+)?(w|d|h|m|s|ms)", fullmatch=True)


class TestParseDuration:
    @pytest.mark.parametrize(
        ("value", "ms"),
        [
            ("250ms", 250),
            ("5s", 5000),
            ("0s", 0),
            ("5m", 300_000),
            ("1.5h", 5_400_000),
            ("1h30m", 5_400_000),
            ("1h500ms", 3_600_500),
            ("2d", 2 * DAY),
            ("1w", 7 * DAY),
            ("1w1d1h1m1s1ms", 8 * DAY + 3_661_001),
            ("0.1s", 100),
            ("0.0001s", 1),
            ("1.0000001s", 1001),
            ("3650d", MAX_HORIZON_MS),
            ("PT5M", 300_000),
            ("P1DT12H", DAY * 3 // 2),
            ("P2W", 14 * DAY),
            ("PT0.25S", 250),
            (timedelta(seconds=5), 5000),
            (timedelta(0), 0),
            (timedelta(microseconds=1), 1),
            (timedelta(milliseconds=1, microseconds=1), 2),
            (timedelta(days=3650), MAX_HORIZON_MS),
        ],
    )
    def test_reads(self, value: str | timedelta, ms: int) -> None:
        assert parse_duration(value, field="delay") == ms

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "5",
            "5 s",
            " 5s",
            "5s\n",
            "s",
            "--5s",
            "-",
            "+5s",
            "5S",
            "5M",
            "5min",
            "30m1h",
            "1h1h",
            "1..5s",
            ".5s",
            "5.s",
            "nan",
            "inf",
            "1e3s",
            "P",
            "PT",
            "P1DT",
            "P1Y",
            "P1M",
            "PT-5M",
            "pt5m",
            "\N{ARABIC-INDIC DIGIT FIVE}s",
            "1_000s",
            "9" * 5000 + "s",
        ],
    )
    def test_refuses_other_text_and_says_what_is_allowed(self, text: str) -> None:
        with pytest.raises(ScheduleTimeError) as caught:
            parse_duration(text, field="delay")
        message = str(caught.value)
        assert message.startswith("delay is ")
        assert 'allowed: text such as "250ms", "5s"' in message
        assert len(message) < 200

    @pytest.mark.parametrize("value", [5, 0, 1.5, -1, math.nan, math.inf])
    def test_refuses_bare_numbers_with_a_hint(self, value: object) -> None:
        with pytest.raises(ScheduleTimeError, match=r'write timedelta\(seconds=5\) or "5s"'):
            parse_duration(value, field="delay")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [True, False, None, b"5s", Decimal(5), object(), ["5s"], datetime.now(UTC)])
    def test_refuses_other_types(self, value: object) -> None:
        with pytest.raises(ScheduleTimeError, match=r"delay is .*; allowed: a timedelta or text such as .*PT5M\"$"):
            parse_duration(value, field="delay")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [timedelta(microseconds=-1), timedelta(days=-1), timedelta.min, "-5s", "-PT5M"])
    def test_refuses_negative_ones_however_small(self, value: timedelta | str) -> None:
        with pytest.raises(ScheduleTimeError, match="which is negative; allowed: a duration of at least 0s"):
            parse_duration(value, field="delay")

    @pytest.mark.parametrize("value", ["3650d1ms", "999999w", timedelta(days=3650, microseconds=1), timedelta.max])
    def test_refuses_what_lies_beyond_the_horizon(self, value: str | timedelta) -> None:
        with pytest.raises(ScheduleTimeError, match="allowed: at most 3650d"):
            parse_duration(value, field="delay")

    def test_the_least_is_the_callers(self) -> None:
        assert parse_duration("1s", field="lease", least_ms=1000) == 1000
        with pytest.raises(ScheduleTimeError, match=r"^lease is '999ms'; allowed: a duration of at least 1s$"):
            parse_duration("999ms", field="lease", least_ms=1000)

    def test_settings_raise_configuration_errors(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^timeout is 'soon'; allowed: "):
            parse_duration("soon", field="timeout", error=ConfigurationError)

    @given(st.timedeltas(timedelta(0), timedelta(days=3650)))
    def test_rounds_up_by_less_than_a_millisecond(self, value: timedelta) -> None:
        ms = parse_duration(value, field="delay")
        assert timedelta(0) <= timedelta(milliseconds=ms) - value < timedelta(milliseconds=1)

    @given(st.decimals(0, 3000, places=6), st.sampled_from([("d", DAY), ("h", 3_600_000), ("s", 1000), ("ms", 1)]))
    def test_fractions_are_exact(self, number: Decimal, unit: tuple[str, int]) -> None:
        name, ms = unit
        assert parse_duration(f"{number}{name}", field="delay") == math.ceil(Fraction(number) * ms)

    @given(TEXT)
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        message = ""
        try:
            assert 0 <= parse_duration(text, field="delay") <= MAX_HORIZON_MS
        except ScheduleTimeError as error:
            message = str(error)
        assert len(message) < 250


class TestFormatDuration:
    @pytest.mark.parametrize(
        ("ms", "text"),
        [
            (0, "0s"),
            (1, "1ms"),
            (250, "250ms"),
            (1000, "1s"),
            (1500, "1.5s"),
            (1001, "1.001s"),
            (60_000, "1m"),
            (60_250, "1m250ms"),
            (61_250, "1m1.25s"),
            (3_600_000 + 1000, "1h1s"),
            (5_400_000, "1h30m"),
            (DAY, "1d"),
            (MAX_HORIZON_MS, "3650d"),
            (-1500, "-1.5s"),
        ],
    )
    def test_writes(self, ms: int, text: str) -> None:
        assert format_duration(ms) == text

    @given(st.integers(0, MAX_HORIZON_MS) | st.integers(0, 200_000))
    def test_what_it_writes_is_read_back(self, ms: int) -> None:
        assert parse_duration(format_duration(ms), field="delay") == ms


class TestInstants:
    @pytest.mark.parametrize(
        ("at", "ms"),
        [
            (datetime(1970, 1, 1, tzinfo=UTC), 0),
            (datetime(1970, 1, 1, microsecond=1, tzinfo=UTC), 1),
            (datetime(1970, 1, 1, microsecond=1000, tzinfo=UTC), 1),
            (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 0),
            (datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo("Europe/Paris")), 1_761_438_600_000),
            (datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo("Europe/Paris"), fold=1), 1_761_442_200_000),
            (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), -62_135_647_200_000),
            (datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))), 253_402_344_000_000),
        ],
    )
    def test_to_epoch_ms(self, at: datetime, ms: int) -> None:
        assert to_epoch_ms(at, field="at") == ms

    @given(st.datetimes(timezones=OFFSETS | ZONES | st.just(UTC)))
    def test_rounds_up_exactly_in_all_years(self, at: datetime) -> None:
        since_ms = to_epoch_ms(at, field="at") * timedelta(milliseconds=1)
        assert timedelta(0) <= since_ms - (at - datetime(1970, 1, 1, tzinfo=UTC)) < timedelta(milliseconds=1)

    @given(st.datetimes(timezones=st.just(UTC)))
    def test_there_and_back(self, at: datetime) -> None:
        whole = at.replace(microsecond=at.microsecond // 1000 * 1000)
        assert from_epoch_ms(to_epoch_ms(whole, field="at")) == whole
        assert from_epoch_ms(to_epoch_ms(whole, field="at")).tzinfo is UTC

    def test_outside_the_calendar(self) -> None:
        with pytest.raises(OverflowError):
            from_epoch_ms(253_402_300_800_000)

    def test_naive_ones_are_refused(self) -> None:
        with pytest.raises(ScheduleTimeError, match=r"^at is the naive datetime.*timezone-aware datetime, e\.g\. "):
            to_epoch_ms(datetime(2025, 1, 1), field="at")  # noqa: DTZ001 - what is refused

    def test_a_zone_that_raises_is_refused(self) -> None:
        class Broken(tzinfo):
            def utcoffset(self, _: datetime | None) -> timedelta:
                raise LookupError("no such zone")

            dst = utcoffset

            def tzname(self, _: datetime | None) -> None:
                return None

        with pytest.raises(ScheduleTimeError, match="a datetime whose time zone raises LookupError"):
            to_epoch_ms(datetime(2027, 1, 1, tzinfo=Broken()), field="at")

    def test_a_zone_without_an_offset_is_naive(self) -> None:
        class Vague(tzinfo):
            def utcoffset(self, _: datetime | None) -> None:
                return None

            dst = utcoffset

            def tzname(self, _: datetime | None) -> None:
                return None

        with pytest.raises(ScheduleTimeError, match="naive"):
            to_epoch_ms(datetime(2025, 1, 1, tzinfo=Vague()), field="at")

    @pytest.mark.parametrize("value", [0, 1.5, None, "2025-01-01T00:00Z", date(2025, 1, 1), True])
    def test_others_are_refused(self, value: object) -> None:
        with pytest.raises(ScheduleTimeError, match=r"^at is .*; allowed: a timezone-aware datetime, e\.g\. "):
            to_epoch_ms(value, field="at")  # type: ignore[arg-type]


class TestHorizon:
    @pytest.mark.parametrize("due_ms", [0, 1000, 1000 + MAX_HORIZON_MS, -1])
    def test_within(self, due_ms: int) -> None:
        check_horizon(due_ms, 1000, "at")

    def test_beyond(self) -> None:
        with pytest.raises(ScheduleTimeError, match=r"^at is 3650d1ms ahead; allowed: at most 3650d ahead$"):
            check_horizon(1001 + MAX_HORIZON_MS, 1000, "at")

    def test_far_beyond_the_calendar(self) -> None:
        with pytest.raises(ScheduleTimeError, match="ahead"):
            check_horizon(10**18, 1000, "at")


class TestParseInstant:
    def test_text_with_an_offset_is_an_aware_instant(self) -> None:
        assert parse_instant("2027-01-01T01:00:00+01:00", field="at") == datetime(2027, 1, 1, tzinfo=UTC)

    @pytest.mark.parametrize(("text", "said"), [("soon", "at is 'soon'"), ("2027-01-01T00:00:00", "has no offset")])
    def test_other_text_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(ScheduleTimeError, match=said):
            parse_instant(text, field="at")
