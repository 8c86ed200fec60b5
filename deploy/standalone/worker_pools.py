"""Workers that `gpuwarden up` runs: `--worker MODULE:N` is `gpuwarden worker run MODULE --processes N`."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpuwarden.db import running_up
from gpuwarden.supervisor import files
from gpuwarden.supervisor.pool import names

COUNT_MAX: Final = 256
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """N workers of a handler. `gpus` has one for each, or none."""

    handler: str
    count: int
    gpus: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its workers: the module's."""
        module = self.handler.partition(":")[0].rpartition(".")[2]
        return _NAME.sub("-", module).strip("-")[:50] or "worker"

    @property
    def part(self) -> str:
        """Its name among the parts of `up`, and of its log."""
        return f"workers-{self.name}"

    @property
    def arguments(self) -> list[str]:
        """Its arguments for `gpuwarden`."""
        its = ["worker", "run", self.handler, "--processes", str(self.count), "--name", self.name]
        return [*its, "--gpus", ",".join(self.gpus)] if self.gpus else its

    def environment(self, *, queue_url: str, directory: Path) -> dict[str, str]:
        """Its environment: this user's, with the queue and the state files of this `up`."""
        return {**os.environ, running_up.QUEUE_ENV: queue_url, running_up.RUNTIME_DIR_ENV: str(directory)}

    def is_started(self, directory: Path, pid: int) -> bool:
        """Whether its first worker runs."""
        first = names(self.name, self.count)[0]
        try:
            found = files.read_process(directory / first, first)
        except files.SupervisedFileError:
            return False
        return found is not None and found.supervisor.pid == pid


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the options `--worker` and `--gpus`."""
    parser.add_argument(
        "--worker",
        type=parse,
        action="append",
        default=[],
        metavar="MODULE:N",
        help="also run N workers of this handler, from the current folder, until `up` stops; repeatable (see "
        "`gpuwarden worker run --help`)",
    )
    parser.add_argument(
        "--gpus",
        default="",
        metavar="GPU,...",
        help="the GPU of each worker of --worker: UUIDs or indexes (default: every worker sees all)",
    )


def parse(given: str) -> WorkerPool:
    """Parse `MODULE:N` or `MODULE:FUNCTION:N`; without N it is one worker."""
    handler, colon, count = given.rpartition(":")
    if not colon or not count.isdecimal():
        handler, count = given, "1"
    if not handler or not 1 <= int(count) <= COUNT_MAX:
        raise argparse.ArgumentTypeError(f"invalid workers {given!r}: write MODULE:N, with N from 1 to {COUNT_MAX}")
    return WorkerPool(handler=handler, count=int(count))


def with_gpus(pools: Sequence[WorkerPool], given: str) -> tuple[WorkerPool, ...]:
    """Give each worker its GPU, in the order of the options.

    Raises:
        ValueError: two pools have one name, or the numbers of GPUs and workers differ.
    """
    if len({pool.name for pool in pools}) < len(pools):
        raise ValueError("--worker names one module twice: name it once, with all its workers")
    gpus = [each.strip() for each in given.split(",") if each.strip()]
    total = sum(pool.count for pool in pools)
    if gpus and len(gpus) != total:
        raise ValueError(f"--gpus names {len(gpus)} GPUs for {total} workers of --worker: name one for each")
    found = []
    for pool in pools:
        found.append(replace(pool, gpus=tuple(gpus[: pool.count])))
        gpus = gpus[pool.count :]
    return tuple(found)
