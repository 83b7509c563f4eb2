from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiodelay.backends.kafka.topics.offsets import Offsets


@given(st.data())
def test_b1_what_may_be_committed_ends_before_the_first_that_has_not_ended(data: st.DataObject) -> None:
    offsets, not_ended, next_offset = Offsets(10), set[int](), 10
    for _ in range(data.draw(st.integers(0, 40))):
        if len(not_ended) and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(not_ended)))
            offsets.end(offset)
            not_ended.remove(offset)
        else:
            offset = next_offset + data.draw(st.integers(0, 2))  # the cleaner, and ends of transactions, leave gaps
            offsets.read(offset)
            not_ended.add(offset)
            next_offset = offset + 1
        assert offsets.ended_to == min(not_ended, default=next_offset)
        assert offsets.read_to == next_offset
        assert len(offsets) >= len(not_ended)
