"""Small parts of the local runner: back-off, ports, logs, the run folder, the file watch, what a person reads."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fermata.core.errors import ConfigError
from fermata.core.spec import Manifests, load_manifests
from fermata.operator import cli
from fermata.operator.local.backoff import LONGEST_S, RAN_WELL_S, Backoff
from fermata.operator.local.console import Console, banner, curl, describe_exit, headline
from fermata.operator.local.layout import Layout
from fermata.operator.local.observer import admitted
from fermata.operator.local.ports import LOWEST, PortBook, is_free
from fermata.operator.local.process import last_lines, roll
from fermata.operator.local.run_folder import Endpoints, RunFolder, read_endpoints
from fermata.operator.local.status import Look, table
from fermata.operator.local.watch import FileWatch
from fermata.wire.messages import Ring, Status


def test_the_wait_before_a_restart_doubles_is_capped_and_starts_over_after_a_good_run() -> None:
    backoff = Backoff()
    waits = [backoff.after(1.0) for _ in range(10)]
    assert waits[:5] == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert waits[-1] == LONGEST_S
    assert [backoff.after(0.0) for _ in range(2000)][-1] == LONGEST_S
    assert backoff.after(RAN_WELL_S) == 0.2
    assert backoff.failures == 1


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
    with pytest.raises(OSError, match="assign requested address"):
        is_free(port, host="192.0.2.1")


def test_a_name_keeps_its_port_and_none_is_given_twice() -> None:
    book = PortBook(seed=1)
    ports = {name: book.port(name) for name in ("a", "b", "c", "d")}
    assert len(set(ports.values())) == 4
    assert {name: book.port(name) for name in ports} == ports
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert all(port >= LOWEST and not int(low) <= port <= int(high) for port in ports.values())
    assert PortBook(seed=1).port("a") == ports["a"]
    book.forget("a")
    book.forget("nobody")
    assert book.port("a") != ports["a"]


def test_the_end_of_a_log_is_read_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log, 3) == []
    log.write_text("".join(f"line {i}\n\n" for i in range(10_000)))
    assert last_lines(log, 3) == ["line 9997", "line 9998", "line 9999"]


def test_a_log_beyond_its_bound_is_moved_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    roll(log, limit=10)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"short")
        roll(log, limit=10)
        assert log.read_bytes() == b"short"
        writer.write(b" and long")
        roll(log, limit=10)
        writer.write(b"anew")
    assert log.read_bytes() == b"anew"
    assert (tmp_path / "x.log.1").read_bytes() == b"short and long"


def endpoints(pid: int) -> Endpoints:
    return Endpoints(
        pid=pid, deployment="d", manifest="m", url="u", routers={"r": "x"}, workers={}, frontends={}
    )


def test_the_run_folder_is_taken_once_and_told_about_while_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="no fermata up runs here"):
        read_endpoints(folder.path)
    folder.open()
    folder.log("old").write_text("x")
    with pytest.raises(ConfigError, match="another fermata up uses this folder"):
        RunFolder(folder.path).open()
    folder.write_endpoints(endpoints(os.getpid()))
    assert read_endpoints(folder.path).routers == {"r": "x"}
    folder.close()
    folder.close()
    assert not folder.endpoints.exists()
    folder.open()
    assert not folder.log("old").exists(), "logs are of this run"
    folder.close()


def test_endpoints_of_a_runner_that_was_killed_are_not_believed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = RunFolder(tmp_path)
    folder.write_endpoints(endpoints(gone.pid))
    with pytest.raises(
        ConfigError, match=rf"its fermata up \(process {gone.pid}\) is gone \(start it again\)"
    ):
        read_endpoints(tmp_path)
    folder.endpoints.write_text("{}")
    with pytest.raises(ConfigError, match="remove it and start fermata up again"):
        read_endpoints(tmp_path)


def test_a_run_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can not be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").open()


def test_an_edit_is_seen_once_and_only_when_the_file_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    watch = FileWatch(path)
    assert not watch.changed()
    path.write_text("")
    assert not watch.changed(), "half written"
    path.write_text("three")
    assert not watch.changed()
    assert watch.changed()
    assert not watch.changed()
    path.unlink()
    assert not watch.changed()
    assert not watch.changed()
    path.write_text("four")
    assert [watch.changed(), watch.changed(), watch.changed()] == [False, True, False]


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        (Status("r", {"workers_ready": 9}, {"workers": "a,c"}), {"a"}),
        (Status("r", {"workers_ready": 9}, {"workers": ""}), set()),
        (Status("r", {"workers_ready": 2}, {}), {"a", "b"}),
        (Status("r", {"workers_ready": 1}, {}), set()),
        (Status("r", {}, {}), set()),
    ],
)
def test_a_worker_counts_as_admitted_by_name_or_all_by_number(
    status: Status, ready: set[str]
) -> None:
    assert admitted(status, ["a", "b"]) == ready


def demo(tmp_path: Path, frontend: str = "{}") -> Manifests:
    path = tmp_path / "m.yaml"
    path.write_text(
        "apiVersion: fermata.dev/v1alpha1\nkind: AgentDeployment\nmetadata: {name: demo}\n"
        f"spec: {{model: {{name: it's}}, workers: [{{name: sim}}], frontend: {frontend}}}\n"
    )
    return load_manifests(path)


def test_the_banner_names_the_url_a_request_to_paste_and_what_to_do_next(tmp_path: Path) -> None:
    manifests = demo(tmp_path)
    assert (
        headline(manifests, Path("m.yaml"))
        == "fermata up: demo from m.yaml, policy default (KVAware)"
    )
    text = banner(
        manifests,
        url="http://127.0.0.1:8000",
        manifest=Path("m.yaml"),
        logs=Path("run/logs"),
        port=8000,
        watching=False,
        took_s=1.26,
    )
    assert text == (
        """
