"""When the demo accepts a step of the pipeline."""

import pytest

from remediator.ledger.reports import EpisodeHistory
from testbed.demo import verdict
from testbed.demo.job_body import Script
from testbed.stage import with_action

FENCED = {"saw alert: firing": 0.0, "decided begin": 0.2, "did fence": 0.4}


@pytest.mark.parametrize(
    ("wedge_with_gil", "times", "ended"),
    [
        pytest.param(False, FENCED | {"saw free: dead": 0.7}, True, id="exited after the fence"),
        pytest.param(False, FENCED | {"did stop": 0.6, "saw free: dead": 0.7}, False, id="stopped"),
        pytest.param(False, FENCED, False, id="never dead"),
        pytest.param(False, {"did fence": 0.8, "saw free: dead": 0.7}, False, id="dead before the fence"),
        pytest.param(True, FENCED | {"saw free: dead": 0.7}, False, id="holds the GIL"),
    ],
)
def test_missing_stop_is_accepted_only_after_a_fence(
    wedge_with_gil: bool, times: dict[str, float], ended: bool
) -> None:
    assert verdict.exited_after_fence(Script(picture="p", wedge_with_gil=wedge_with_gil), times) is ended


@pytest.mark.parametrize("outcomes", [[None], ["fixed"], ["refused"], ["partly_fixed"], ["fixed", "fixed"]])
def test_episodes_without_action_are_ignored(outcomes: list[str | None]) -> None:
    its = [episode(outcome) for outcome in outcomes]

    assert with_action([episode("unconfirmed"), *its, episode("superseded")]) == its


def episode(outcome: str | None) -> EpisodeHistory:
    return EpisodeHistory(
        episode_id=1, remedy="restart_worker", condition="stall", host="box1", worker="w1", job_id=7, attempt=1,
        opened_at=1.0, closed_at=None if outcome is None else 2.0, outcome=outcome, reason=None, message=outcome,
    )  # fmt: skip
