"""The invariants of the ledger hold in any order of events of hosts, workers, alerts, clocks and crashes.

`tools.mutation` plants bugs, and this state machine must find each by the rule that the bug breaks.
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
"""The modules of the remediator that log during a history."""


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Databases]:
    with databases.sqlite() as found:
        yield found


@pytest.fixture(scope="module")
def postgresql(postgres: Postgres) -> Iterator[Databases]:
    with databases.postgresql(postgres) as found:
        yield found


@pytest.fixture(autouse=True)
def disable_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the logs of thousands of steps."""
    for module in LOGGERS:
        monkeypatch.setattr(f"remediator.{module}.log", Silent())


class Silent:
    def __getattr__(self, _: str) -> object:
        return lambda *_, **__: None


def run(machine: type[Races], *, examples: int) -> None:
    """Run the same examples each time, without shrinking."""
    options = settings(
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
    run_state_machine_as_test(machine, settings=options)


def machine_on(found: Databases, *, ends: bool = True) -> type[Races]:
    return type("On", (Races,), {"databases": found, "seen": [], "ends": ends})


EXPECTED = ("claim", "completed", "fence", "stop", "start", "settle queued", "settle failed", "reclaim", "refused",
          "quarantine", "trouble")  # fmt: skip


def test_invariants_hold_in_a_few_histories(sqlite: Databases) -> None:
    machine = machine_on(sqlite)

    run(machine, examples=10)

    counts = totals(machine.seen)
    assert [what for what in ("claim", "fence", "stop", "start") if not counts.get(what)] == []


@pytest.mark.nightly
def test_invariants_hold_in_many_histories(sqlite: Databases) -> None:
    machine = machine_on(sqlite)

    run(machine, examples=100)

    counts = totals(machine.seen)
    assert [what for what in EXPECTED if not counts.get(what)] == []


@pytest.mark.needs_postgres
@pytest.mark.nightly
def test_invariants_hold_on_postgresql(postgresql: Databases) -> None:
    machine = machine_on(postgresql)

    run(machine, examples=15)

    counts = totals(machine.seen)
    assert [what for what in ("fence", "stop", "start", "settle queued", "trouble") if not counts.get(what)] == []
