"""`gpuwarden worker run --processes N`: N worker processes, each started again when it ends."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from gpuwarden import procfs
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor import files
from gpuwarden.supervisor.child import Child, End, reap_adopted
from gpuwarden.supervisor.files import ProcessFile
from gpuwarden.supervisor.log_lines import Log
from gpuwarden.supervisor.policy import Policy, Restarts

TICK_S: Final = 1.0
DRAINED: Final = 0
"""A worker that ends with this code was drained, or reached --jobs-max: it is not started again."""
KILL_WAIT_S: Final = 5.0


@dataclass
class _Slot:
    name: str
    argv: Sequence[str]
    environment: dict[str, str]
    folder: Path
    restarts: Restarts = field(default_factory=lambda: Restarts(Policy.ALWAYS))
    child: Child | None = None
    due_s: float | None = 0.0


class Pool:
    """Worker processes with names of their own.

    Args:
        argv: arguments of `gpuwarden worker run` without `--name`.
        names: a worker each.
        directory: `$GPUWARDEN_RUNTIME_DIR`.
        subdirectory: their shared folder; by default each has one of its name.
        gpus: the GPU of each worker, if given.
        log_level: the lowest level of log lines.
    """

    def __init__(
        self,
        argv: Sequence[str],
        names: Sequence[str],
        directory: Path,
        *,
        subdirectory: str | None = None,
        gpus: Sequence[str] = (),
        log_level: str = "info",
    ) -> None:
        self._log = Log(log_level)
        self._stopping = 0
        self._slots = [
            _Slot(
                name=name,
                argv=[sys.executable, "-P", "-m", "gpuwarden", "worker", "run", *argv, "--name", name]
                + (["--gpus", gpus[number]] if gpus else []),
                environment={**os.environ, **(visible(gpus[number]) if gpus else {})},
                folder=directory / (subdirectory or name),
            )
            for number, name in enumerate(names)
        ]

    def run(self) -> int:
        """Run until a signal, or until every worker was drained."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while any(slot.child is not None or slot.due_s is not None for slot in self._slots):
            now_s = time.monotonic()
            for slot in self._slots:
                self._tick(slot, now_s)
            signal.sigtimedwait({signal.SIGCHLD}, TICK_S)
        return 0

    def _tick(self, slot: _Slot, now_s: float) -> None:
        child = slot.child
        if child is None:
            if slot.due_s is not None and now_s >= slot.due_s and not self._stopping:
                self._start(slot)
            elif self._stopping:
                slot.due_s = None
            return
        reap_adopted({each.child.id.pid for each in self._slots if each.child is not None})
        end = child.wait()
        if not isinstance(end, End):
            return
        slot.child = None
        for process in procfs.family(child.id):  # children that still run
            with suppress(OSError):
                procfs.signal_process(process, signal.SIGKILL)
        delay_s = slot.restarts.delay_s(
            exit_code=end.exit_code, condition=None, by_person=bool(self._stopping), ran_s=now_s - child.started_s
        )
        notice = None
        with suppress(files.SupervisedFileError):
            notice = files.read_notice(slot.folder, slot.name)
        why = f", by gpuwarden: {notice.condition}" if notice and notice.acts and notice.process == child.id else ""
        is_drained = end == End(code=DRAINED, signal=None) and not why
        if is_drained or delay_s is None:
            slot.due_s = None
            self._log.info("worker ended", worker=slot.name, reason=f"{end}{why}")
        else:
            slot.due_s = now_s + delay_s
            self._log.warning("worker ended; started again", worker=slot.name, reason=f"{end}{why}", after_s=delay_s)

    def _start(self, slot: _Slot) -> None:
        slot.due_s = None
        slot.child = Child(slot.argv, slot.environment)
        own = ProcessId.of(os.getpid())
        try:
            slot.folder.mkdir(parents=True, exist_ok=True)
            files.write(
                slot.folder,
                slot.name,
                ProcessFile(process=slot.child.id, supervisor=own, restarts=True, log_file=files.own_log_file()),
            )
        except OSError as error:
            self._log.warning("gpuwarden cannot see the supervisor", worker=slot.name, reason=str(error))

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stopping += 1
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM  # with commands they differ
        for slot in self._slots:
            if slot.child is not None:
                slot.child.signal(sent if self._stopping == 1 else signal.SIGKILL)


def become_pool(**options: Any) -> NoReturn:
    """Replace this process by a pool's, which holds neither memory nor GPUs of the handler's module.

    Args:
        options: the arguments of `Pool` as JSON has them.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", __name__, json.dumps(options)])  # noqa: S606


def _main(options: str) -> int:
    given = json.loads(options)
    return Pool(given.pop("argv"), given.pop("names"), Path(given.pop("directory")), **given).run()


def visible(gpu: str) -> dict[str, str]:
    """Variables that show a process one GPU only, for CUDA, HIP and Level Zero."""
    return dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), gpu)


def names(name: str, count: int) -> list[str]:
    """The names of the workers: one keeps `name`."""
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
