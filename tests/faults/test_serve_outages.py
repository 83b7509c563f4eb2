"""The service while its broker is away: it reports this, and continues when the broker is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kafka import Broker
from tests.support.service import Service, until, until_ready


@pytest.mark.parametrize("fault", ["frozen", pytest.param("killed", marks=pytest.mark.nightly)])
def test_not_ready_while_the_broker_is_away(own_broker: Broker, tmp_path: Path, fault: str) -> None:
    store = f"kafka://{own_broker.bootstrap}/schedules?create_topic=true"
    text = f'store = "{store}"\n[limits]\nprobe_every = "0s"\nprobe_timeout = "2s"\n'
    with Service(tmp_path, text) as service, service.client() as client:
        until_ready(client)
        own_broker.kill() if fault == "killed" else own_broker.freeze()
        answer = until(client, lambda answer: "no answer within 2s" in answer.text)
        assert answer.status_code == 503
        own_broker.recover()
        until_ready(client)
