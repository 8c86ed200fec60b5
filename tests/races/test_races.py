"""Whatever hosts, workers, alerts, clocks and crashes do, in whatever order, the ledger's invariants hold.

`tools.mutation` plants bugs, and this machine must find each by the rule that the bug breaks.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from testbed.postgres import Postgres
from tests.races import databases
from tests.races.databases import Databases
from tests.races.judge import totals
from tests.races.machine import Races

STEPS = 30
LOGGERS = tuple(
    f"executor.{each}"
    for each in ("clock", "executor", "housekeeping", "perform", "process_episode", "stages", "waits")
)
"""The modules of the remediator that log in a history."""


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Databases]:
    with databases.sqlite() as found:
        yield found


@pytest.fixture(scope="module")
def postgresql(postgres: Postgres) -> Iterator[Databases]:
    for name in ("races_ledger", "races_queue"):
        postgres.create(name)
    with databases.postgresql(postgres.url("races_ledger"), postgres.url("races_queue")) as found:
        yield found
    for name in ("races_ledger", "races_queue"):
        postgres.drop(name)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of steps are told to nobody."""
    for module in LOGGERS:
        monkeypatch.setattr(f"remediator.{module}.log", Silent())


class Silent:
    def __getattr__(self, _: str) -> object:
        return lambda *_, **__: None


def run(machine: type[Races], *, examples: int) -> None:
    """The same examples each time; nothing is shrunk, for a shorter history is sought by hand once it is needed."""
    how = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        phases=(Phase.generate,),
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal,
    )
    run_state_machine_as_test(machine, settings=how)


def machine_on(found: Databases, *, ends: bool = True) -> type[Races]:
    return type("On", (Races,), {"databases": found, "seen": [], "ends": ends})


WANTED = ("claim", "completed", "fence", "stop", "start", "trip queued", "trip failed", "given away", "refused",
          "quarantine", "trouble")  # fmt: skip


def test_the_invariants_hold_in_a_few_histories(sqlite: Databases) -> None:
    machine = machine_on(sqlite)

    run(machine, examples=10)

    happened = totals(machine.seen)
    assert [what for what in ("claim", "fence", "stop", "start") if not happened.get(what)] == []


@pytest.mark.nightly
def test_the_invariants_hold_whatever_happens_in_whatever_order(sqlite: Databases) -> None:
    machine = machine_on(sqlite)

    run(machine, examples=100)

    happened = totals(machine.seen)
    assert [what for what in WANTED if not happened.get(what)] == []


@pytest.mark.needs_postgres
@pytest.mark.nightly
def test_they_hold_on_postgresql_too(postgresql: Databases) -> None:
    machine = machine_on(postgresql)

    run(machine, examples=15)

    happened = totals(machine.seen)
    assert [what for what in ("fence", "stop", "start", "trip queued", "trouble") if not happened.get(what)] == []
