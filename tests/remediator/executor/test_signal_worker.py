"""The warning signal before a stop: its target, and that it is sent once and recorded before the fence.

The processes, the ledger and the queue are real. The container and the exporter are fakes: see `world`.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import procfs
from gpuwarden.job import State
from gpuwarden.procfs import ProcessId
from gpuwarden.queue import JobStore
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor import signal_worker
from remediator.executor.executor import Clients, Executor
from remediator.executor.signal_worker import WarningError
from remediator.ledger.ledger import Ledger
from remediator.settings.policy_file import PolicyFile
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import LIMITS, PACE, arm, history, journal, stalled_job, to_the_end, turn
from tests.remediator.executor.test_captured_first import capture_runner
from tests.remediator.world import Box, World
from tests.waiting import eventually

GRACE_S = 1.5
BODY = """
import signal, sys, time

def warned(number, frame):
    with open(sys.argv[1] + "/warned", "a") as marks:
        marks.write("x")
    if sys.argv[2] == "saves":
        with open(sys.argv[1] + "/checkpoint", "w") as file:
            file.write("step 5")

if sys.argv[2] != "deaf":
    signal.signal(signal.SIGUSR1, warned)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
SEEN_S_AGO = 0.3
"""The sample age of the fake exporter."""


Starts = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    """Starts a process that saves a checkpoint when it is warned, only notes the signal, or ignores it."""
    with ExitStack() as stack:

        def started(manner: str) -> "subprocess.Popen[str]":
            argv = [sys.executable, "-ISc", BODY, str(tmp_path), manner]
            process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            eventually(lambda: age_s(process.pid) > 2 * SEEN_S_AGO, "it is older than the sample")
            return process

        yield started


def age_s(pid: int) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - procfs.start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def marks(folder: Path) -> int:
    file = folder / "warned"
    return len(file.read_text()) if file.exists() else 0


# --- the target


def test_worker_that_catches_the_signal_is_warned(start: Starts, tmp_path: Path) -> None:
    process = start("saves")

    found = signal_worker.find(process.pid, "SIGUSR1", among={process.pid, 1}, seen_s_ago=SEEN_S_AGO)
    signal_worker.send(found, "SIGUSR1")

    assert found == ProcessId.of(process.pid)
    eventually((tmp_path / "checkpoint").exists, "the checkpoint is saved")
    assert process.poll() is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pid": None}, "the exporter knows no process"),
        ({"among": set()}, "is not in its container"),
        ({"name": "SIGUSR2"}, "does not catch SIGUSR2"),
        ({"seen_s_ago": 3600.0}, "started after the lock was read"),
    ],
)
def test_unsafe_warning_is_not_sent(start: Starts, changed: dict[str, Any], reason: str) -> None:
    process = start("saves")
    asked: dict[str, Any] = {"pid": process.pid, "name": "SIGUSR1", "among": {process.pid}, "seen_s_ago": SEEN_S_AGO}

    with pytest.raises(WarningError, match=reason):
        signal_worker.find(**(asked | changed))


def test_ended_worker_is_not_warned(start: Starts) -> None:
    process = start("saves")
    listener = signal_worker.find(process.pid, "SIGUSR1", among={process.pid}, seen_s_ago=SEEN_S_AGO)
    process.kill()
    process.wait()

    with pytest.raises(WarningError, match="is gone"):
        signal_worker.find(process.pid, "SIGUSR1", among={process.pid}, seen_s_ago=SEEN_S_AGO)
    with pytest.raises(WarningError, match="cannot be warned: No such process"):
        signal_worker.send(listener, "SIGUSR1")


def test_reused_pid_and_process_without_a_handler_get_no_signal(start: Starts, tmp_path: Path) -> None:
    listens, deaf = start("notes"), start("deaf")

    with pytest.raises(WarningError, match="another process has this pid"):
        signal_worker.send(ProcessId(pid=listens.pid, start_ticks=procfs.start_ticks(listens.pid) - 1), "SIGUSR1")
    with pytest.raises(WarningError, match="does not catch SIGUSR1"):
        signal_worker.send(ProcessId.of(deaf.pid), "SIGUSR1")

    assert (marks(tmp_path), listens.poll(), deaf.poll()) == (0, None, None)


# --- in an episode


@pytest.fixture
def policy(tmp_path: Path) -> PolicyFile:
    file = tmp_path / "policy.toml"
    file.write_text(f'[restart_worker]\nwarn_signal = "SIGUSR1"\nwarn_grace_s = {GRACE_S}\n')
    return PolicyFile(file)


def executor(ledger: Ledger, store: JobStore, world: World, policy: PolicyFile, **clients: Any) -> Executor:
    arm(ledger)
    limits = replace(LIMITS, settle_timeout_s=30.0, restart_timeout_s=0.2)
    its: Any = world
    with_these = Clients(exporter=its, queue=BuiltinQueue(store), actuators={"docker": its}, policy=policy, **clients)
    return Executor(ledger, host=HOST, clients=with_these, settings=replace(PACE, limits=limits))


