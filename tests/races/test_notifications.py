"""The webhook stores an accepted call as a whole, and its alerts are acted on once in spite of any network fault.

The state machine of `test_races`, with alerts through the real webhook application of each remediator.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.db.clock import DatabaseClock
from remediator.executor import clock
from remediator.webhook import app, reconcile
from testbed.postgres import Postgres
from tests.races import databases
from tests.races.databases import Databases
from tests.races.judge import totals
from tests.races.notifications import Notifications, web_config_in
from tests.races.test_races import LOGGERS, Silent, run

EXPECTED = ("accepted", "503", "webhook killed", "refused by webhook", "reconciled", "linked", "fence", "stop", "start",
          "settle queued", "trouble")  # fmt: skip


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Databases]:
    with databases.sqlite() as found:
        yield found


@pytest.fixture(scope="module")
def postgresql(postgres: Postgres) -> Iterator[Databases]:
    with databases.postgresql(postgres) as found:
        yield found


@pytest.fixture(scope="module")
def web_config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return web_config_in(tmp_path_factory.mktemp("door"))


@pytest.fixture(autouse=True)
def disable_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the logs of thousands of steps."""
    for module in (*LOGGERS, "webhook.app", "webhook.intake", "webhook.reconcile"):
        monkeypatch.setattr(f"remediator.{module}.log", Silent())


def machine_on(
    found: Databases, web_config_file: Path, *, ends: bool = True, alone: bool = False
) -> type[Notifications]:
    attributes = {"databases": found, "seen": [], "ends": ends, "alone": alone, "web_config_file": web_config_file}
    return type("On", (Notifications,), attributes)


def test_accepted_alerts_are_acted_on_once_in_a_few_histories(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file)

    run(machine, examples=3)

    counts = totals(machine.seen)
    assert [what for what in ("accepted", "fence", "stop") if not counts.get(what)] == []


@pytest.mark.nightly
def test_accepted_alerts_are_acted_on_once_in_many_histories(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file)

    run(machine, examples=15)

    counts = totals(machine.seen)
    assert [what for what in EXPECTED if not counts.get(what)] == []


@pytest.mark.nightly
def test_accepted_alerts_are_acted_on_once_with_a_separate_ledger(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file, alone=True)

    run(machine, examples=8)

    counts = totals(machine.seen)
    assert [what for what in EXPECTED if not counts.get(what)] == []


@pytest.mark.needs_postgres
@pytest.mark.nightly
def test_accepted_alerts_are_acted_on_once_on_postgresql(postgresql: Databases, web_config_file: Path) -> None:
    machine = machine_on(postgresql, web_config_file)

    run(machine, examples=5)

    counts = totals(machine.seen)
    assert [what for what in ("accepted", "linked", "stop", "start") if not counts.get(what)] == []


def test_failed_start_undoes_its_patches(
    sqlite: Databases, web_config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_patched()
    machine = machine_on(sqlite, web_config_file, ends=False)
    started = machine()
    assert not any(now is earlier for now, earlier in zip(read_patched(), before, strict=True)), "the control"
    started.teardown()
    monkeypatch.setattr(machine, "_make_webhook", lambda *_: pytest.fail("played: no webhook can be made"))

    with pytest.raises(pytest.fail.Exception, match="played"):
        machine()

    assert read_patched() == before


def read_patched() -> list[object]:
    attributes = [vars(app)["time"], vars(clock)["time"], reconcile._ask]
    return [*attributes, DatabaseClock.now]
