"""Jobs that are commands: `gpuwarden worker run --commands`.

Each command runs under its supervisor (`gpuwarden.supervisor.command`), which outlives this worker. The next
worker of this name reads the command's record, goes on as the same incarnation, and takes the exit code.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import structlog

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter
from gpuwarden.supervisor import command_record
from gpuwarden.supervisor.child import left_by
from gpuwarden.supervisor.command import GRACE_S, LEFT_GRACE_S, Order
from gpuwarden.supervisor.command_record import CommandEnd, Record
from gpuwarden.supervisor.files import SupervisedFileError

POLL_S: Final = 0.1
END_MAX_S: Final = GRACE_S + LEFT_GRACE_S + 15.0
"""A supervisor that takes longer to end its command is killed, seconds."""

BASE: Final = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
})  # fmt: skip
"""Variables that each command gets."""

BASE_PREFIXES: Final = ("LC_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "ZE_", "OMP_")
OWN_PREFIX: Final = "GPUWARDEN_"

log: Final = structlog.get_logger("worker")


class CommandJobError(GpuwardenError):
    """The job has no valid command, or this worker cannot start it."""


class CommandFailedError(GpuwardenError):
    """The command ended with another exit code than 0, or is lost. It says nothing about the worker."""


class CommandStoppedError(GpuwardenError):
    """A signal from outside ended the command: its job runs again."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A job's command.

    Args:
        argv: program and arguments.
        cwd: an absolute path.
        env: names of further variables of the worker that the command needs.
    """

    argv: tuple[str, ...]
    cwd: str
    env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in (*self.argv, self.cwd):
            if "\0" in text:
                raise CommandJobError(f"the command contains a NUL character: {text[:80]!a}")
        if not self.argv or not self.argv[0]:
            raise CommandJobError("missing the command after --")
        if not self.cwd.startswith("/"):
            raise CommandJobError(f"working directory {self.cwd[:200]!a} is invalid: use an absolute path")
        for name in self.env:
            if name.startswith(OWN_PREFIX):
                raise CommandJobError(f"--env {name}: variables of gpuwarden are not passed to a command")
            if not name or "=" in name or not name.isprintable():
                raise CommandJobError(f"--env {name[:80]!a}: give the name of a variable; its value is the worker's")

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of its job."""
        return {"command": {"argv": list(self.argv), "cwd": self.cwd, "env": list(self.env)}}

    @classmethod
    def of(cls, job: Job) -> "Command":
        """The command of a job.

        Raises:
            CommandJobError: it has none, or an invalid one.
        """
        found = job.payload.get("command")
        if not isinstance(found, dict):
            raise CommandJobError("the job is not a command: submit one with `gpuwarden job submit -- CMD`")
        argv, cwd, env = found.get("argv"), found.get("cwd"), found.get("env", [])
        if not isinstance(cwd, str) or not _is_texts(argv) or not _is_texts(env):
            raise CommandJobError("the job's command is invalid: argv, cwd and env of texts were wanted")
        return cls(argv=tuple(argv), cwd=cwd, env=tuple(env))

    def environment(self) -> list[str]:
        """Names of the worker's variables that the command gets.

        Raises:
            CommandJobError: the worker lacks one.
        """
        if missing := [name for name in self.env if name not in os.environ]:
            raise CommandJobError(f"the worker has no variable {', '.join(missing)}: set it where the worker starts")
        return [
            name
            for name in os.environ
            if not name.startswith(OWN_PREFIX)
            and (name in BASE or name.startswith(BASE_PREFIXES) or name in self.env)
        ]  # fmt: skip


