"""The old import path of `aiodelay.core.event_codecs` and `aiodelay.core.record_codec`, kept for existing programs."""

from aiodelay.core.event_codecs import JSON, MESSAGEPACK, Codec, JsonCodec, MessagePackCodec, codec_named, first_line
from aiodelay.core.record_codec import (
    decode_columns,
    decode_record,
    decode_trace,
    encode_body,
    encode_record,
    encode_trace,
    numbers_at,
    storable_text,
    storable_texts,
)

__all__ = [
    "JSON",
    "MESSAGEPACK",
    "Codec",
    "JsonCodec",
    "MessagePackCodec",
    "codec_named",
    "decode_columns",
    "decode_record",
    "decode_trace",
    "encode_body",
    "encode_record",
    "encode_trace",
    "first_line",
    "numbers_at",
    "storable_text",
    "storable_texts",
]