Ready in 1.3 s: http://127.0.0.1:8000/v1 serves it's. Try:

  curl -N http://127.0.0.1:8000/v1/chat/completions \\
    -H 'content-type: application/json' \\
    -d '{"model": "it'"'"'s", "stream": true, "messages": [{"role": "user", "content": "Hold that note, please."}]}'

  status  fermata status --port 8000
  logs    run/logs
  edits   of m.yaml apply on SIGHUP, or start with --watch
  stop    Ctrl-C
"""
    )


def test_the_request_to_paste_is_one_a_shell_reads_back_and_carries_a_key(tmp_path: Path) -> None:
    line = curl(demo(tmp_path, "{apiKeys: {secret: tenant}}"), url="http://h:1").replace(
        "curl", "printf '%s\\n'"
    )
    words = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    assert "authorization: Bearer secret\n" in words
    assert '{"model": "it\'s", "stream": true, ' in words


def test_an_exit_is_told_by_number_or_by_the_signal_s_name() -> None:
    assert [describe_exit(c) for c in (0, 3, -9, -64 - 9)] == [
        "exited with 0",
        "exited with 3",
        "was ended by SIGKILL",
        "was ended by signal 73",
    ]


def test_a_terminal_that_went_away_ends_nothing() -> None:
    out = io.StringIO()
    out.close()
    Console(out).say("nobody hears this")


def test_services_get_the_flags_they_agreed_on() -> None:
    layout = Layout(
        host="0.0.0.0",
        port=8000,
        deployment=Path("/run/d.json"),
        policy=Path("/run/p.json"),
        ports=PortBook(seed=1),
        executable=("fermata",),
    )
    ring = Ring(3, [("router-0", "tcp://a:1"), ("router-1", "tcp://b:2")])
    assert " ".join(layout.router("router-1")) == (
        "fermata router --id router-1 --number 1 --deployment /run/d.json --policy /run/p.json"
        f" --listen {layout.endpoint('router-1')} --metrics-port {layout.ports.port('router-1/metrics')}"
    )
    assert " ".join(layout.worker("sim-0", group="sim", revision="r1", ring=ring)) == (
        "fermata worker --id sim-0 --group sim --revision r1 --deployment /run/d.json"
        " --routers router-0=tcp://a:1,router-1=tcp://b:2 --epoch 3"
        f" --listen {layout.endpoint('sim-0')} --metrics-port {layout.ports.port('sim-0/metrics')}"
    )
    assert " ".join(layout.frontend("frontend-1.2", ring=ring)) == (
        "fermata frontend --id frontend-1.2 --deployment /run/d.json"
        " --routers router-0=tcp://a:1,router-1=tcp://b:2 --epoch 3 --host 0.0.0.0 --port 8001 --reuse-port"
    )
    assert layout.url("frontend-1.2") == "http://127.0.0.1:8001"
    assert layout.metrics("sim-0").endswith(f":{layout.ports.port('sim-0/metrics')}/metrics")


def test_the_status_table_lines_up_and_shows_what_is_not_known() -> None:
    text = table(
        {
            "router": [Look("router-0", "serving", {"leases": 3, "workers_ready": 2})],
            "worker": [Look("sim-0"), Look("sim-10", "draining", {"steps": 123456})],
            "frontend": [Look("frontend-0", "serving", {"cached_share": 0.98765})],
        }
    )
    assert text == (
        "router    state    workers ready  workers known  owners  leases  turns waiting  sessions  index blocks"
        "  policy revision\n"
        "router-0  serving              2              -       -       3              -         -             -"
        "                -\n"
        "\n"
        "worker  state      requests  kv blocks referenced  kv blocks cached  kv blocks total  output tokens   steps\n"
        "sim-0   no answer         -                     -                 -                -              -       -\n"
        "sim-10  draining          -                     -                 -                -              -  123456\n"
        "\n"
        "frontend    state    turns  leases  migrations  cancellations  poisons  cached share\n"
        "frontend-0  serving      -       -           -              -        -         0.988"
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--file", "x", "--port", "0"],
        ["--file", "x", "--port", "http"],
        ["--file", "x", "--drain-timeout", "-1"],
        [],
    ],
)
def test_a_wrong_flag_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.up(argv)
    assert caught.value.code == 2
    assert "usage: fermata up" in capsys.readouterr().err


def test_up_and_status_teach(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (cli.up, cli.status):
        with pytest.raises(SystemExit) as caught:
            command(["--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert "exit codes: 0" in text
        assert all(len(line) <= 120 for line in text.splitlines())
