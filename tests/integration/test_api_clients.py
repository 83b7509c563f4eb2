"""Clients generated from the OpenAPI document: every operation exists and works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Retry, Scheduler
from aiodelay.service import admin
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import openapi_of
from tests.support.api import ALL, serving_app
from tests.support.waiting import until

BIN = Path(sys.executable).parent
DOCUMENT = openapi_of(admin(Scheduler("memory://")), ROUTERS)
OPERATIONS = {operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()}
TYPESCRIPT = ("openapi-typescript@7", "typescript@5")
USE = """
import type { components, operations, paths } from "./api";

type Schemas = components["schemas"];
type Message = Schemas["MessageIn"];
const message: Message = { to: "handler:mail", payload: { order: 7 }, delay: "1h", conflict: { newer: 7 } };
const keyed: NonNullable<operations["schedule"]["parameters"]["header"]> = { "Idempotency-Key": "order 7" };
const guarded: NonNullable<operations["cancel"]["parameters"]["header"]> = { "If-Match": '"7"' };
const repeated: operations["schedule"]["responses"][200]["content"]["application/json"]["outcome"] = "repeated";
const state: Schemas["MessageOut"]["state"] = "overdue";
const listed: keyof paths = "/v1/messages";
export const used = { message, keyed, guarded, repeated, state, listed };
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "NODE_USE_SYSTEM_CA": "1"}  # npm trusts no certificate of a company otherwise
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


def test_operations_have_names_of_their_own() -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in DOCUMENT["paths"].values())


def test_a_typescript_client_has_every_operation(document: Path) -> None:
    folder = document.parent
    run(BIN / "npm", "install", "--no-audit", "--no-fund", *TYPESCRIPT, cwd=folder)
    run(BIN / "npx", "openapi-typescript", document, "--output", "api.ts", cwd=folder)
    (folder / "use.ts").write_text(USE)
    options = ("--noEmit", "--strict", "--target", "es2022", "--moduleResolution", "bundler", "--module", "es2022")
    run(BIN / "npx", "tsc", *options, "use.ts", cwd=folder)
    written = (folder / "api.ts").read_text().partition("export interface operations {")[2]
    assert {name for name in OPERATIONS if f"\n    {name}: {{\n" in written} == OPERATIONS


async def has_dead_letters(scheduler: Scheduler) -> bool:
    return bool([each async for each in scheduler.dead_letters()])


@pytest.mark.asyncio
async def test_a_python_client_has_every_operation_and_works(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = document.parent
    made = folder / "client"
    told = run(BIN / "openapi-python-client", "generate", "--path", document, "--output-path", made, cwd=folder)
    assert told.count("WARNING") == 1, told
    assert "Unsupported content type application/x-ndjson" in told, "it knows no streams of lines"
    assert {path.stem for path in made.glob("aiodelay_client/api/*/*.py")} - {"__init__"} == OPERATIONS
    monkeypatch.syspath_prepend(str(made))
    package = import_module("aiodelay_client")
    models = import_module("aiodelay_client.models")

    def operation(name: str) -> Any:  # noqa: ANN401 - a module that was generated
        return import_module(f"aiodelay_client.api.{name}").asyncio

    scheduler = Scheduler("memory://", retry=Retry.never())

    @scheduler.handler(name="fails")
    async def fails(event: bytes) -> None:
        raise ValueError(event)

    async with scheduler, serving_app(admin(scheduler, **ALL)) as base, package.Client(base) as client:
        given = models.MessageIn(to="handler:fails", payload="later", delay="1h")
        stored = await operation("messages.schedule")(client=client, body=given, idempotency_key="order 7")
        repeated = await operation("messages.schedule")(client=client, body=given, idempotency_key="order 7")
        assert (stored.outcome.value, repeated.outcome.value) == ("stored", "repeated")
        assert (repeated.due, repeated.revision) == (stored.due, stored.revision)

        listed = await operation("messages.list_messages")(client=client, state="scheduled")
        assert [(each.id, each.state.value) for each in listed.messages] == [(stored.id, "scheduled")]

        other = await operation("messages.cancel")(stored.id, client=client, if_match='"7"')
        assert (other.status, other.error) == (412, "RevisionError")
        tag = f'"{stored.revision}"'
        cancelled = await operation("messages.cancel")(stored.id, client=client, if_match=tag)
        assert cancelled.outcome.value == "cancelled"

        failing = models.MessageIn(to="handler:fails", payload="now", delay="0s", id="order-8")
        await operation("messages.schedule")(client=client, body=failing)
        await until(lambda: has_dead_letters(scheduler), "it is given up")
        (letter,) = (await operation("dead_letters.list_letters")(client=client)).letters
        assert (letter.id, letter.reason.value) == ("order-8", "not_retryable")
        keys = models.DeadKeysIn([models.DeadKeyIn(letter.id, letter.revision)])
        redriven = await operation("dead_letters.redrive")(client=client, body=keys)
        assert [each.outcome.value for each in redriven.letters] == ["stored"]
