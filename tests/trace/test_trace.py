from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fermata.trace import (
    AgentContext,
    Replay,
    RequestEnd,
    TraceFile,
    TraceRecord,
    TraceWriter,
    read_trace,
    segments,
    worker_number,
)


def record(number: int) -> TraceRecord:
    return TraceRecord(
        event_time_unix_ms=1_790_000_000_000 + number,
        agent_context=AgentContext(session_id="s"),
        request=RequestEnd(
            request_id=f"r-{number}",
            replay=Replay(
                trace_block_size=64, input_length=128, input_sequence_hashes=[2**64 - 1, number]
            ),
        ),
    )


def ids(prefix: Path) -> list[str]:
    return [line.event.request.request_id for line in read_trace(prefix) if line.event.request]


def test_a_closed_segment_is_plain_gzip_of_public_lines(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t" / "fermata", monotonic=iter([10.0, 10.25]).__next__) as writer:
        writer.put(record(1))
    ((number, path),) = segments(tmp_path / "t" / "fermata")
    assert number == 0
    assert path.name == "fermata.000000.jsonl.gz"
    (line,) = gzip.decompress(path.read_bytes()).splitlines()
    said = json.loads(line)
    assert said["timestamp"] == 250
    assert said["event"]["schema"] == "dynamo.request.trace.v1"
    assert said["event"]["event_type"] == "request_end"
    assert said["event"]["request"]["replay"]["input_sequence_hashes"] == [2**64 - 1, 1]
    assert writer.written == 1
    assert writer.dropped == 0


def test_the_public_example_reads_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    example = {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1790000002500,
        "event_source": "dynamo", "unheard_of": 1,
        "agent_context": {"session_id": "s-42.sub1", "parent_session_id": "s-42", "input_trigger": "tool_result"},
        "request": {
            "request_id": "r-7", "x_request_id": "h-7", "model": "m", "input_tokens": 1024, "queue_depth": 0,
            "worker": {"prefill_worker_id": 1, "prefill_dp_rank": 0, "decode_worker_id": 1, "decode_dp_rank": 0},
            "replay": {"trace_block_size": 64, "input_length": 1024, "input_sequence_hashes": [1, 2, 3]},
            "finish_reason_metadata": {"finish_reason": "tool_calls", "tool_calls": [{"id": "call_1"}], "choices": []},
        },
    }  # fmt: skip
    path = tmp_path / "x.000000.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"timestamp": 5, "event": example}).encode() + b"\n"))
    (line,) = read_trace(tmp_path / "x")
    assert line.event.request is not None
    assert line.event.request.replay is not None
    assert line.event.request.replay.input_sequence_hashes == [1, 2, 3]
    assert line.event.agent_context is not None
    assert line.event.agent_context.parent_session_id == "s-42"


def test_segments_roll_by_size_and_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    prefix = tmp_path / "fermata"
    with TraceWriter(prefix, roll_bytes=1) as writer:
        for number in range(3):
            writer.put(record(number))
    with TraceWriter(prefix) as writer:
        writer.put(record(3))
    assert [number for number, _ in segments(prefix)] == [0, 1, 2, 3]
    assert ids(prefix) == ["r-0", "r-1", "r-2", "r-3"]


def test_two_writers_share_a_prefix(tmp_path: Path) -> None:
    prefix = tmp_path / "fermata"
    with TraceWriter(prefix) as one, TraceWriter(prefix) as two:
        one.put(record(1))
        two.put(record(2))
    assert sorted(ids(prefix)) == ["r-1", "r-2"]
    assert len(segments(prefix)) == 2


def test_a_full_queue_drops_and_counts_and_never_blocks(tmp_path: Path) -> None:
    release = threading.Event()

    class Stuck(TraceWriter):
        def _write_queued(self) -> None:
            release.wait(10)
            super()._write_queued()

    writer = Stuck(tmp_path / "fermata", capacity=10, flush_s=0.01)
    for number in range(25):
        writer.put(record(number))
    assert writer.queued == 10
    assert writer.dropped == 15
    release.set()
    writer.close()
    assert writer.written == 10
    writer.put(record(99))
    assert writer.queued == 0


def test_a_segment_cut_anywhere_gives_all_lines_before_the_cut(tmp_path: Path) -> None:
    prefix = tmp_path / "fermata"
    with TraceWriter(prefix) as writer:
        for number in range(200):
            writer.put(record(number))
    ((_, path),) = segments(prefix)
    whole = path.read_bytes()
    counts: list[int] = []
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        file = TraceFile(path)
        got = [line.event.request.request_id for line in file.lines() if line.event.request]
        assert got == [f"r-{number}" for number in range(len(got))]
        assert file.was_cut
        counts.append(len(got))
    assert counts == sorted(counts)
    assert counts[-1] > 100


def test_a_line_that_is_no_record_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.000000.jsonl.gz"
    path.write_bytes(
        gzip.compress(b'{"timestamp":1,"event":{}}\nnonsense\n{"timestamp":2,"event":{}}\n')
    )
    file = TraceFile(path)
    assert [line.timestamp for line in file.lines()] == [1, 2]
    assert file.malformed == 1
    assert not file.was_cut


def test_a_killed_process_leaves_what_was_flushed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fermata.trace import TraceRecord, TraceWriter, RequestEnd\n"
        "writer = TraceWriter(Path(sys.argv[1]), flush_s=0.02)\n"
        "for n in range(5):\n"
        "    writer.put(TraceRecord(request=RequestEnd(request_id=f'r-{n}')))\n"
        "while writer.queued: time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    prefix = tmp_path / "fermata"
    process = subprocess.Popen([sys.executable, "-c", code, str(prefix)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert ids(prefix) == [f"r-{number}" for number in range(5)]


def test_a_disk_that_fails_costs_records_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with TraceWriter(blocked / "fermata") as writer:
        writer.put(record(1))
    assert writer.dropped == 1
    assert writer.written == 0
    assert "trace segment failed" in caplog.text


def test_equal_worker_names_have_equal_numbers_that_json_keeps_exact() -> None:
    assert worker_number("sim-0") == worker_number("sim-0") != worker_number("sim-1")
    assert 0 <= worker_number("sim-0") < 2**53