class Commands:
    """A worker's handler for commands.

    Args:
        folder: of the worker's state files.
        name: the worker.
        lease_s: length of its leases, seconds.
    """

    def __init__(self, folder: Path, name: str, *, lease_s: float) -> None:
        self._folder = folder
        self._name = name
        self._lease_s = lease_s
        self._supervisor: subprocess.Popen[bytes] | None = None

    def left_behind(self) -> Record | None:
        """The command of an earlier worker of this name: it runs, or its end is not settled."""
        record = self._read()
        if record is None:
            return None
        is_free = command_record.is_free(self._folder, self._name)
        if is_free and record.end is None and (record.never_started or record.of_earlier_boot):
            return None
        return record

    def __call__(self, job: Job, report: Reporter) -> Callable[[], None]:
        """Start the job's command, or take it over. The work waits for its end."""
        command, record = Command.of(job), self.left_behind()
        if record is not None and (record.key, record.attempt) == (key_of(job), job.attempt):
            running = record.end is None and not command_record.is_free(self._folder, self._name)
            log.info("command taken over" if running else "command ended without its worker", job_id=job.job_id)
        else:
            self.discard()
            self._start(job, command, report)
        return self._wait

    def discard(self) -> None:
        """End a command that has lost its job, and remove its record."""
        record, kill_at_s = self._read(), time.monotonic() + END_MAX_S
        self.request_end()
        while not command_record.is_free(self._folder, self._name):
            record = self._read() or record
            if time.monotonic() >= kill_at_s and record is not None and record.supervisor is not None:
                log.warning("supervisor of a command does not end: killed", pid=record.supervisor.pid)
                procfs.signal_process(record.supervisor, signal.SIGKILL)
                kill_at_s += END_MAX_S
            self._pause()
            self.request_end()
        if record is not None and not record.of_earlier_boot:
            _kill_family(record)
        command_record.remove(self._folder, self._name)

    def request_end(self) -> None:
        """Ask the supervisor to end its command. Does not wait."""
        record = self._read()
        if record is not None and record.supervisor is not None and not record.of_earlier_boot and record.end is None:
            with suppress(OSError):
                procfs.signal_process(record.supervisor, signal.SIGTERM)

    def renewed(self) -> None:
        """The lease was renewed."""
        command_record.renew(self._folder, self._name)

    def settled(self) -> None:
        """The queue has the result."""
        command_record.remove(self._folder, self._name)

    def leave(self, *, ends: bool) -> bool:
        """The worker stops. Returns whether the command goes on; with `ends` it is ended."""
        if ends:
            self.discard()
            return False
        return self.left_behind() is not None

    def _start(self, job: Job, command: Command, report: Reporter) -> None:
        names = command.environment()
        flock = command_record.take(self._folder, self._name)
        if flock is None:
            raise CommandJobError(f"another command of worker {self._name} runs")
        try:
            record = Record(
                key=key_of(job),
                job_id=job.job_id,
                attempt=job.attempt,
                incarnation=report.incarnation,
                boot_id=clock.boot_id(),
            )
            command_record.write(self._folder, self._name, record)
            self.renewed()
            order = Order(
                folder=str(self._folder),
                name=self._name,
                flock=flock,
                argv=list(command.argv),
                cwd=command.cwd,
                environment=names,
                lease_s=self._lease_s,
            )
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpuwarden.supervisor.command"],
                stdin=subprocess.PIPE,
                pass_fds=[flock],
                start_new_session=True,  # signals for the worker's group or session miss it
            )
            if self._supervisor.stdin is not None:
                with suppress(BrokenPipeError), self._supervisor.stdin as pipe:
                    pipe.write(json.dumps(asdict(order)).encode())
        finally:
            os.close(flock)

    def _wait(self) -> None:
        while not command_record.is_free(self._folder, self._name):
            self._pause()
        record = self._read()
        if record is None or record.never_started:
            raise CommandJobError("its supervisor did not start")
        if record.end is None:
            _kill_family(record)
            raise CommandFailedError("lost: its supervisor was killed, so its exit code is unknown")
        _raise_for(record.end)

    def _pause(self) -> None:
        """Wait until the supervisor has ended, at most a second."""
        record = self._read()
        if record is None or record.supervisor is None:
            time.sleep(POLL_S)
        else:
            try:
                with record.supervisor.opened() as descriptor:
                    poll = select.poll()
                    poll.register(descriptor, select.POLLIN)
                    poll.poll(1000)
            except OSError:
                time.sleep(POLL_S)
        if self._supervisor is not None:
            self._supervisor.poll()

    def _read(self) -> Record | None:
        try:
            return command_record.read(self._folder, self._name)
        except SupervisedFileError as error:
            log.warning("record of a command ignored", worker=self._name, reason=str(error))
            return None


def key_of(job: Job) -> str:
    """A name of the job that no other queue's job has."""
    return f"{job.job_id}/{job.submitted_at:.6f}"


def _raise_for(end: CommandEnd) -> None:
    if end.stopped:
        raise CommandStoppedError(end.text)
    if end.code:
        text = end.text if str(end.code) in end.text else f"exit code {end.code}: {end.text}"
        raise CommandFailedError(text)


def _kill_family(record: Record) -> None:
    """Kill what a command left whose supervisor was killed."""
    if record.supervisor is not None:
        for process in left_by(record.supervisor, record.process):
            with suppress(OSError):
                procfs.signal_process(process, signal.SIGKILL)


def _is_texts(found: object) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)
