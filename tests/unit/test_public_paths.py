"""Public names can be imported from the paths in the docs and from those of earlier versions."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

PATHS = """
aiodelay.clock aiodelay.ports.clock
    Clock SystemClock
aiodelay.codecs aiodelay.core.event_codecs
    JSON MESSAGEPACK Codec JsonCodec MessagePackCodec codec_named first_line
aiodelay.codecs aiodelay.core.record_codec
    decode_columns decode_record decode_trace encode_body encode_record encode_trace numbers_at storable_text
    storable_texts
aiodelay.kafka aiodelay.backends.kafka
    KafkaSink KafkaSource KafkaStore open_sink open_source open_store
aiodelay.kafka.records aiodelay.backends.kafka.records
    BARRIER CANCEL FORMAT INTAKE KEEP MARK PARTITIONS SINK Glance Headers Kind Memory Message Read Wire answer_of
    asked_back asked_cancel asked_op check_names dead_key dead_key_of decode decode_dead decode_history delivered
    encode encode_ask_to_cancel encode_back encode_cancel encode_dead encode_end encode_feature encode_history
    encode_hold encode_keep encode_mark encode_position encode_record feature_in glance held_in id_of is_plain
    is_topic java_partition kept_put key_of mark_of memory_of op_of partition_of partitions_in position_in readable
    received user_headers
aiodelay.memory aiodelay.backends.memory
    MemoryStore open_store
aiodelay.model aiodelay.core.values
    ATTEMPTED CONTINUED EARLIER_ERRORS FIELDS FORMAT_VERSION LEASE_MS MAX_CLAIM_BYTES MAX_CLAIM_MESSAGES MAX_LAPSES
    MAX_LEASE_MS RETRY_WINDOW_MS TOMBSTONE_WINDOW_MS TRACEBACK_BYTES After Again At Blocked Cancel CancelOutcome
    Claim Claimed Command Conflict Dead DeadKey DeadLetter DeadReason Delivery Demand Done Envelope Failed Field
    Fire FireOutcome Instance JournalEntry Lane LaneCounts LaneState Late LateAction LoadBucket NotTaken Outcome
    Promise Put PutBack Query Reach Record Refused Registered RenewOutcome Renewal Reschedule RescheduleOutcome
    ScheduleOutcome SendOutcome Sent SettleOutcome Settlement Snapshot SourcePosition State Stored Tidied
    Transferred Unknown WorkStatus
aiodelay.reactive aiodelay.ports.reactive
    Publisher Subscriber Subscription
aiodelay.recurrence aiodelay.core.recurrence
    MIN_INTERVAL_MS Cron Every Missed Overlap Rule decode_rule describe encode_rule first_due is_missed
    is_overlapped next_due upcoming
aiodelay.redis aiodelay.backends.redis
    Consumer LogConsumer LogEntry LogMessage LogStart LogTopic RedisFanout RedisFanoutSink RedisFanoutSource
    RedisListSink RedisListSource RedisLog RedisStore Topic open_fanout_sink open_fanout_source open_list_sink
    open_list_source open_log open_store
aiodelay.redis.black_box aiodelay.importers.black_box
    take_over_black_box
aiodelay.redis.fred84 aiodelay.importers.fred84
    import_fred84 simple_name
aiodelay.registry aiodelay.backends.registry
    open_sink open_source open_store
aiodelay.sinks aiodelay.backends.stdout
    StdoutSink open_stdout
aiodelay.sqlite aiodelay.backends.sqlite
    SqliteStore open_store
aiodelay.timeunits aiodelay.core.durations
    LAST_MS MAX_HORIZON_MS Duration check_horizon format_duration from_epoch_ms parse_duration parse_instant
    to_epoch_ms
aiodelay.transitions aiodelay.core.conflicts
    outdated put_verdict
aiodelay.transitions aiodelay.core.transitions
    DEAD_LEASES KILLS_TO_DEATH NO_OP RIGHTING_MS SILENT_LEASES SUSPECT_LAPSES TRIAL_MS Trials after_failure
    after_lapse after_trial ahead_since as_occurrence base_id cancel_refused delivery_id due_of ends_by_itself fired
    first_answer has_died is_killer is_late is_lease_over is_lease_too_long is_release is_silent is_suspect joined
    loads_of moved next_revision occurrence_id occurrence_of put_due_of rearmed record_of
    redriven retry_place returned token_counter token_deadline_ms token_for tokens_held trial_ms
aiodelay.urls aiodelay.core.urls
    UrlOptions
"""
"""Each public path with the module in which its names stand, and below it the names."""


@pytest.mark.parametrize(("path", "place", "names"), re.findall(r"^(\S+) (\S+)\n((?:    .*\n)+)", PATHS, re.MULTILINE))
def test_every_public_name_is_the_same_object_at_both_paths(path: str, place: str, names: str) -> None:
    public, module = import_module(path), import_module(place)
    assert [name for name in names.split() if not hasattr(public, name)] == []
    assert [name for name in names.split() if getattr(public, name) is not getattr(module, name)] == []
    assert set(names.split()) <= set(public.__all__)
