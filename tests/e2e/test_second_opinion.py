"""The program asks a real Prometheus about a real wedge, by its own rule, and dies while it notes the answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from deploy.engine import Engine
from gpuwarden.job import State
from tests.e2e.wedges import Room, Wedge, room, wedge
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts]

ASKED: Final = "gpuwarden-opinion-asked"
HELD: Final = "gpuwarden-opinion-held"
NOTES: Final = "ledger: saw prometheus"


@pytest.fixture(scope="module")
def shared(work: Path, engine: Engine) -> Iterator[Room]:
    with room(work, engine, [ASKED, HELD]) as found:
        found.chain.start("prometheus")
        yield found


def await_alert(patient: Wedge) -> None:
    """Wait until Prometheus itself says that the worker is wedged."""
    chain = patient.room.chain

    def firing() -> bool:
        alerts = chain.query('ALERTS{alertname="GpuwardenJobStalled"}')
        return patient.worker in {each["metric"].get("worker") for each in alerts}

    eventually(lambda: chain.log("prometheus").count("Server is ready") > 0, "Prometheus is ready", within_s=60)
    eventually(firing, f"the rule accuses {patient.worker}", within_s=60, log=lambda: chain.log_tail("prometheus"))


def test_executors_that_die_as_they_note_the_answer_ask_again_and_the_wedge_is_mended_once(shared: Room) -> None:
    options = ("--prometheus", shared.chain.prometheus_url, "--prometheus-policy", "require")
    with wedge(shared, ASKED, retries_max=3) as patient:
        patient.accuse()
        await_alert(patient)
        first_life = patient.life()
        for number, point in enumerate((f"before {NOTES}", f"after {NOTES}")):
            with patient.doomed(point, number=number, options=options) as executor:
                assert patient.await_death(executor) < 0
        with patient.executor(options=options):
            patient.await_end()
        found = patient.ending(first_life)

    assert found.told[:3] == ["saw alert firing", "saw prometheus", "saw prometheus"]
    assert "decided begin" in found.told
    assert found.history.count("die") == 1
    assert (found.job.state, found.job.attempt) == (State.COMPLETED, 2)


def test_a_wedge_whose_prometheus_is_away_waits_for_it_where_it_is_required(shared: Room) -> None:
    options = ("--prometheus", shared.chain.prometheus_url, "--prometheus-policy", "require")
    with wedge(shared, HELD, retries_max=3) as patient:
        patient.accuse()
        shared.chain.stop("prometheus")
        with patient.executor(options=options):
            eventually(
                lambda: [each.reason for each in patient.ledger.held()] == ["prometheus_silent"],
                "it waits",
                log=patient.log,
                within_s=60,
            )
            assert patient.store.job(1).state is State.RUNNING
            first_life = patient.life()
            shared.chain.start("prometheus")
            patient.await_end()
        found = patient.ending(first_life)

    assert found.told.count("saw prometheus") == 2
    assert found.history.count("die") == 1
