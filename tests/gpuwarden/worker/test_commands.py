"""Jobs that are commands, with real workers, supervisors and commands, and real kills."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.sources import workers
from gpuwarden import clock, procfs
from gpuwarden.job import FINAL, Condition, JobId, State
from gpuwarden.procfs import ProcessId
from gpuwarden.queue import JobStore, Submission
from gpuwarden.supervisor import command_record, files
from gpuwarden.supervisor.command_record import Record
from gpuwarden.worker.commands import Command, CommandJobError
from remediator.actuators.process import ProcessActuator
from tests.waiting import eventually

NAME = "w"
WAITS = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text('x'); time.sleep(1000)"
# Appends its steps to a file, and waits for a file.
STEPS = """
import os, pathlib, sys, time
log, until, code = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
with log.open("a") as file: print("began", file=file, flush=True)
while not until.exists(): time.sleep(0.02)
with log.open("a") as file: print("ended", file=file, flush=True)
sys.exit(code)
"""


class Host:
    """A host with one worker of commands."""

    def __init__(self, directory: Path) -> None:
        (directory / "host").write_text("host1\n")
        self.directory = directory
        self.folder = directory / NAME
        self.url = f"sqlite:///{directory}/queue.db"
        self.queue_db = self.url
        self.store = JobStore.open(self.url)
        self.log = directory / "worker.log"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, processes: int = 0, **env: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "gpuwarden", "worker", "run", "--commands", "--name", NAME]
        argv += ["--processes", str(processes), "--queue-db", self.queue_db, "--heartbeat-s", "0.5", *options]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(self.directory), **env},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def use_gateway(self) -> None:
        """Later workers have the gateway's socket and no database."""
        argv = [sys.executable, "-m", "gpuwarden", "gateway", "host", "--queue-db", self.url, "--port", "0"]
        argv += ["--runtime-dir", str(self.directory)]
        self._started.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        self.queue_db = "gateway"

    def submit(self, *argv: str, cwd: str | None = None, env: tuple[str, ...] = ()) -> JobId:
        command = Command(argv=argv, cwd=cwd or str(self.directory), env=env)
        return self.store.runs.submit(
            Submission(queue="gpu", payload=command.payload, budget_s=0), now=self.store.now()
        )  # fmt: skip

    def python(self, program: str, *arguments: str) -> JobId:
        return self.submit(sys.executable, "-c", program, *arguments)

    def reaches(self, job_id: JobId, state: State) -> None:
        eventually(lambda: self.store.job(job_id).state is state, f"job {job_id} is {state}", log=self.log.read_text)

    def record(self) -> Record:
        found = command_record.read(self.folder, NAME)
        assert found is not None
        return found

    def command(self) -> ProcessId:
        """The process of the command, once it runs."""

        def found() -> ProcessId | None:
            record = command_record.read(self.folder, NAME)
            return record.process if record is not None and record.process and record.process.runs() else None

        return eventually(found, "a command runs", log=self.log.read_text)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        record = command_record.read(self.folder, NAME)
        if record is not None and record.supervisor is not None:
            procfs.signal_process(record.supervisor, signal.SIGTERM)
            eventually(lambda: not record.supervisor or not record.supervisor.runs(), "the supervisor has ended")
        self.store.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.close()


@pytest.mark.behaviour("D8")
@pytest.mark.parametrize(
    ("argv", "cwd", "env", "state", "reason"),
    [
        (["true"], None, (), State.COMPLETED, None),
        (["sh", "-c", "exit 3"], None, (), State.FAILED, "exit code 3"),
        (["sh", "-c", "kill -SEGV $$"], None, (), State.FAILED, "exit code 139: killed by SIGSEGV"),
        (["setsid", "sh", "-c", "sleep 0.5; exit 4"], None, (), State.FAILED, "exit code 4"),
        (["nosuch-command"], None, (), State.FAILED, "exit code 127: nosuch-command: command not found"),
        (["/etc/passwd"], None, (), State.FAILED, "exit code 126: /etc/passwd: not executable"),
        (["true"], "/nosuch", (), State.FAILED, "exit code 126: working directory /nosuch: No such file or directory"),
        (["true"], None, ("NO_SUCH",), State.FAILED, "the worker has no variable NO_SUCH"),
    ],
)  # fmt: skip
def test_exit_code_decides(
    host: Host, argv: list[str], cwd: str | None, env: tuple[str, ...], state: State, reason: str | None
) -> None:
    host.start("--jobs-max", "1")

    job_id = host.submit(*argv, cwd=cwd, env=env)

    host.reaches(job_id, state)
    found = host.store.job(job_id).reason
    assert found is None if reason is None else str(found).startswith(reason)


