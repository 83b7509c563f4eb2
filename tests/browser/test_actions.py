"""The page: every action by hand, with and without a script, and the actions that the page must refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from playwright.async_api import Page, expect

from aiodelay.core.values import Command, Limit, Outcome, SourcePosition, lane_limits
from aiodelay.service import Token, hash_token
from aiodelay.service.api import bulk
from tests.browser.conftest import Viewer, Watch
from tests.support.api import SECRETS
from tests.support.scene import NOW, ORDER, SceneStore, at_ms

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = [
    Token(name="reader", hash=hash_token(SECRETS["read"]), scopes=("read",)),
    Token(name="operator", hash=hash_token(SECRETS["operate"]), scopes=("read", "schedule", "operate")),
]
SCHEDULER = Token(name="scheduler", hash=hash_token("of-the-scheduler"), scopes=("read", "schedule"))
SCRIPTED = pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
NO_SCRIPT_AT_NIGHT = pytest.mark.parametrize(
    "script", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["script", "no-script"]
)
"""For actions that take the same steps as those that the gate also plays without scripts."""


def message(message_id: str) -> str:
    return f"/messages/{quote(message_id, safe='')}"


async def press(page: Page, name: str) -> None:
    await page.get_by_role("button", name=name).first.click()


def looks(script: bool) -> dict[str, bool]:
    return {"java_script_enabled": script}


async def confirm_cancel(page: Page) -> None:
    await press(page, "Cancel 1 message")
    await expect(page.get_by_role("row", name="cancelled 1")).to_be_visible()


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "aiodelay.audit"]


# --- one message ------------------------------------------------------------------------------------------


@SCRIPTED
async def test_cancel_asks_first(
    script: bool, watch: Watch, store: SceneStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open(message(ORDER))
        await press(page, "Cancel")
        await expect(page.get_by_role("heading", name="Cancel 1 message?")).to_be_visible()
        await expect(page.get_by_text(ORDER)).to_be_visible()
        assert await store.get(ORDER) is not None, "nothing is done yet"
        await page.get_by_role("link", name="Back").click()
        await expect(page.get_by_role("heading", name=ORDER)).to_be_visible()
        await press(page, "Cancel")
        await confirm_cancel(page)
    assert await store.get(ORDER) is None
    (line,) = audited(caplog)
    assert line.pop("operation")
    assert [line] == [
        {
            "action": "page cancel",
            "by": "anonymous",
            "from": "127.0.0.1",
            "store": "default",
            "ids": [ORDER],
            "outcomes": {"cancelled": 1},
        }
    ]


@NO_SCRIPT_AT_NIGHT
async def test_fire(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open(message("contract-1"))
        await press(page, "Fire now")
        await press(page, "Fire now 1 message")
        await expect(page.get_by_role("row", name="fired 1")).to_be_visible()
    found = await store.get("contract-1")
    assert found is not None
    assert found.next_attempt_ms == at_ms(NOW)


@NO_SCRIPT_AT_NIGHT
@pytest.mark.parametrize("field", ["delay", "at"])
async def test_reschedule_stores_the_time_that_was_given(
    field: str, script: bool, watch: Watch, store: SceneStore
) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open(message("contract-1"))
        await page.locator(f"#{field}").fill("90m" if field == "delay" else "2026-12-24T18:30:15")
        await press(page, "Reschedule")
        await press(page, "Reschedule 1 message")
        await expect(page.get_by_role("row", name="rescheduled 1")).to_be_visible()
    found = await store.get("contract-1")
    assert found is not None
    at = datetime(2026, 12, 24, 18, 30, 15, tzinfo=UTC)
    assert found.record.due_ms == (at_ms(NOW) + 90 * 60_000 if field == "delay" else at_ms(at))


@SCRIPTED
async def test_a_bad_value_leaves_the_form_with_what_was_typed(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open(message("contract-1"))
        await page.locator("#delay").fill("soon")
        await press(page, "Reschedule")
        await expect(page.get_by_role("alert").filter(has_text="soon")).to_be_visible()
        await expect(page.get_by_role("heading", name="contract-1")).to_be_visible()
        await page.reload()
        await expect(page.locator("#delay")).to_have_value("soon")
        await expect(page.locator("#delay")).to_have_attribute("aria-invalid", "true")

        await page.goto(viewer.base + "/messages?lane=RefundDue")
        await page.get_by_role("checkbox", name="refund-1").check()
        await page.locator("#delay").fill("1 fortnight")
        await press(page, "Reschedule")
        await expect(page.get_by_role("alert").filter(has_text="1 fortnight")).to_be_visible()
        await expect(page.get_by_role("checkbox", name="refund-1")).to_be_checked()
        await expect(page.get_by_role("checkbox", name="refund-2")).not_to_be_checked()
        await page.locator("#delay").fill("1h")
        await press(page, "Reschedule")
        await expect(page.get_by_role("heading", name="Reschedule 1 message?")).to_be_visible()

        await page.goto(viewer.base + "/sinks")
        await page.locator("#what").fill("no sink:x")
        await page.locator("form:has(#what)").get_by_role("button", name="Pause").click()
        await expect(page.locator("#what")).to_have_value("no sink:x")

        await page.get_by_label("Handler or sink", exact=True).fill("RefundDue")
        rate = page.get_by_label("Rate at most")
        await rate.fill("fast")
        await press(page, "Set limit")
        await expect(page.locator("div:has(> #rate)")).to_contain_text("Limit.rate is 'fast'; allowed: ")
        await expect(rate).to_be_focused()
        await expect(rate).to_have_value("fast")
        await expect(page.locator("[aria-invalid]")).to_have_count(1)

        await page.goto(viewer.base + "/messages?due_from=soon&lane=RefundDue")
        await expect(page.get_by_role("alert").filter(has_text="soon")).to_be_visible()
        await expect(page.get_by_label("Handler or sink")).to_have_value("RefundDue")
        viewer.errors.clear()  # the console tells the status of the URL that asks wrongly


@SCRIPTED
async def test_back_and_reload_work_on_every_step_and_do_nothing_twice(
    script: bool, watch: Watch, store: SceneStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodelay.audit")
    async with watch(store, looks=looks(script)) as viewer:
        posts: list[str] = []
        page = await viewer.open(message("contract-1"))
        page.on("request", lambda each: posts.append(each.url) if each.method == "POST" else None)
        await press(page, "Cancel")
        await page.reload()
        await confirm_cancel(page)
        await page.reload()
        await expect(page.get_by_role("row", name="cancelled 1")).to_be_visible()
        await page.go_back()
        await page.reload()
        await expect(page.get_by_text("This plan was confirmed.")).to_be_visible()
        await page.get_by_role("link", name="Show the result").click()
        await expect(page.get_by_role("row", name="cancelled 1")).to_be_visible()
        await page.go_back()
        await page.go_back()
        await page.reload()
        await expect(page.get_by_role("heading", name="contract-1")).to_be_visible()
        assert len(posts) == 2, posts
    assert len(audited(caplog)) == 1


@NO_SCRIPT_AT_NIGHT
async def test_recurring_series_are_named_and_left_out_unless_asked(
    script: bool, watch: Watch, store: SceneStore
) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/messages?lane=SendReceipt")
        await page.get_by_role("checkbox", name="all that match").check()
        await press(page, "Cancel")
        await expect(page.get_by_text("monday-report")).to_be_visible()
        await press(page, "Cancel 93 messages")
        await expect(page.get_by_role("row", name="cancelled 90")).to_be_visible()
        await expect(page.get_by_text("Not changed: the recurring series monday-report")).to_be_visible()
        assert await store.get("monday-report") is not None

        await page.goto(viewer.base + "/messages?text=monday")
        await page.get_by_role("checkbox", name="all that match").check()
        await press(page, "Cancel")
        await press(page, "Cancel 1 message")
        await expect(page.get_by_role("alert").filter(has_text="Only recurring series match")).to_be_visible()
        await page.get_by_role("checkbox", name="monday-report").check()
        await confirm_cancel(page)
    assert await store.get("monday-report") is None


async def test_a_recurring_series_that_is_chosen_by_itself_is_named(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/recurring")
        await page.get_by_role("row", name="heartbeat").get_by_role("button", name="Cancel").click()
        await expect(page.get_by_text("This ends the recurring series heartbeat")).to_be_visible()
        await confirm_cancel(page)


def held_up(store: SceneStore, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let bulk operations change 150 messages at a time, and nothing before the returned event is set."""
    gate, apply = asyncio.Event(), store.apply

    async def wait_and_apply(commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        await gate.wait()
        return await apply(commands, source=source)

    monkeypatch.setattr(bulk, "STEP", 150)
    monkeypatch.setattr(store, "apply", wait_and_apply)
    return gate


async def cancelled_in_bulk(viewer: Viewer) -> Page:
    """Cancel the 400 messages of a lane. Return the page of the operation."""
    page = await viewer.open("/messages?lane=RenewContract")
    await page.get_by_role("checkbox", name="all that match").check()
    await press(page, "Cancel")
    await page.locator("#typed").fill("400")
    await press(page, "Cancel 400 messages")
    return page


@NO_SCRIPT_AT_NIGHT
async def test_a_bulk_operation_shows_its_progress_and_is_stopped(
    script: bool, watch: Watch, store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = held_up(store, monkeypatch)
    async with watch(store, looks=looks(script)) as viewer:
        page = await cancelled_in_bulk(viewer)
        await expect(page.get_by_text("0 of 400.")).to_be_visible()
        await press(page, "Stop")
        await expect(page.get_by_text("The operation stops after this step.")).to_be_visible()
        gate.set()
        if not script:
            await page.get_by_role("link", name="Load again").click()
        await expect(page.get_by_text("Stopped: of 400 found, 250 were not changed.")).to_be_visible()
        await expect(page.get_by_role("row", name="cancelled 150")).to_be_visible()
    assert (await store.counts())["RenewContract"].scheduled == 250


async def test_a_running_operation_is_stopped_by_keyboard_and_its_end_is_announced(
    watch: Watch, store: SceneStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = held_up(store, monkeypatch)
    async with watch(store) as viewer:
        page = await cancelled_in_bulk(viewer)
        stop = page.get_by_role("button", name="Stop")
        await stop.focus()
        for _ in range(2):
            async with page.expect_event("requestfinished", lambda each: "/operations/" in each.url):
                pass
        await expect(stop).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("The operation stops after this step.")).to_be_visible()
        gate.set()
        await expect(page.get_by_text("Stopped: of 400 found, 250 were not changed.")).to_be_visible()
        await expect(page.locator("#announce")).to_have_text("Cancel: stopped")


# --- many -------------------------------------------------------------------------------------------------


@NO_SCRIPT_AT_NIGHT
async def test_those_that_are_ticked(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/messages?lane=RefundDue")
        for name in ("refund-1", "refund-3"):
            await page.get_by_role("checkbox", name=name).check()
        await press(page, "Cancel")
        await press(page, "Cancel 2 messages")
        await expect(page.get_by_role("row", name="cancelled 2")).to_be_visible()
        await page.get_by_role("link", name="Back").click()
        await expect(page).to_have_url(re.compile("lane=RefundDue"))
    assert [await store.get(f"refund-{n}") is not None for n in range(4)] == [True, False, True, False]


@NO_SCRIPT_AT_NIGHT
async def test_enter_in_the_field_of_a_new_time_reschedules(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/messages?lane=RefundDue")
        await page.get_by_role("checkbox", name="refund-1").check()
        await page.locator("#delay").fill("1h")
        await page.locator("#delay").press("Enter")
        await expect(page.get_by_role("heading", name="Reschedule 1 message?")).to_be_visible()


@NO_SCRIPT_AT_NIGHT
async def test_more_than_a_hundred_have_to_be_typed(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/messages?lane=RenewContract")
        await page.get_by_role("checkbox", name="all that match").check()
        await press(page, "Cancel")
        await expect(page.get_by_role("heading", name="Cancel 400 messages?")).to_be_visible()
        button = page.get_by_role("button", name="Cancel 400 messages")
        if script:
            await expect(button).to_be_disabled()
        else:
            await page.locator("#typed").fill("40")
            await button.click()
            await expect(page.get_by_role("alert").filter(has_text="Type 400")).to_be_visible()
            viewer.errors.clear()
        assert (await store.counts())["RenewContract"].scheduled == 400
        await page.locator("#typed").fill("400")
        await button.click()
        await expect(page.get_by_role("row", name="cancelled 400")).to_be_visible()
    assert "RenewContract" not in await store.counts()


# --- dead letters, pauses -----------------------------------------------------------------------------------


@NO_SCRIPT_AT_NIGHT
async def test_redrive_a_group(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/dead")
        row = page.get_by_role("row", name="CardExpiredError attempts exhausted ChargeCard 9")
        await row.get_by_role("button", name="Redrive").click()
        await press(page, "Redrive 9 dead letters")
        await expect(page.get_by_role("row", name="stored 9")).to_be_visible()
    counts = (await store.counts())["ChargeCard"]
    assert (counts.dead, counts.overdue) == (0, 9)


@NO_SCRIPT_AT_NIGHT
async def test_purge_one(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/dead?lane=webhook")
        await page.get_by_role("link", name="vid-6").click()
        await press(page, "Purge")
        await press(page, "Purge 1 dead letter")
        await expect(page.get_by_role("row", name="purged 1")).to_be_visible()
    assert {each.record.id for each in await store.dead_letters(lane="webhook")} == {"vid-5"}


@NO_SCRIPT_AT_NIGHT
async def test_pauses_and_limits_of_a_destination(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, looks=looks(script)) as viewer:
        page = await viewer.open("/sinks")
        await page.locator("#what").fill("CheckPaiment")
        await page.locator("form:has(#what)").get_by_role("button", name="Pause").click()
        await expect(page.get_by_text("Nothing is called CheckPaiment")).to_be_visible()
        await expect(page.get_by_text("There is: CheckPayment")).to_be_visible()
        await page.get_by_role("link", name="Back").click()
        await page.locator("#what").fill("CheckPayment")
        await page.locator("form:has(#what)").get_by_role("button", name="Pause").click()
        await expect(page.get_by_text("Nothing is called")).to_have_count(0)
        await press(page, "Pause 1 destination")
        await expect(page.get_by_role("row", name="paused 1")).to_be_visible()
        assert ("CheckPayment", None) in await store.paused()
        await page.get_by_role("link", name="Back").click()
        await page.get_by_role("listitem").filter(has_text="CheckPayment").get_by_role("button", name="Resume").click()
        await press(page, "Resume 1 destination")
        await expect(page.get_by_role("row", name="resumed 1")).to_be_visible()
        assert await store.paused() == [("webhook", "us-1")]

        await page.get_by_role("link", name="Back").click()
        await set_limit(page, {"Handler or sink": "SendReceipt", "Rate at most": "60/min"})
        await set_limit(page, {"Handler or sink": "SendReceipt", "Of each": "customer", "In flight at most": "2"})
        keyed = page.get_by_role("row", name="SendReceipt customer 2")
        await expect(keyed).to_be_visible()
        whole = page.get_by_role("row", name="SendReceipt all messages together \u2013 60/min")
        await expect(whole).to_be_visible()
        assert await store.limits() == {"SendReceipt": lane_limits([Limit(rate="60/min"), Limit("customer", 2)])}
        await keyed.get_by_role("button", name="End").click()
        await expect(page.get_by_text("Limit until now: each customer: at most 2 in flight")).to_be_visible()
        await press(page, "End 1 limit")
        await expect(page.get_by_role("row", name="ended 1")).to_be_visible()
        await page.get_by_role("link", name="Back").click()
        await expect(whole).to_be_visible()
        await expect(keyed).to_have_count(0)
    assert await store.limits() == {"SendReceipt": lane_limits([Limit(rate="60/min")])}


async def set_limit(page: Page, fields: Mapping[str, str]) -> None:
    """Fill the form, confirm, and go back to the screen of the form."""
    for label, text in fields.items():
        await page.get_by_label(label, exact=True).fill(text)
    await press(page, "Set limit")
    await press(page, "Set 1 limit")
    await expect(page.get_by_role("row", name="set 1")).to_be_visible()
    await page.get_by_role("link", name="Back").click()


# --- who may ------------------------------------------------------------------------------------------------


async def sign_in(viewer: Viewer, secret: str, path: str = "/") -> Page:
    page = await viewer.open(path)
    await page.get_by_label("Token").fill(secret)
    await press(page, "Sign in")
    return page


@SCRIPTED
async def test_sign_in_and_out(script: bool, watch: Watch, store: SceneStore) -> None:
    async with watch(store, {"tokens": TOKENS}, looks(script)) as viewer:
        page = await sign_in(viewer, "no-token", "/dead?lane=webhook")
        await expect(page.get_by_text("This token is not valid.")).to_be_visible()
        viewer.errors.clear()
        await page.get_by_label("Token").fill(SECRETS["operate"])
        await press(page, "Sign in")
        await expect(page).to_have_url(viewer.base + "/dead?lane=webhook")
        (cookie,) = [each for each in await viewer.context.cookies() if each["name"] == "aiodelay-session"]
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert SECRETS["operate"] not in cookie["value"]
        await press(page, "Sign out")
        await page.goto(viewer.base + "/messages")
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


async def test_a_token_for_reading_sees_no_buttons_and_is_refused(watch: Watch, store: SceneStore) -> None:
    async with watch(store, {"tokens": TOKENS}) as viewer:
        page = await sign_in(viewer, SECRETS["read"], message(ORDER))
        await expect(page.get_by_text("Your token allows only reading.")).to_be_visible()
        csrf = await page.locator("input[name=csrf]").first.get_attribute("value")
        form: dict[str, Any] = {"csrf": csrf or "", "action": "cancel", "id": ORDER}
        refused = await viewer.context.request.post(viewer.base + "/plan", form=form)
        assert refused.status == 403
        assert "needs a token with the scope schedule" in await refused.text()
        await page.goto(viewer.base + "/sinks")
        await expect(page.get_by_role("button", name="Set limit")).to_have_count(0)
        form = {"csrf": csrf or "", "action": "limit", "limited": "SendReceipt", "rate": "1/s"}
        refused = await viewer.context.request.post(viewer.base + "/plan", form=form)
        assert refused.status == 403
        assert "needs a token with the scope operate" in await refused.text()
    assert await store.get(ORDER) is not None


async def test_a_token_for_scheduling_changes_one_message_but_not_many(watch: Watch, store: SceneStore) -> None:
    async with watch(store, {"tokens": [SCHEDULER]}) as viewer:
        page = await sign_in(viewer, "of-the-scheduler", message(ORDER))
        await press(page, "Cancel")
        await confirm_cancel(page)
        await page.goto(viewer.base + "/messages?lane=RefundDue")
        await page.get_by_role("checkbox", name="All of this page").check()
        await press(page, "Cancel")
        await expect(page.get_by_text("needs a token with the scope operate")).to_be_visible()
        viewer.errors.clear()
    assert (await store.counts())["RefundDue"].overdue == 4


async def test_a_read_only_service_says_so_and_changes_nothing(watch: Watch, store: SceneStore) -> None:
    async with watch(store, {"read_only": True}) as viewer:
        page = await viewer.open(message(ORDER))
        await expect(page.get_by_text("This service is read-only.")).to_be_visible()
        await expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        csrf = await page.locator("input[name=csrf]").first.get_attribute("value") or ""
        refused = await viewer.context.request.post(
            viewer.base + "/plan", form={"csrf": csrf, "action": "cancel", "id": ORDER}
        )
        assert refused.status == 403
        assert "read-only" in await refused.text()


async def test_a_form_of_another_site_is_refused(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        csrf = await page.locator("input[name=csrf]").first.get_attribute("value") or ""
        form: dict[str, Any] = {"csrf": csrf, "action": "cancel", "id": ORDER}
        post = viewer.context.request.post
        assert (await post(viewer.base + "/plan", form=form)).status == 200
        assert (await post(viewer.base + "/plan", form=form | {"csrf": "0" * 64})).status == 403
        assert (await post(viewer.base + "/plan", form=form | {"csrf": "é"})).status == 403
        other = {"origin": "https://evil.example"}
        assert (await post(viewer.base + "/plan", form=form, headers=other)).status == 403
        assert (await post(viewer.base + "/theme", form={"theme": "dark"})).status == 403


async def test_nobody_is_sent_elsewhere(watch: Watch, store: SceneStore) -> None:
    async with watch(store) as viewer:
        page = await viewer.open("/")
        csrf = await page.locator("input[name=csrf]").first.get_attribute("value") or ""
        for back in ("//evil.example", "https://evil.example/", "/\\evil.example", "\r\nx: y"):
            answer = await viewer.context.request.post(
                viewer.base + "/theme", form={"csrf": csrf, "theme": "dark", "back": back}, max_redirects=0
            )
            assert answer.headers["location"] == "/"
