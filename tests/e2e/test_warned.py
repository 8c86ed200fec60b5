"""A worker in a real container is warned before its stop: what it can save then is saved before anything is taken."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from tests.e2e.wedges import SCRIPT, Room, Wedge, room, wedge

pytestmark = [pytest.mark.needs_docker, pytest.mark.slow]

GRACE_S: Final = 3.0
SAVES: Final = replace(SCRIPT, saves=True, wedge_with_gil=False)
"""Stuck in a native call that lets Python's lock go: another of its threads can still save."""

CANNOT_SAVE: Final = replace(SCRIPT, saves=True, wedge_with_gil=True)
WORKERS: Final = {
    "saves": "gpuwarden-warned-saves", "cannot": "gpuwarden-warned-cannot", "killed": "gpuwarden-warned-killed",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(work: Path, engine: Engine) -> Iterator[Room]:
    with room(work, engine, list(WORKERS.values())) as found:
        (work / "policy.toml").write_text(
            f'[restart_worker]\nwarn_signal = "SIGUSR1"\nwarn_grace_s = {GRACE_S}\n', encoding="ascii"
        )
        yield found


@pytest.fixture
def checkpoint(shared: Room) -> Iterator[Path]:
    path = shared.work / "data" / f"{SCRIPT.picture}.checkpoint.pgm"
    yield path
    path.unlink(missing_ok=True)


def options(shared: Room) -> tuple[str, ...]:
    return ("--policy", str(shared.work / "policy.toml"))


def grace_s(patient: Wedge) -> float:
    """How long after its warning its job was fenced."""
    found = patient.ledger.reports.get(1)
    assert found is not None
    at = {f"{entry.act} {entry.what}": entry.at for entry in found.entries}
    return at["did fence"] - at["did warn"]


def mend(shared: Room, name: str, script: Script) -> float:
    with wedge(shared, WORKERS[name], retries_max=3, script=script) as patient:
        patient.accuse()
        first_life = patient.life()
        with patient.executor(options=options(shared)):
            patient.await_end()
        found = patient.ending(first_life)
        waited_s = grace_s(patient)

    warned = ["saw alert: firing", "decided begin", "saw capture", "decided warn", "did warn", "did fence"]
    assert list(found.told[:6]) == warned
    assert found.history.count("die") == 1
    assert (found.job.state, found.job.attempt) == (State.COMPLETED, 2)
    return waited_s


def test_a_worker_that_can_saves_its_checkpoint_before_its_job_is_taken(shared: Room, checkpoint: Path) -> None:
    waited_s = mend(shared, "saves", SAVES)

    assert checkpoint.exists()
    assert waited_s >= GRACE_S


def test_a_worker_that_cannot_is_stopped_after_its_grace(shared: Room, checkpoint: Path) -> None:
    waited_s = mend(shared, "cannot", CANNOT_SAVE)

    assert not checkpoint.exists()
    assert waited_s >= GRACE_S


def test_killed_around_each_record_of_a_warning_it_is_given_twice_at_most(shared: Room, checkpoint: Path) -> None:
    points = [f"{when} ledger: {doing}" for doing in ("decided warn", "did warn") for when in ("before", "after")]
    with wedge(shared, WORKERS["killed"], retries_max=3, script=SAVES) as patient:
        patient.accuse()
        first_life = patient.life()
        for number, point in enumerate(points[:3]):
            with patient.doomed(point, number=number, options=options(shared)) as executor:
                assert patient.await_death(executor) < 0
        with patient.executor(options=options(shared)):
            patient.await_end()
        found = patient.ending(first_life)

    assert [line for line in found.told if "warn" in line] == ["decided warn", "decided warn"]
    assert checkpoint.exists()
    assert found.history.count("die") == 1
    assert (found.job.state, found.job.attempt) == (State.COMPLETED, 2)