def test_command_gets_named_variables_and_never_those_of_gpuwarden(host: Host, tmp_path: Path) -> None:
    host.start("--jobs-max", "1", TOKEN="hidden-value", OTHER="x", GPUWARDEN_QUEUE_DB="sqlite:///secret")
    out = tmp_path / "out"
    program = "import os, sys; open(sys.argv[1], 'w').write('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"

    job_id = host.submit(sys.executable, "-c", program, str(out), env=("TOKEN",))
    host.reaches(job_id, State.COMPLETED)

    found = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert found["TOKEN"] == "hidden-value"
    assert found["PATH"] == os.environ["PATH"]
    assert "OTHER" not in found
    assert {name for name in found if name.startswith("GPUWARDEN_")} == {"GPUWARDEN_JOB_FILE", "GPUWARDEN_SUPERVISOR"}
    assert b"hidden-value" not in (tmp_path / "queue.db").read_bytes()


def test_job_that_is_no_command_fails_with_advice(host: Host) -> None:
    host.start("--jobs-max", "1")

    job_id = host.store.runs.submit(Submission(queue="gpu", payload={"task": "paint"}), now=host.store.now())

    host.reaches(job_id, State.FAILED)
    assert "submit one with `gpuwarden job submit -- CMD`" in str(host.store.job(job_id).reason)


@pytest.mark.parametrize(
    ("its", "says"),
    [
        ({"argv": ()}, "missing the command"),
        ({"argv": ("true",), "cwd": "here"}, "use an absolute path"),
        ({"argv": ("a\0b",)}, "NUL character"),
        ({"argv": ("true",), "env": ("GPUWARDEN_QUEUE_DB",)}, "not passed to a command"),
        ({"argv": ("true",), "env": ("A=b",)}, "give the name of a variable"),
    ],
)
def test_invalid_command_is_refused_with_advice(its: dict[str, tuple[str, ...]], says: str) -> None:
    with pytest.raises(CommandJobError, match=says):
        Command(**{"cwd": "/", **its})  # type: ignore[arg-type]


# --- restarts of the worker


@pytest.mark.slow
@pytest.mark.behaviour("D8")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.parametrize("ends_before", [False, True])
def test_command_survives_its_worker_and_its_exit_code_decides(
    host: Host, tmp_path: Path, number: signal.Signals, code: int, *, ends_before: bool
) -> None:
    log, until = tmp_path / "did", tmp_path / "until"
    first = host.start()
    job_id = host.python(STEPS, str(log), str(until), str(code))
    process = host.command()

    first.send_signal(number)
    first.wait(timeout=20)
    if ends_before:
        until.touch()
        eventually(lambda: host.record().end, "the end is written")
    else:
        assert process.runs()
    host.start()
    if not ends_before:
        eventually(lambda: "command taken over" in host.log.read_text(), "taken over", log=host.log.read_text)
        assert host.record().process == process
        until.touch()

    host.reaches(job_id, State.FAILED if code else State.COMPLETED)
    assert host.store.job(job_id).reason == (f"exit code {code}" if code else None)
    assert host.store.job(job_id).attempt == 1
    assert log.read_text() == "began\nended\n"
    eventually(lambda: not (host.folder / "w.command.json").exists(), "the record is removed")


@pytest.mark.slow
@pytest.mark.behaviour("D8")
def test_command_is_taken_over_through_a_gateway(host: Host, tmp_path: Path) -> None:
    log, until = tmp_path / "did", tmp_path / "until"
    host.use_gateway()
    first = host.start()
    job_id = host.python(STEPS, str(log), str(until), "5")
    process = host.command()

    first.kill()
    first.wait(timeout=20)
    host.start()
    eventually(lambda: "command taken over" in host.log.read_text(), "taken over", log=host.log.read_text)
    assert host.record().process == process
    until.touch()

    host.reaches(job_id, State.FAILED)
    assert (host.store.job(job_id).reason, host.store.job(job_id).attempt) == ("exit code 5", 1)
    assert log.read_text() == "began\nended\n"


def test_ctrl_c_ends_the_command_and_queues_its_job_again(host: Host, tmp_path: Path) -> None:
    process = host.start()
    job_id = host.python(WAITS, str(tmp_path / "x"))
    command = host.command()

    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)

    assert process.returncode == 0
    assert not command.runs()
    assert host.store.job(job_id).state is State.QUEUED


@pytest.mark.slow
def test_command_whose_job_was_cancelled_meanwhile_is_ended_by_the_next_worker(host: Host, tmp_path: Path) -> None:
    first = host.start()
    job_id = host.python(WAITS, str(tmp_path / "x"))
    command = host.command()
    first.kill()
    first.wait()

    host.store.admin.cancel(job_id, reason="a test", now=host.store.now())
    host.start()

    eventually(lambda: not command.runs(), "the command has ended")
    other = host.submit("true")
    host.reaches(other, State.COMPLETED)


