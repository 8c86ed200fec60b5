"""`gpuwarden run [options] -- CMD...`: run a command, end it when it hangs, and start it again.

The supervisor holds the worker's lock and writes its state files, so exporter, rules and executor see a worker. Only
the executor decides that the command hangs; it says why in a notice, and ends the command's process group.
"""

import argparse
import os
import re
import selectors
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from gpuwarden.format import Help, Parser, command_name, format_duration, show
from gpuwarden.job import MIN_TIMEOUT_S, STALL_TIMEOUT_S, Condition, JobClass
from gpuwarden.procfs import ProcessId
from gpuwarden.reporter import JOB_FILE, RUN_QUEUE, Reporter
from gpuwarden.supervisor import files
from gpuwarden.supervisor.child import (
    Child,
    CommandError,
    End,
    become_subreaper,
    end_all,
    end_descendants,
    left_by,
    reap_adopted,
)
from gpuwarden.supervisor.files import Notice, ProcessFile, SupervisedFileError
from gpuwarden.supervisor.output import Output, Steps
from gpuwarden.supervisor.policy import Policy, Restarts
from gpuwarden.supervisor.runtime_dir import runtime_dir

TICK_S: Final = 2.0
"""Longest wait: a dry run shows its notice by then, seconds."""
BEAT_S: Final = 10.0
LEFT_GRACE_S: Final = 5.0
"""Time for processes that the command left, between SIGTERM and SIGKILL, seconds."""

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPS: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the command is ended; seconds. `None` and 0: unlimited."""

    budget_s: float
    stall_timeout_s: float
    health_window_s: float | None


def command(argv: list[str]) -> int:
    """Run a command. Returns its exit code, or the condition for which gpuwarden ended it (A18)."""
    parser = _parser()
    if argv and "--" not in argv and not {"-h", "--help"} & set(argv):
        parser.error("put -- before the command: gpuwarden run [options] -- python train.py")
    at = argv.index("--") if "--" in argv else len(argv)
    arguments, cmd = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not cmd:
        parser.error("missing the command after --")
    steps = None
    if arguments.steps_from is not None:
        steps = Steps(pattern=arguments.steps_from, total=arguments.steps_total)
    elif arguments.steps_total is not None:
        parser.error("--steps-total needs --steps-from")
    url = None if arguments.notify is None else _url(arguments.notify)
    name = arguments.name or default_name(cmd)
    directory = runtime_dir(arguments.runtime_dir, say=say)
    reporter = Reporter(directory, worker=name, queue=RUN_QUEUE, heartbeat_s=0)
    limits = Limits(
        budget_s=arguments.budget_s,
        stall_timeout_s=arguments.stall_timeout_s,
        health_window_s=arguments.health_window_s,
    )
    with reporter:
        _end_earlier(reporter.folder, name)
        run = Run(cmd, reporter, limits, name=name, policy=Policy(arguments.restart), steps=steps)
        run.announce()
        try:
            code, failure = run.until_done()
        except CommandError as error:
            say(str(error))
            code, failure = error.exit_code, str(error)
        files.remove_process(reporter.folder, name)
    if url is not None and failure is not None:
        _notify(url, name, cmd, failure)
    return code


def _address(given: str) -> str:
    from gpuwarden.notify.address import from_argument  # noqa: PLC0415 - as in _url

    return from_argument(given)


def _url(address: str) -> str:
    from gpuwarden.notify.person import url_of  # noqa: PLC0415 - a run without --notify needs less memory

    return url_of(address)


def _notify(url: str, name: str, cmd: Sequence[str], failure: str) -> None:
    """Notify a person that the command failed."""
    from gpuwarden.notify.person import send  # noqa: PLC0415 - as in _url

    body = f"Command {shlex.join(cmd)[:500]}, worker {name} of {socket.gethostname()}, was not started again.\n"
    error = send(url, f"[gpuwarden] {name} failed", f"{body}Reason: {failure}\nNext: read its output")
    say("notification sent" if error is None else f"notification not sent: {error}")


class Run:
    """A command, its supervision and its restarts."""

    def __init__(
        self,
        cmd: Sequence[str],
        reporter: Reporter,
        limits: Limits,
        *,
        name: str,
        policy: Policy,
        steps: Steps | None,
    ) -> None:
        self._cmd = cmd
        self._reporter = reporter
        self._directory = reporter.folder.parent
        self._limits = limits
        self._name = name
        self._restarts = Restarts(policy)
        self._steps = steps
        self._job_id = int(time.time() * 1000)
        self._signals: list[int] = []
        self._by_person = False
        self._shown: Notice | None = None
        self._terminal = _terminal()
        self._selector = selectors.DefaultSelector()
        self._output: Output | None = None
        self._kill_at_s: float | None = None

    def announce(self) -> None:
        """Say what ends the command, and who watches it."""
        say(f"worker {self._name}, state files in {self._reporter.folder}")
        limits = self._limits
        if limits.budget_s:
            say(f"it is ended when it has run for {format_duration(limits.budget_s)}")
        steps = "its output has steps" if self._steps else "its Reporter() reports steps"
        ends = [f"{steps} and then none for {format_duration(limits.stall_timeout_s)}"]
        if limits.health_window_s:
            ends.append(f"its GPU idles for {format_duration(limits.health_window_s)}")
        say(f"after its first use of a GPU it is ended when {', or '.join(ends)}")
        if not limits.health_window_s:
            say("without steps, an idle GPU raises an alert only: --health-window-s 600 ends it too")
        executor = files.read_executor(self._directory)
        if executor is None:
            say("no executor runs on this host, so only the run time is checked: start `gpuwarden up`")
        elif not executor.armed:
            say("dry run: a hang is recorded and nothing is ended; `gpuwarden arm` changes this")

    def until_done(self) -> tuple[int, str | None]:
        """Run the command until it ends and is not started again.

        Returns the exit code, and how it failed unless a person ended it.
        """
        become_subreaper()
        wakeup, sender = socket.socketpair()
        for each in (wakeup, sender):
            each.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH):
            signal.signal(number, self._on_signal)
        self._selector.register(wakeup, selectors.EVENT_READ)
        attempt = 1
        while True:
            started_s = time.monotonic()
            end, condition = self._run_once(attempt)
            code = condition.exit_code if condition else end.exit_code
            delay_s = self._restarts.delay_s(
                exit_code=end.exit_code,
                condition=condition,
                by_person=self._by_person,
                ran_s=time.monotonic() - started_s,
            )
            what = str(end) if condition is None else f"ended by gpuwarden: {condition}"
            if delay_s is None:
                failed = condition is not None or bool(end.exit_code)
                if failed:
                    say(f"{what}; not started again")
                return code, what if failed and not self._by_person else None
            say(f"{what}; started again in {delay_s:g} s")
            if not self._wait(delay_s):
                return code, None
            attempt += 1

    def _run_once(self, attempt: int) -> tuple[End, Condition | None]:
        environment = {name: value for name, value in os.environ.items() if name != JOB_FILE}
        if self._steps is None:
            environment[JOB_FILE] = str(self._reporter.folder / f"{self._name}.job.json")
        else:
            environment.setdefault("PYTHONUNBUFFERED", "1")
            self._output = Output(self._steps, on_step=self._step, on_full=_full)
        limits, self._kill_at_s = self._limits, None
        self._reporter.start_job(
            job_id=self._job_id,
            attempt=attempt,
            job_class=JobClass.GPU,
            model=None,
            budget_s=limits.budget_s,
            stall_timeout_s=limits.stall_timeout_s,
            steps_total=None if self._steps is None else self._steps.total,
            health_window_s=limits.health_window_s,
            health_acts=limits.health_window_s is not None,
            after_gpu_use=True,
        )
        given = self._output.given if self._output else (None, None)
        child = Child(
            self._cmd,
            environment,
            terminal=self._terminal,
            stdout=given[0],
            stderr=given[1],
            on_start=partial(self._publish, log_file=files.own_log_file()),
        )
        if self._output is not None:
            self._output.started()
            self._output.resize()
        try:
            end = self._supervise(child)
        finally:
            self._take_terminal()
        self._show_notice(child.id)  # it may have come while the command ended
        notice = self._notice(child.id)
        condition = Condition.BUDGET if self._kill_at_s is not None else None
        if notice is not None and notice.acts:
            condition = Condition(notice.condition)
        self._reporter.end_job()
        if self._output is not None:
            self._listen({})
            self._output.drain()
            self._output.clear()
        if left := end_descendants(grace_s=LEFT_GRACE_S):
            self._say(f"processes {left} of the command cannot be ended")
        return end, condition

    def _supervise(self, child: Child) -> End:
        next_beat_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self._reporter.beat()
                next_beat_s = now_s + BEAT_S
            for number in self._taken_signals():
                self._handle(number, child)
            reap_adopted({child.id.pid})
            found = child.wait()
            if isinstance(found, End):
                if self._terminal is not None and found.signal == signal.SIGINT:
                    self._by_person = True  # Ctrl-C reached the command and not this process
                return found
            if found in _STOPS and self._terminal is not None:
                self._suspend(child)
            elif found == signal.SIGCONT:
                self._reporter.show_job()
            elif found is not None:
                self._reporter.hide_job()
                self._say(f"the command is stopped by {signal.Signals(found).name}: it is not judged until SIGCONT")
            self._show_notice(child.id)
            self._check_budget(child)
            self._listen(self._output.awaited() if self._output else {})
            self._await(TICK_S)

    def _listen(self, events: Mapping[int, int]) -> None:
        """Wait for these events, and for signals."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, socket.socket) and events.get(key.fd) != key.events:
                self._selector.unregister(key.fd)
        for descriptor in events.keys() - self._selector.get_map().keys():
            self._selector.register(descriptor, events[descriptor])

    def _await(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.fileobj, socket.socket):
                with suppress(BlockingIOError):
                    key.fileobj.recv(4096)
            elif self._output is not None and key.events == selectors.EVENT_READ:
                self._output.read(key.fd)

    def _wait(self, for_s: float) -> bool:
        """Wait before a restart. Returns whether no person ended the run."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._await(left_s)
            if any(number in _FORWARDED for number in self._taken_signals()):
                return False
        return True

    def _handle(self, number: int, child: Child) -> None:
        if number in _FORWARDED:
            # The second one means it.
            child.signal(signal.SIGKILL if self._by_person else number)
            self._by_person = True
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            child.signal(number)
        elif number == signal.SIGWINCH and self._output is not None:
            self._output.resize()

    def _suspend(self, child: Child) -> None:
        """Stop with the command, as Ctrl-Z wants it, and go on with it. A suspended command is not judged."""
        self._take_terminal()
        self._reporter.hide_job()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._reporter.show_job()
        if self._terminal is not None and os.tcgetpgrp(self._terminal) == os.getpgrp():
            os.tcsetpgrp(self._terminal, child.id.pid)
        child.signal(signal.SIGCONT)

    def _take_terminal(self) -> None:
        if self._terminal is None:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(OSError):
            os.tcsetpgrp(self._terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, before)

    def _publish(self, process: ProcessId, *, log_file: str | None) -> None:
        """Write the process file, in the new process: the next run finds what this one left when killed."""
        value = ProcessFile(
            process=process,
            supervisor=ProcessId.of(os.getppid()),
            restarts=self._restarts.after_hang,
            log_file=log_file,
        )
        try:
            files.write(self._reporter.folder, self._name, value)
        except OSError as error:
            self._say(f"cannot write {self._name}{files.PROCESS_SUFFIX} ({error}): gpuwarden cannot end this command")

    def _notice(self, process: ProcessId) -> Notice | None:
        with suppress(SupervisedFileError):
            found = files.read_notice(self._reporter.folder, self._name)
            if found is not None and found.process == process and found.condition in list(Condition):
                return found
        return None

    def _show_notice(self, process: ProcessId) -> None:
        notice = self._notice(process)
        if notice is None or notice == self._shown:
            return
        self._shown = notice
        if notice.acts:
            self._say(f"gpuwarden ends the command: {notice.condition}: {notice.message}")
        else:
            self._say(
                f"dry run: gpuwarden would end the command: {notice.condition}: {notice.message}; see `gpuwarden arm`"
            )

    def _check_budget(self, child: Child) -> None:
        """Without an executor, end the command at its time budget."""
        now_s, budget_s = time.monotonic(), self._limits.budget_s
        if self._kill_at_s is not None:
            if now_s >= self._kill_at_s:
                child.signal(signal.SIGKILL)
        elif budget_s and now_s - child.started_s >= budget_s and files.read_executor(self._directory) is None:
            self._say(f"over its time budget of {format_duration(budget_s)}: ended")
            self._kill_at_s = now_s + LEFT_GRACE_S
            child.signal(signal.SIGTERM)

    def _say(self, text: str) -> None:
        if self._output is not None:
            self._output.clear()
        say(text)

    def _step(self) -> None:
        if self._output is not None and self._output.steps == 1:
            self._reporter.ready()
        self._reporter.step()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _taken_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken


def _end_earlier(folder: Path, name: str) -> None:
    """End what a killed run of this name left. Its command died with it, and no process takes the id of its group."""
    with suppress(SupervisedFileError, OSError):
        earlier = files.read_process(folder, name)
        if earlier is None or folder.stat().st_uid != os.geteuid() or earlier.supervisor.runs():
            return
        if not left_by(earlier.supervisor, earlier.process):
            return
        say("an earlier run of this name was killed: its processes are ended")
        if left := end_all(lambda: left_by(earlier.supervisor, earlier.process), grace_s=LEFT_GRACE_S):
            say(f"processes {left} cannot be ended")


def say(text: str) -> None:
    """Print one line to standard error."""
    with suppress(OSError):
        show(f"gpuwarden run: {text}", file=sys.stderr, flush=True)


def default_name(cmd: Sequence[str]) -> str:
    """A worker's name for a command: its script, else its program.

    >>> default_name(["python", "-u", "jobs/train.py", "--lr", "3"])
    'train'
    """
    return _NAME.sub("-", Path(command_name(cmd)).stem).strip("-_.")[:63] or "command"


def _full(reason: str) -> None:
    say(f"the command's output cannot be written ({reason}); it goes on without")


def _terminal() -> int | None:
    """The terminal of standard input, if this process has its foreground."""
    with suppress(OSError):
        if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
            return 0
    return None


def _seconds(given: str) -> float:
    try:
        if (value := float(given)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"invalid time {given!r}: expected seconds above 0")


def _budget_s(given: str) -> float:
    return 0.0 if given == "0" else _seconds(given)


def _count(given: str) -> int:
    if given.isdecimal() and int(given) > 0:
        return int(given)
    raise argparse.ArgumentTypeError(f"invalid number {given!r}: expected a whole number above 0")


def _window_s(given: str) -> float:
    if (value := _seconds(given)) >= MIN_TIMEOUT_S:
        return value
    raise argparse.ArgumentTypeError(f"invalid time {given!r}: expected {MIN_TIMEOUT_S:g} seconds or more")


def _pattern(given: str) -> re.Pattern[bytes]:
    try:
        return re.compile(given.encode())
    except re.error as error:
        raise argparse.ArgumentTypeError(f"invalid regular expression {given!r}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden run",
        usage="gpuwarden run [options] -- CMD...",
        description="Run a command on this host and guard it: gpuwarden ends it when it hangs, and starts it again.",
        formatter_class=Help,
        epilog="Exit codes: the command's own, or 128 and the number of its signal. If gpuwarden ended it and does not "
        "start it again: 75 over its time budget, 76 stalled, 78 unhealthy. 126 not executable; 127 not found. What a "
        "person ends (Ctrl-C, SIGTERM) is not started again.",
    )
    parser.add_argument("--name", help="name of this worker, unique on the host (default: the script's)")
    parser.add_argument(
        "--budget-s", type=_budget_s, default=0.0, help="longest run time of one start, seconds; 0 is none"
    )
    parser.add_argument("--stall-timeout-s", type=_seconds, default=STALL_TIMEOUT_S,
                        help="time without a step and other activity, after the first step, seconds")  # fmt: skip
    parser.add_argument("--health-window-s", type=_window_s,
                        help="end it too if its GPU and all else idle for this long without a step (default: an alert "
                             "only)")  # fmt: skip
    parser.add_argument("--restart", choices=list(Policy), default=Policy.ON_HANG,
                        help="when to start it again; after a hang at most three times")  # fmt: skip
    parser.add_argument("--steps-from", type=_pattern, metavar="REGEX", help="each output line with a match is a step")
    parser.add_argument("--steps-total", type=_count, metavar="N",
                        help="planned steps, for a progress bar at a terminal; with --steps-from")  # fmt: skip
    parser.add_argument("--notify", type=_address, metavar="ADDRESS",
                        help="mail address (needs $GPUWARDEN_MAIL_SERVER) or Apprise URL, notified when the command "
                             "has failed and is not started again")  # fmt: skip
    parser.add_argument("--runtime-dir", type=Path, help="folder of state files (default: $GPUWARDEN_RUNTIME_DIR, else "
                        "that of the running `gpuwarden up`)")  # fmt: skip
    return parser
