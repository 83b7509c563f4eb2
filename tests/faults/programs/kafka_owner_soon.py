"""`kafka_owner` with short sessions: others take over its partitions soon after it was killed."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from tests.faults.programs.kafka_owner import Plan, main
from tests.support.sessions import shorten_sessions

if __name__ == "__main__":
    shorten_sessions()
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