@pytest.mark.slow
def test_cancel_ends_the_command_with_all_that_it_started(host: Host, tmp_path: Path) -> None:
    host.start(processes=1)
    forks = (
        "import os, pathlib, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    job_id = host.python(forks, str(tmp_path / "pid"))
    command = host.command()
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it has forked")
    child = ProcessId.of(int((tmp_path / "pid").read_text()))

    host.store.admin.cancel(job_id, reason="a test", now=host.store.now())

    eventually(lambda: not command.runs() and not child.runs(), "both have ended")
    other = host.submit("true")
    host.reaches(other, State.COMPLETED)


@pytest.mark.slow
def test_command_ends_with_the_lease_if_no_worker_comes(host: Host, tmp_path: Path) -> None:
    process = host.start("--lease-s", "4")
    host.python(WAITS, str(tmp_path / "x"))
    command = host.command()

    time.sleep(4)
    assert command.runs()  # a worker renews
    process.kill()
    process.wait()

    eventually(lambda: host.record().end, "the command has ended", within_s=15)
    end = host.record().end
    assert end is not None
    assert end.stopped
    assert "no worker renewed its lease" in end.text


# --- one start


def test_command_that_never_started_is_queued_again(host: Host) -> None:
    """A worker that was killed after the record and before the start of the supervisor."""
    host.folder.mkdir()
    job_id = host.submit("true")
    claim = {"host": "host1", "worker": NAME, "incarnation": "i1", "now": host.store.now()}
    host.store.claims.register("gpu", **claim)  # type: ignore[arg-type]
    assert host.store.claims.claim("gpu", **claim) is not None  # type: ignore[arg-type]
    record = Record(key="k", job_id=job_id, attempt=1, incarnation="i1", boot_id=clock.boot_id())
    command_record.write(host.folder, NAME, record)

    host.start()

    host.reaches(job_id, State.COMPLETED)
    assert host.store.job(job_id).attempt == 2


def test_second_attempt_on_a_host_waits_for_the_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import pathlib, sys, time; from gpuwarden.supervisor import command_record\n"
        "assert command_record.lock_job(pathlib.Path(sys.argv[1]), 'job', give_up=lambda: True)\n"
        "pathlib.Path(sys.argv[2]).touch(); time.sleep(1000)"
    )
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "w1"), str(ready)])
    try:
        eventually(ready.exists, "the first has the lock")

        assert not command_record.lock_job(tmp_path / "w2", "job", give_up=lambda: True)
        assert command_record.lock_job(tmp_path / "w2", "another job", give_up=lambda: True)
    finally:
        first.kill()
        first.wait()
    assert command_record.lock_job(tmp_path / "w2", "job", give_up=lambda: False)


def test_command_whose_supervisor_was_killed_is_reported_lost(host: Host, tmp_path: Path) -> None:
    host.start()
    job_id = host.python(WAITS, str(tmp_path / "x"))
    command = host.command()
    supervisor = host.record().supervisor
    assert supervisor is not None

    procfs.signal_process(supervisor, signal.SIGKILL)

    host.reaches(job_id, State.FAILED)
    assert str(host.store.job(job_id).reason).startswith("lost: its supervisor was killed")
    eventually(lambda: not command.runs(), "the command has ended")


# --- exporter and executor


@pytest.mark.slow
@pytest.mark.behaviour("D8")
def test_executor_ends_the_command_also_after_a_restart_of_its_worker(host: Host, tmp_path: Path) -> None:
    actuator = ProcessActuator(host.directory)
    first = host.start()
    job_id = host.python(WAITS, str(tmp_path / "x"))
    command = host.command()
    supervisor = host.record().supervisor
    (seen,) = workers.read(host.directory).workers
    assert supervisor is not None
    assert (seen.alive, seen.process, seen.pid) == (True, command, supervisor.pid)

    first.kill()
    first.wait()
    (seen,) = workers.read(host.directory).workers
    assert seen.alive is None  # nothing is done to its job until a worker takes it over
    host.start()
    eventually(lambda: "command taken over" in host.log.read_text(), "taken over", log=host.log.read_text)
    (seen,) = workers.read(host.directory).workers
    assert (seen.alive, seen.process, seen.pid) == (True, command, supervisor.pid)
    assert seen.job is not None
    assert (seen.job.after_gpu_use, seen.job.health_acts) == (True, False)

    looked = actuator.look(NAME)
    assert looked is not None
    assert looked.incarnation.startswith(f"process:{command.pid}:")
    job = host.store.job(job_id)
    assert host.store.fencing.fence(
        job_id, attempt=1, incarnation=str(job.claimed_by), condition=Condition.STALL, now=host.store.now()
    )
    actuator.stop(NAME, grace_s=1)

    assert not command.runs()
    assert host.store.job(job_id).state is State.FENCING


