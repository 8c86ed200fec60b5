"""Whatever becomes of notifications on their way, what a door accepts is kept whole, taken up once, and acted on once.

The machine of `test_races`, with its alerts through the real application of each remediator.
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
from tests.races.notifications import TOKEN, Notifications
from tests.races.test_races import LOGGERS, Silent, run

WANTED = ("accepted", "503", "door killed", "refused at the door", "asked for", "tied", "fence", "stop", "start",
          "trip queued", "trouble")  # fmt: skip


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Databases]:
    with databases.sqlite() as found:
        yield found


@pytest.fixture(scope="module")
def postgresql(postgres: Postgres) -> Iterator[Databases]:
    for name in ("notified_ledger", "notified_queue"):
        postgres.create(name)
    with databases.postgresql(postgres.url("notified_ledger"), postgres.url("notified_queue")) as found:
        yield found
    for name in ("notified_ledger", "notified_queue"):
        postgres.drop(name)


@pytest.fixture(scope="module")
def web_config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("door") / "web.yml"
    file.write_text("bearer_token_file: token\n")
    file.with_name("token").write_text(TOKEN)
    return file


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of steps are told to nobody."""
    for module in (*LOGGERS, "webhook.app", "webhook.intake", "webhook.reconcile"):
        monkeypatch.setattr(f"remediator.{module}.log", Silent())


def machine_on(
    found: Databases, web_config_file: Path, *, ends: bool = True, alone: bool = False
) -> type[Notifications]:
    its = {"databases": found, "seen": [], "ends": ends, "alone": alone, "web_config_file": web_config_file}
    return type("On", (Notifications,), its)


def test_what_a_door_accepts_is_acted_on_once_in_a_few_histories(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file)

    run(machine, examples=3)

    happened = totals(machine.seen)
    assert [what for what in ("accepted", "fence", "stop") if not happened.get(what)] == []


@pytest.mark.nightly
def test_accepted_alerts_are_acted_on_once_whatever_happens(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file)

    run(machine, examples=15)

    happened = totals(machine.seen)
    assert [what for what in WANTED if not happened.get(what)] == []


@pytest.mark.nightly
def test_the_same_of_one_host_with_a_ledger_of_its_own(sqlite: Databases, web_config_file: Path) -> None:
    machine = machine_on(sqlite, web_config_file, alone=True)

    run(machine, examples=8)

    happened = totals(machine.seen)
    assert [what for what in WANTED if not happened.get(what)] == []


@pytest.mark.needs_postgres
@pytest.mark.nightly
def test_the_same_of_two_hosts_on_one_postgresql(postgresql: Databases, web_config_file: Path) -> None:
    machine = machine_on(postgresql, web_config_file)

    run(machine, examples=5)

    happened = totals(machine.seen)
    assert [what for what in ("accepted", "tied", "stop", "start") if not happened.get(what)] == []


def test_a_failed_start_is_restored(sqlite: Databases, web_config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = in_place()
    machine = machine_on(sqlite, web_config_file, ends=False)
    begun = machine()
    assert not any(now is was for now, was in zip(in_place(), before, strict=True)), "the control"
    begun.teardown()
    monkeypatch.setattr(machine, "_door", lambda *_: pytest.fail("played: no door can be made"))

    with pytest.raises(pytest.fail.Exception, match="played"):
        machine()

    assert in_place() == before


def in_place() -> list[object]:
    its = [vars(app)["time"], vars(clock)["time"], reconcile._ask]
    return [*its, DatabaseClock.now]
