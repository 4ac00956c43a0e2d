"""The request trace: one record a turn, in the public `dynamo.request.trace.v1` form with fields of ours appended.

`record` is the data, `writer` puts it on disk without ever making the event loop wait, `reader` takes it back
from segments that may end anywhere. No prompt, no answer and no tool argument is ever stored.
"""

from __future__ import annotations

from fermata.trace.reader import TraceFile, read_trace, segments
from fermata.trace.record import (
    SCHEMA,
    AgentContext,
    FinishMetadata,
    Replay,
    RequestEnd,
    TraceLine,
    TraceRecord,
    WorkerRef,
    worker_number,
)
from fermata.trace.writer import TraceWriter

__all__ = [
    "SCHEMA",
    "AgentContext",
    "FinishMetadata",
    "Replay",
    "RequestEnd",
    "TraceFile",
    "TraceLine",
    "TraceRecord",
    "TraceWriter",
    "WorkerRef",
    "read_trace",
    "segments",
    "worker_number",
]