def test_record_that_the_kernel_does_not_confirm_names_no_command(host: Host, tmp_path: Path) -> None:
    host.start()
    host.python(WAITS, str(tmp_path / "x"))
    host.command()
    other = subprocess.Popen(["sleep", "1000"])
    try:
        forged = replace(host.record(), process=ProcessId.of(other.pid))
        command_record.write(host.folder, NAME, forged)

        with pytest.raises(files.SupervisedFileError, match="whose parent is"):
            files.supervised_command(host.folder, NAME)
    finally:
        other.kill()
        other.wait()


# --- random kills

WORKERS = (f"{NAME}-0", f"{NAME}-1")
SLEEPS = (
    "import sys, time\n"
    "with open(sys.argv[1], 'a') as file: file.write('began\\n')\n"
    "time.sleep(float(sys.argv[2]))\n"
    "with open(sys.argv[1], 'a') as file: file.write('ended\\n')\n"
    "sys.exit(int(sys.argv[3]))\n"
)


class Kills:
    """Kills workers, their supervisor, and now and then a command's supervisor."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.seed = time.time_ns() % 10**6
        self.dice = random.Random(self.seed)  # noqa: S311
        self.counted: Counter[str] = Counter()
        self.jobs: dict[JobId, tuple[Path, int]] = {}
        self.pool = host.start(processes=len(WORKERS))

    def run(self, for_s: float) -> str:
        """Kill for this time; then every command has finished once or is reported lost."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            if len(self.unfinished()) < 6:
                did, code = self.host.directory / f"did-{len(self.jobs)}", self.dice.choice([0, 0, 7])
                job_id = self.host.python(SLEEPS, str(did), str(self.dice.uniform(0, 3)), str(code))
                self.jobs[job_id] = did, code
            time.sleep(self.dice.uniform(0, 2))
            victim = self.dice.choice(["worker"] * 7 + ["pool", "command"])
            self.counted[victim] += self.kill(victim, self.dice.choice(WORKERS))
        eventually(lambda: not self.unfinished(), "every job ends", within_s=150, log=self.host.log.read_text)
        lost = sum(self.is_lost(job_id) for job_id in self.jobs)
        self.pool.send_signal(signal.SIGINT)
        self.pool.wait(timeout=60)
        assert all(command_record.is_free(self.host.directory / name, name) for name in WORKERS)
        return f"seed {self.seed}: {len(self.jobs)} commands, {lost} lost, killed {dict(self.counted)}"

    def unfinished(self) -> list[JobId]:
        return [job_id for job_id, state in self.host.store.queries.states_of(self.jobs).items() if state not in FINAL]

    def kill(self, victim: str, name: str) -> int:
        folder = self.host.directory / name
        pid = files.lock_holder(folder, name)[1] if (folder / f"{name}.lock").exists() else None
        if pid is None:
            return 0  # its worker starts
        if victim == "pool":
            self.pool.kill()
            self.pool.wait()
            self.pool = self.host.start(processes=len(WORKERS))
            return 1
        if victim == "worker":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return 1
        record = command_record.read(folder, name)
        if record is None or record.supervisor is None:
            return 0
        procfs.signal_process(record.supervisor, signal.SIGKILL)
        return 1

    def is_lost(self, job_id: JobId) -> bool:
        """Whether the queue reports the command as lost; if not, it finished once with its exit code."""
        job, (did, code) = self.host.store.job(job_id), self.jobs[job_id]
        lines = did.read_text().split() if did.exists() else []
        if job.state is State.COMPLETED or job.reason == f"exit code {code}":
            assert (job.state is State.COMPLETED) == (code == 0), (self.seed, job)
            assert lines == ["began", "ended"], (self.seed, job)
            return False
        assert lines in ([], ["began"], ["began", "ended"]), (self.seed, job)
        assert str(job.reason).startswith(("lost: ", "its supervisor did not start", "its worker was restarted")), job
        return True


@pytest.mark.slow
@pytest.mark.behaviour("D8")
def test_every_command_finishes_once_or_is_reported_lost(host: Host) -> None:
    kills = Kills(host)

    said = kills.run(for_s=20)

    assert kills.counted["worker"] > 0, said


@pytest.mark.nightly
@pytest.mark.behaviour("D8")
def test_every_command_finishes_once_or_is_lost_for_ten_minutes(host: Host) -> None:
    sys.stderr.write(Kills(host).run(for_s=600) + "\n")
