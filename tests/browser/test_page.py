"""The page: it updates live, works with the keyboard, is accessible, and says what it cannot do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec import structs
from playwright.async_api import Page, Route, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from aiodelay import Scheduler, StoreUnavailableError, UnsupportedByStoreError
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Again,
    At,
    Cancel,
    Dead,
    Demand,
    Done,
    Envelope,
    Lane,
    LaneCounts,
    Put,
    Query,
    Snapshot,
)
from aiodelay.kafka import KafkaStore
from aiodelay.memory import MemoryStore
from aiodelay.service import ApiLimits, Token, Tokens, admin, hash_token
from aiodelay.service.page import live
from aiodelay.service.page.state import FRESH_S
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.browser.conftest import Contexts, Watch
from tests.support.api import bearer, client_of, serving_app
from tests.support.contrast import CONTRASTS
from tests.support.kafka import new_name
from tests.support.scene import NOW, ORDER, SceneStore

READER = Token(name="reader", hash=hash_token("of-the-reader"), scopes=("read",))
OTHER = Token(name="other", hash=hash_token("of-another"), scopes=("read",))
pytestmark = pytest.mark.asyncio(loop_scope="session")

SCREENS = ["/", "/messages", f"/messages/{quote(ORDER, safe='')}", "/recurring", "/dead", "/sinks"]
SCREENS += ["/instances", "/consumers"]


# --- live -------------------------------------------------------------------------------------------------


async def test_it_follows_what_happens(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        await page.locator("#strip.is-live").wait_for()
        await expect(page.locator("#strip")).to_contain_text("Held3")
        await page.evaluate("window.unchanged = true")
        await store.apply([Cancel(new_op(), "hook-0")])
        await expect(page.locator("#strip")).to_contain_text("Held2")
        row = page.get_by_role("row", name="webhook")
        await expect(row).to_contain_text("2")
        assert await page.evaluate("window.unchanged"), "the page was not loaded again"


async def test_it_follows_however_late_its_scripts_come(watch: Watch, store: SceneStore) -> None:
    async def come_late(route: Route) -> None:
        await asyncio.sleep(0.5)  # a slow network
        await route.continue_()

    for script in ("hx-sse", "htmx", "page"):
        async with watch(store) as viewer:
            await viewer.context.route(re.compile(rf"/{script}[.\w]*\.js"), come_late)
            page = await viewer.open("/")
            await page.locator("#strip.is-live").wait_for()


class CountedStore(SceneStore):
    """Counts how often it is counted."""

    asked = 0

    async def counts(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 - the store's
        self.asked += 1
        return await super().counts()


async def test_a_store_is_asked_once_for_all_viewers() -> None:
    store = CountedStore(journal=100)
    async with Scheduler(store, dispatch=False) as scheduler:
        app = admin(scheduler)
        async with serving_app(app) as base, client_of(base) as client:
            began = time.monotonic()
            streams = [client.build_request("GET", "/live?view=hour") for _ in range(10)]
            responses = [await client.send(each, stream=True) for each in streams]
            lines = [each.aiter_lines() for each in responses]
            first = [[await anext(each) for _ in range(5)] for each in lines]
            assert all(each == first[0] for each in first)
            assert app.state.page.viewers == 10
            assert store.asked <= 2 + (time.monotonic() - began) // FRESH_S
            app.state.page.closing.set()
            for each in responses:
                await each.aclose()
        assert app.state.page.viewers == 0


async def test_a_hidden_page_does_not_follow(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        await page.locator("#strip.is-live").wait_for()
        await page.evaluate(HIDE)
        await expect(page.locator("#strip.is-live")).to_have_count(0)
        await page.evaluate(SHOW)
        await page.locator("#strip.is-live").wait_for()


async def test_live_turns_amber_when_the_data_are_old_and_red_when_the_service_is_gone(
    contexts: Contexts, store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise StoreUnavailableError("redis://queue.example", "connection refused")

    monkeypatch.setattr(live, "EVERY_S", 0.5)
    scheduler = Scheduler(store, dispatch=False)
    async with scheduler, contexts.context({}) as context:
        app = admin(scheduler)
        async with serving_app(app) as base:
            page = await context.new_page()
            await page.goto(base)
            strip = page.locator("#strip")
            await page.locator("#strip.is-live").wait_for()
            with monkeypatch.context() as patched:
                patched.setattr(store, "counts", fails)
                await page.locator("#strip.is-old").wait_for()
                await expect(strip).to_contain_text(re.compile(r"\d+ s old, as of"))
                await expect(page.locator("#announce")).to_have_text(re.compile(r"\d+ s old"))
            await page.locator("#strip.is-live").wait_for()
            app.state.page.closing.set()
        await page.locator("#strip.is-gone").wait_for()
        await expect(strip).to_contain_text("the service does not answer; as of")
        await page.close()


async def test_lists_say_as_of_when_they_are(watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": False}) as viewer:
        page = await viewer.open()
        for path in SCREENS[1:]:
            await page.goto(viewer.base + path)
            heading = await page.get_by_role("heading", level=1).inner_text()
            await expect(page.locator("main .asof").filter(has_text="Load again")).to_contain_text(
                "As of 2026-11-21 12:00:00 UTC"
            )
            await page.get_by_role("link", name="Load again").click()
            await expect(page.get_by_role("heading", level=1)).to_have_text(heading)


async def test_alike_warnings_become_one(watch: Watch) -> None:
    store = MemoryStore()
    async with watch(store) as viewer:
        puts = [Put(new_op(), Envelope(f"m{n}", f"lane-{n}", payload=b"x"), At(0)) for n in range(12)]
        await store.apply(puts)
        page = await viewer.open("/")
        await page.locator("#strip.is-live").wait_for()
        notice = page.locator(".notice.bad")
        await expect(notice).to_have_count(1)
        await expect(notice).to_contain_text("No live instance serves 12 handlers or sinks: 12 messages wait for them")
        await notice.get_by_text("Which").click()
        await expect(notice.get_by_text("lane-11")).to_be_visible()
        await store.apply([Cancel(new_op(), "m3")])
        await expect(notice).to_contain_text("11 messages wait")
        await expect(notice.get_by_text("lane-11")).to_be_visible()


HIDE = """() => {
    Object.defineProperty(document, "hidden", {configurable: true, get: () => true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
SHOW = HIDE.replace("true}", "false}").replace("=> true", "=> false")


CHANGES_OF_THE_ALERT = """() => new Promise((resolve) => {
    let changes = 0, events = 0;
    const observer = new MutationObserver((found) => (changes += found.length));
    observer.observe(document.getElementById("trouble"), {childList: true, characterData: true, subtree: true});
    document.addEventListener("htmx:sse:after:message", () => ++events === 3 && resolve(changes));
})"""


async def test_a_page_whose_session_has_ended_asks_for_the_token(watch: Watch, store: SceneStore) -> None:
    tokens = Tokens([READER])
    async with watch(store, {"tokens": tokens}) as viewer:
        page = await viewer.open("/dead?lane=webhook")
        await page.get_by_label("Token").fill("of-the-reader")
        await page.get_by_role("button", name="Sign in").click()
        await page.locator("#strip.is-live").wait_for()
        tokens.load([OTHER])
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        await expect(page).to_have_url(re.compile("back=%2Fdead%3Flane%3Dwebhook"))
        viewer.errors.clear()  # the console has the refusal of the stream


async def test_a_store_that_fails_is_told(watch: Watch, store: SceneStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        await page.locator("#strip.is-live").wait_for()

        async def fails() -> None:
            raise StoreUnavailableError("redis://queue.example", "connection refused")

        monkeypatch.setattr(store, "counts", fails)
        await expect(page.get_by_role("alert")).to_contain_text("connection refused")
        assert await page.evaluate(CHANGES_OF_THE_ALERT) == 0, "a screen reader reads the alert once"
        monkeypatch.undo()
        await expect(page.locator("#trouble")).to_have_text("")


@pytest.mark.parametrize("kind", ["sqlite", "kafka"])
async def test_the_last_hour_is_counted_and_the_end_of_a_backlog_estimated(
    kind: str, kafka: str, tmp_path: Path
) -> None:
    topic, clock, path = new_name(), VirtualClock(start=NOW), tmp_path / "delay.db"
    url = f"kafka://{kafka}/{topic}?create_topic=true&partitions=2&history={topic}-history"

    def closed() -> SqliteStore | KafkaStore:
        return KafkaStore(url, clock=clock) if kind == "kafka" else SqliteStore(path, clock=clock, journal=10_000)

    async with closed() as store, store.work("worker", ["work"]) as work:
        for minute in range(10):
            names = [f"m{minute}-{n}" for n in range(20)]
            await store.apply([Put(new_op(), Envelope(each, "work", payload=b"x"), After(0)) for each in names])
            claimed = await work.claim({"work": Demand(20)}, request=new_op().hex(), lease_ms=15_000)
            ends = [(each.record.id, each.record.revision, each.token) for each in claimed.claims]
            await work.settle([Done(*each) for each in ends[:18]])
            again = Again(*ends[18], clock.now_ms() + 3_600_000, 1, "ValueError")
            await work.settle([again, Dead(*ends[19], "rejected", 1)])
            clock.move(60_000)
        await store.apply([Put(new_op(), Envelope(f"late-{n}", "work", payload=b"x"), After(0)) for n in range(90)])
    clock.move(1_000)
    scheduler = Scheduler(closed(), lanes=())
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        text = re.sub(r"<[^>]*>", "", (await client.get("/")).text)
        assert "No live instance serves work" in text
        assert "messages will be delivered in" not in text
    scheduler = Scheduler(closed(), lanes=())
    async with (
        scheduler,
        scheduler.opened_store().work("worker", ["work"]),
        serving_app(admin(scheduler)) as base,
        client_of(base) as client,
    ):
        text = re.sub(r"<[^>]*>", "", (await client.get("/")).text)
        assert "180 delivered, 10 retried, 10 given up" in text
        assert "of the 80 first attempts in the last 5 minutes" in text
        assert "The overdue messages will be delivered in about 5\xa0min" in text
        assert "18.0 a minute are delivered, and 0.0 a minute come due" in text


async def test_a_message_that_was_cancelled_in_flight_says_so(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "delay.db") as store, store.work("worker", ["work"]) as work:
        await store.apply([Put(new_op(), Envelope("m", "work", payload=b"x"), After(0))])
        await work.claim({"work": Demand(1)}, request=new_op().hex(), lease_ms=600_000)
        await store.apply([Cancel(new_op(), "m")])
        scheduler = Scheduler(SqliteStore(tmp_path / "delay.db"), dispatch=False)
        async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
            text = re.sub(r"<[^>]*>", "", (await client.get("/messages/m")).text)
    assert "Attempts0, cancelled in flight" in text


# --- search -------------------------------------------------------------------------------------------------


async def test_filters_stand_in_the_url_and_are_found_again(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/messages")
        await page.get_by_label("Id contains").press_sequentially("refund")
        await expect(page).to_have_url(viewer.base + "/messages?text=refund")
        await expect(page.get_by_role("row", name="refund-")).to_have_count(4)
        await expect(page.locator("#results")).to_contain_text(re.compile("4 shown; examined \\d+ of 686"))
        await expect(page.get_by_label("Id contains")).to_be_focused()
        await expect(page.locator("#announce")).to_contain_text("4 shown")
        await page.reload()
        await expect(page.get_by_label("Id contains")).to_have_value("refund")
        await expect(page.get_by_role("row", name="refund-")).to_have_count(4)


async def test_the_results_are_of_the_latest_text_however_slow_the_store(
    watch: Watch, store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, search = asyncio.Event(), store.search
    gate.set()

    async def wait_and_search(query: Query) -> Sequence[Snapshot]:
        await gate.wait()
        return await search(query)

    monkeypatch.setattr(store, "search", wait_and_search)
    async with watch(store) as viewer:
        page = await viewer.open("/messages")
        await page.locator("#strip.is-live").wait_for()
        gate.clear()
        text = page.get_by_label("Id contains")
        async with page.expect_request(re.compile("text=r$")):
            await text.press_sequentially("r")
        await text.press_sequentially("e")
        await asyncio.sleep(1)  # the page waits 400 ms for further keys before it asks
        await text.press_sequentially("fund-1")
        await asyncio.sleep(1)  # see above
        gate.set()
        await expect(page.get_by_role("row", name="refund-")).to_have_count(1)
        await expect(page).to_have_url(viewer.base + "/messages?text=refund-1")


async def test_pages_go_on_where_the_last_ended(watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": False}) as viewer:
        page = await viewer.open("/messages?lane=RenewContract")
        seen: list[str] = []
        while True:
            seen += await page.locator("tbody th a").all_inner_texts()
            following = page.get_by_role("link", name="Next page")
            if not await following.count():
                break
            await following.click()
            await page.wait_for_load_state()  # a page under way may lack its last rows
        assert len(seen) == len(set(seen)) == 400


async def test_an_exact_id_is_looked_up(watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": False}) as viewer:
        page = await viewer.open("/messages")
        await page.get_by_label("Exact id").fill(ORDER)
        await page.get_by_role("button", name="Search").click()
        await page.get_by_role("link", name=ORDER).click()
        await expect(page.get_by_role("heading", name=ORDER)).to_be_visible()


async def test_a_search_that_has_not_looked_at_everything_says_so(
    watch: Watch, store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watch(store, {"limits": ApiLimits(max_examined=50)}, {"java_script_enabled": False}) as viewer:
        page = await viewer.open("/messages?text=ontract-39")
        await expect(page.get_by_text("Nothing found yet")).to_be_visible()
        await expect(page.get_by_text("None of the 50 of 686 examined so far matches.")).to_be_visible()
        while await page.get_by_role("link", name="Search on").count():
            await expect(page.get_by_text("Nothing matches")).to_have_count(0)
            await page.get_by_role("link", name="Search on").click()
        await page.goto(viewer.base + "/messages?text=no-such-id&lane=webhook")
        await expect(page.get_by_text("Nothing matches")).to_be_visible()
        await page.goto(viewer.base + "/messages?text=contract-399")
        await expect(page.get_by_role("row", name="contract-399")).to_be_visible()


async def test_dead_letters_are_grouped_and_filtered_by_the_class_of_their_error(
    watch: Watch, store: SceneStore
) -> None:
    async with watch(store, looks={"java_script_enabled": False}) as viewer:
        page = await viewer.open("/dead")
        groups = page.get_by_role("region", name="By error").get_by_role("row")
        rows = [" ".join(each.split()[:5]) for each in await groups.all_inner_texts()]
        assert rows[1:] == [
            "CardExpiredError attempts exhausted ChargeCard 9",
            "no class rejected webhook 1",
            "no class undecodable webhook 1",
        ]
        await page.get_by_role("link", name="CardExpiredError").click()
        results = page.locator("#results")
        await expect(results).to_contain_text("9 shown, oldest first; examined 11 of 11")
        await page.goto(viewer.base + "/dead?error=none")
        await expect(results).to_contain_text("2 shown")
        await page.goto(viewer.base + "/dead?error=KeyError")
        await expect(page.get_by_text("Nothing matches")).to_be_visible()


async def test_the_strip_leads_to_what_it_counts(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/sinks")
        await page.locator("#strip.is-live").wait_for()
        await page.locator("#strip").get_by_role("link", name="4").click()
        await expect(page.get_by_role("row", name="refund-")).to_have_count(4)
        await page.locator("#strip").get_by_role("link", name="11").click()
        await expect(page.get_by_role("heading", name="Dead letters")).to_be_visible()


async def test_consumers_of_topics_and_of_logs_are_shown_alike(watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": False}) as viewer:
        page = await viewer.open("/consumers")
        rows = [" ".join(each.split()) for each in await page.get_by_role("row").all_inner_texts()]
        assert [each.partition("registered")[0].strip() for each in rows[1:]] == [
            "orders fan-out billing in order",
            "orders fan-out search-index",
            "orders fan-out warehouse",
            "payments log ledger in order",
            "payments log report",
        ]
        assert [each.partition("ago ")[2] for each in rows[1:]] == [
            "0 1 0 0 \u2013 2 s ago 2026-11-21 11:59:58 UTC here",
            "1 840 100 3 0 \u2013 4 s ago 2026-11-21 11:59:56 UTC here",
            "312 0 0 250 \u2013 5 h ago 2026-11-21 07:00:00 UTC away",
            "3 1 0 0 48 211 1 s ago 2026-11-21 11:59:59 UTC here",
            "48 215 0 0 0 0 never away",
        ]


async def test_no_more_consumers_are_shown_than_can_be_looked_through(
    store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [structs.replace(each, topic=f"t{n}") for n in range(101) for each in await store.registered()]
    monkeypatch.setattr(store, "registered", lambda: asyncio.sleep(0, many))
    scheduler = Scheduler(store, dispatch=False)
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        page = (await client.get("/consumers")).text
    assert page.count("<tr>") == 1 + 500
    assert "The API lists 5 more" in page


# --- a message ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
async def test_a_payload_in_each_view(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": script}) as viewer:
        page = await viewer.open(f"/messages/{quote(ORDER, safe='')}")
        await expect(page.locator("#payload pre")).to_contain_text('"name": "Ada <script>alert(1)</script>"')
        await page.get_by_role("link", name="Hex").click()
        await expect(page.locator("#payload pre")).to_contain_text("00000000  7b 22 6f 72 64 65 72 22")
        await page.get_by_role("link", name="Text").click()
        await expect(page.locator("#payload pre")).to_contain_text('{"order": 7, "customer"')
        assert "view=text" in page.url


async def test_what_happened_to_it(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open(f"/messages/{quote(ORDER, safe='')}")
        timeline = page.locator(".timeline li .event")
        assert await timeline.all_inner_texts() == ["again", "claimed", "again", "claimed", "stored"]
        attempts = page.locator(".attempts li")
        await expect(attempts.nth(0)).to_contain_text("PaymentsAwayError: 503")
        await expect(attempts.nth(1)).to_contain_text("TimeoutError: no answer of payments.example")
        await page.goto(viewer.base + "/messages/paid-3")
        await expect(page.get_by_text("Delivered.")).to_be_visible()
        await page.goto(viewer.base + "/messages/card-000")
        await expect(attempts.first).to_contain_text("CardExpiredError: refused by the bank")
        await expect(page.locator(".timeline .dead")).to_contain_text("attempts exhausted")


async def test_a_dead_letter_shows_its_errors_and_its_traceback(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        (letter, *_) = await store.dead_letters(lane="ChargeCard")
        page = await viewer.open(f"/dead/{letter.record.revision}/{letter.record.id}")
        traceback = page.get_by_role("region", name="Traceback of the last attempt")
        assert await traceback.inner_text() == letter.traceback
        await expect(page.get_by_role("heading", name="Error", exact=True)).to_be_visible()


async def test_times_are_in_utc_and_in_the_viewers_zone_on_hover(watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"timezone_id": "Asia/Kolkata"}) as viewer:
        page = await viewer.open(f"/messages/{quote(ORDER, safe='')}")
        at = page.locator(".facts time")
        assert await at.inner_text() == "2026-11-21 11:59:22.000 UTC"
        assert await at.get_attribute("title") == "21 Nov 2026, 17:29:22 GMT+5:30"


# --- keys, and those who do not see -----------------------------------------------------------------------------


async def test_keys(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        await page.add_init_script("Date.now = () => 0")  # the key after `g` must come within 1.5 s
        await page.reload()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await page.keyboard.press("g")
        await page.keyboard.press("d")
        await expect(page.get_by_role("heading", name="Dead letters")).to_be_visible()
        await page.wait_for_load_state()  # keys are heard from then on
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await expect(page.get_by_role("heading", name="Messages")).to_be_visible()
        await page.keyboard.press("/")
        await expect(page.get_by_label("Exact id")).to_be_focused()


async def unnamed(page: Page) -> list[str]:
    """Return the fields, buttons, links and charts that have no name."""
    found: list[str] = await page.evaluate(
        """() => [...document.querySelectorAll("input:not([type=hidden]), select, button, a, svg[role=img]")]
        .filter((each) => !(each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim()))
        .map((each) => each.outerHTML)"""
    )
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_all_can_be_read(theme: str, watch: Watch, store: SceneStore) -> None:
    async with watch(store, {"environment": "production"}, {"color_scheme": theme}) as viewer:
        page = await viewer.open("/")
        for path in SCREENS:
            await page.goto(viewer.base + path)
            assert await unnamed(page) == []
            assert await page.locator("main, nav[aria-label], header.top").count() >= 3
            assert await page.locator("h1").count() == 1
            too_weak = [each for each in await page.evaluate(CONTRASTS) if each["ratio"] < each["least"]]
            assert too_weak == [], path


@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
async def test_the_colours_are_chosen(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks={"java_script_enabled": script, "color_scheme": "light"}) as viewer:
        page = await viewer.open("/dead?lane=webhook")
        for theme in ("dark", "light", "auto"):
            await page.get_by_role("button", name="Colours").click()
            await expect(page.locator("html")).to_have_attribute("data-theme", theme)
            await expect(page).to_have_url(viewer.base + "/dead?lane=webhook")


# --- what is not there ------------------------------------------------------------------------------------------


async def test_an_empty_store(watch: Watch) -> None:
    async with watch(MemoryStore(), dispatch=False) as viewer:
        page = await viewer.open("/messages")
        await expect(page.get_by_text("Nothing is pending")).to_be_visible()
        await page.goto(viewer.base + "/dead")
        await expect(page.get_by_text("No dead letters")).to_be_visible()
        await page.goto(viewer.base + "/")
        await expect(page.get_by_text("The store keeps no journal")).to_be_visible()
        await expect(page.get_by_text("memory://?journal=1000")).to_be_visible()
        await expect(page.get_by_text("No instance is alive")).to_be_visible()
        await expect(page.locator(".tabs .off")).to_contain_text("Consumers: memory:// has no topics")
        await page.goto(viewer.base + "/consumers")
        await expect(page.get_by_role("heading", name="Not with this store")).to_be_visible()
        viewer.errors.clear()


async def test_an_unknown_message_says_so(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/messages/nowhere")
        await expect(page.get_by_role("heading", name="Not Found")).to_be_visible()
        viewer.errors.clear()


async def test_nothing_inline_and_nothing_from_elsewhere(store: SceneStore) -> None:
    scheduler = Scheduler(store, dispatch=False)
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        for path in SCREENS:
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert not re.search(r"<style|<script(?! src=)|\sstyle=|\son\w+=|https?://", answer.text), path


async def test_it_can_be_mounted_in_another_app(store: SceneStore) -> None:
    scheduler = Scheduler(store, dispatch=False)
    outer = Starlette(routes=[Mount("/delays", admin(scheduler, read_only=False))])
    async with scheduler, serving_app(outer) as base, client_of(base) as client:
        front = await client.get("/delays/")
        assert front.status_code == 200
        paths = re.findall(r'(?:href|src|action|hx-sse:connect)="([^"]+)"', front.text)
        assert [each for each in paths if not each.startswith(("/delays/", "#"))] == []
        assert (await client.get(next(each for each in paths if "page.css" in each))).status_code == 200


async def test_several_stores(store: SceneStore) -> None:
    one, other = Scheduler(store, dispatch=False), Scheduler("memory://", dispatch=False)
    app = admin({"queue": one, "other": other})
    async with one, other, serving_app(app) as base, client_of(base) as client:
        front = await client.get("/")
        assert "check-" in (await client.get("/messages?store=queue")).text
        assert "Nothing is pending" in (await client.get("/messages?store=other")).text
        assert (await client.get("/messages?store=nope")).status_code == 404
        assert 'href="/messages?store=queue"' in front.text


async def test_a_session_that_ended_follows_no_longer(store: SceneStore) -> None:
    scheduler = Scheduler(store, dispatch=False)
    app = admin(scheduler, tokens=(tokens := Tokens([READER])))
    async with scheduler, serving_app(app) as base, client_of(base, headers=bearer("of-the-reader")) as client:
        async with client.stream("GET", "/live") as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            tokens.load([OTHER])
            left = [line async for line in lines]
            assert left, "what was under way came to its end"
        assert (await client.get("/live")).status_code == 303


async def test_a_store_that_is_not_open_yet_says_so() -> None:
    app = admin(Scheduler("memory://", dispatch=False))
    async with serving_app(app) as base, client_of(base) as client:
        for path in ("/", "/messages", "/dead"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "not open yet" in answer.text


class BlindStore(MemoryStore):
    """A store whose messages other processes own."""

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        raise UnsupportedByStoreError("lookup", "in a process that owns nothing", "a process that owns the messages")


async def test_a_store_that_cannot_be_looked_into_says_so() -> None:
    scheduler = Scheduler(BlindStore(), dispatch=False)
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        front = await client.get("/")
        assert front.status_code == 200
        assert "This store cannot be inspected" in front.text
        assert "memory:// has no topics" in front.text
        for path in ("/messages", "/messages/x", "/recurring", "/dead", "/sinks", "/instances", "/consumers"):
            answer = await client.get(path)
            assert answer.status_code == 422
            assert "a process that owns the messages" in answer.text


HOSTILE = [
    "/messages?due_from=soon",
    "/messages?due_from=9999-12-31T23:59:59",
    "/messages?due_to=2026-01-01",
    "/messages?state=nope",
    "/messages?after=%00",
    "/messages?after=kgE",
    "/messages?lane=%0a",
    "/messages?id=%00",
    f"/messages?id={'x' * 3000}",
    "/messages/%00",
    f"/messages/{'x' * 3000}",
    "/messages/..%2f..%2fetc%2fpasswd",
    "/dead?reason=nope",
    "/dead?after=kgE",
    "/dead/99999999999999999999999999/x",
    "/dead/1/%00",
    "/recurring?after=AAAA",
    "/?span=<script>",
    "/live?view=<script>&store=nope",
    "/?store=%0d%0ax:y",
    "/login?back=//evil.example",
]


async def test_what_is_no_question_has_an_answer(store: SceneStore) -> None:
    scheduler = Scheduler(store, dispatch=False)
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        for path in HOSTILE:
            answer = await client.get(path)
            assert answer.status_code < 500, (path, answer.text)
            assert "<script>" not in answer.text
            assert 'value="//evil.example' not in answer.text
        for form in ("", "csrf=%ff", "csrf", "a=1&" * 3_000, "x" * 2_000_000):
            type_ = {"content-type": "application/x-www-form-urlencoded"}
            assert 400 <= (await client.post("/plan", content=form, headers=type_)).status_code < 500
        assert (await client.post("/plan", json={})).status_code == 415
