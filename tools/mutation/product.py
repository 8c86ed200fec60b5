"""Bugs of queue, executor and webhook, each judged by its state machine."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.queue import claims, outbox, runs, sql, sweeps
from gpuwarden.queue.claiming import one_trip
from tests.gpuwarden.queue import test_queue_machine
from tests.races import databases, test_notifications, test_races
from tests.races.judge import BrokenError
from tests.races.notifications import web_config_in
from tools.mutation import notification_bugs, queue_bugs, race_bugs


def queue() -> Iterator[tuple[str, bool]]:
    """Each bug of the queue, and whether its machine finds it."""
    with databases.sqlite() as found:
        for name, plant in queue_bugs.MUTANTS.items():
            with _plant(plant):
                try:
                    test_queue_machine.run(found, rounds=test_queue_machine.ROUNDS)
                except (AssertionError, DatabaseError):
                    yield name, True
                else:
                    yield name, False


def races() -> Iterator[tuple[str, bool]]:
    """Each bug of queue and executor, and whether the races find it by the right rule."""
    with databases.sqlite() as found:
        for name, bug in race_bugs.MUTANTS.items():
            yield name, _breaks(bug, lambda ends: test_races.run(test_races.machine_on(found, ends=ends), examples=200))


def notifications() -> Iterator[tuple[str, bool]]:
    """Each bug of the webhook, and whether its machine finds it by the right rule."""
    with databases.sqlite() as found, tempfile.TemporaryDirectory() as folder:
        web_config_file = web_config_in(Path(folder))

        def played(ends: bool) -> None:
            test_races.run(test_notifications.machine_on(found, web_config_file, ends=ends), examples=60)

        for name, bug in notification_bugs.MUTANTS.items():
            yield name, _breaks(bug, played)


MACHINES: Final[Mapping[str, Callable[[], Iterator[tuple[str, bool]]]]] = {
    "queue": queue,
    "races": races,
    "notifications": notifications,
}


def _breaks(bug: race_bugs.Mutant, play: Callable[[bool], None]) -> bool:
    with _plant(bug.plant):
        try:
            play(bug.ends)
        except BrokenError as error:
            return error.rule in bug.rules
    return False


@contextlib.contextmanager
def _plant(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    """Plant one bug, with logs and hypothesis output disabled."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name in (*test_races.LOGGERS, "webhook.app", "webhook.intake", "webhook.reconcile"):
            patch.setattr(f"remediator.{name}.log", test_races.Silent())
        for module in (claims, one_trip, outbox, runs, sql, sweeps):  # cached statements have no bug
            for kept in vars(module).values():
                if isinstance(kept, sql.Prepared):
                    patch.setattr(kept, "statements", {})
        plant(patch)
        yield