def stalled_worker(ledger: Ledger, store: JobStore, process: "subprocess.Popen[str]") -> tuple[World, Box]:
    world = stalled_job(ledger, store)
    box = world.boxes["w1"]
    box.processes = frozenset({process.pid})
    return world, box


def go_on(works: Executor, ledger: Ledger) -> None:
    """Work until the episode is closed, past the grace period."""

    def over() -> bool:
        turn(works, ledger)
        return not ledger.episodes.list_open()

    eventually(over, "it is over", log=lambda: str(journal(ledger)))


JOURNAL = [
    "saw alert: firing",
    "decided begin",
    "saw capture",
    "decided warn",
    "did warn",
    "decided wait: grace_period",
    "did fence",
    "decided stop",
    "did stop",
    "saw free: dead",
    "did requeue",
    "decided start",
    "did start",
    "saw free: done",
    "decided close: fixed",
]


def test_checkpoint_is_written_before_the_fence_and_the_stop(
    ledger: Ledger, store: JobStore, start: Starts, policy: PolicyFile, tmp_path: Path
) -> None:
    world, box = stalled_worker(ledger, store, start("saves"))
    at_the_stop: list[str] = []
    world.before_stop = lambda _: at_the_stop.append((tmp_path / "checkpoint").read_text())
    works = executor(ledger, store, world, policy, capture_runner=capture_runner())

    turn(works, ledger)
    assert journal(ledger) == JOURNAL[:6]
    assert (store.job(1).state, box.calls) == (State.RUNNING, [])
    go_on(works, ledger)

    assert journal(ledger) == JOURNAL
    assert (at_the_stop, marks(tmp_path), box.calls) == (["step 5"], 1, ["stop", "start"])


def test_warned_worker_is_stopped_only_after_its_grace_period(
    ledger: Ledger, store: JobStore, start: Starts, policy: PolicyFile, tmp_path: Path
) -> None:
    world, box = stalled_worker(ledger, store, start("notes"))
    began_s = time.monotonic()

    go_on(executor(ledger, store, world, policy), ledger)

    assert time.monotonic() - began_s >= GRACE_S
    assert (marks(tmp_path), box.calls) == (1, ["stop", "start"])
    entries = history(ledger).entries
    warned_at, fenced_at = (next(each.at for each in entries if each.step == step) for step in ("warn", "fence"))
    assert fenced_at - warned_at >= GRACE_S


def test_worker_without_a_handler_is_not_warned(
    ledger: Ledger, store: JobStore, start: Starts, policy: PolicyFile
) -> None:
    process = start("deaf")
    world, box = stalled_worker(ledger, store, process)
    alive: list[int | None] = []
    world.before_stop = lambda _: alive.append(process.poll())

    to_the_end(executor(ledger, store, world, policy), ledger)

    assert journal(ledger) == [line for line in JOURNAL if not re.search("warn|grace|capture", line)]
    fence = next(each.message for each in history(ledger).entries if each.step == "fence")
    assert fence.endswith(f"not warned: process {process.pid} does not catch SIGUSR1")
    assert (alive, box.calls) == ([None], ["stop", "start"])


def test_worker_active_in_its_grace_period_is_spared_and_warned_only_once(
    ledger: Ledger, store: JobStore, start: Starts, policy: PolicyFile, tmp_path: Path
) -> None:
    world, box = stalled_worker(ledger, store, start("notes"))
    works = executor(ledger, store, world, policy)
    turn(works, ledger)
    box.hung = False

    def withdrawn() -> bool:
        turn(works, ledger)
        return "decided withdraw" in journal(ledger)

    eventually(withdrawn, "the intent is withdrawn")
    assert (store.job(1).state, box.calls) == (State.RUNNING, [])

    box.hung = True
    to_the_end(works, ledger)

    assert journal(ledger).count("decided warn") == marks(tmp_path) == 1
    assert box.calls == ["stop", "start"]


class Killed(BaseException):
    """The process of the executor ends here."""


@pytest.mark.parametrize(("killed", "signals"), [("before the signal", 1), ("after the signal", 2)])
def test_next_executor_after_a_kill_warns_once_more_and_records_it(
    ledger: Ledger,
    store: JobStore,
    start: Starts,
    policy: PolicyFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: str,
    signals: int,
) -> None:
    world, box = stalled_worker(ledger, store, start("notes"))
    send = signal_worker.send

    def dies(listener: ProcessId, name: str) -> None:
        if killed == "after the signal":
            send(listener, name)
            eventually(lambda: marks(tmp_path) == 1, "the signal arrived")
        raise Killed

    for times in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(signal_worker, "send", dies if times == 1 else send)
            works = executor(ledger, store, world, policy)
            if times == 1:
                with pytest.raises(Killed):
                    turn(works, ledger)
            else:
                go_on(works, ledger)

    assert journal(ledger).count("decided warn") == 2
    assert journal(ledger).count("did warn") == 1
    assert marks(tmp_path) == signals
    assert box.calls == ["stop", "start"]
