"""When a supervised command is started again."""

import pytest

from gpuwarden.job import Condition
from gpuwarden.supervisor.policy import BACKOFF_MAX_S, Policy, Restarts

STALL, BUDGET = Condition.STALL, Condition.BUDGET


@pytest.mark.parametrize(
    ("policy", "code", "condition", "starts"),
    [
        (Policy.NEVER, 76, STALL, False),
        (Policy.NEVER, 1, None, False),
        (Policy.ON_HANG, 143, STALL, True),
        (Policy.ON_HANG, 143, Condition.HEALTH, True),
        (Policy.ON_HANG, 143, BUDGET, False),
        (Policy.ON_HANG, 1, None, False),
        (Policy.ON_FAILURE, 143, STALL, True),
        (Policy.ON_FAILURE, 143, BUDGET, False),
        (Policy.ON_FAILURE, 1, None, True),
        (Policy.ON_FAILURE, 0, None, False),
        (Policy.ALWAYS, 0, None, True),
        (Policy.ALWAYS, 143, BUDGET, True),
    ],
)
def test_policy_decides_by_the_end(policy: Policy, code: int, condition: Condition | None, starts: bool) -> None:
    delay_s = Restarts(policy).delay_s(exit_code=code, condition=condition, by_person=False, ran_s=5)

    assert (delay_s is not None) is starts


@pytest.mark.parametrize("policy", list(Policy))
def test_what_a_person_ended_is_not_started_again(policy: Policy) -> None:
    assert Restarts(policy).delay_s(exit_code=130, condition=None, by_person=True, ran_s=5) is None


@pytest.mark.behaviour("A8")
def test_fourth_hang_is_the_last() -> None:
    restarts = Restarts(Policy.ON_HANG)
    delays_s = [restarts.delay_s(exit_code=143, condition=STALL, by_person=False, ran_s=5) for _ in range(4)]

    assert delays_s == [1.0, 2.0, 4.0, None]
    assert not restarts.after_hang


def test_back_off_ends_at_a_minute_and_starts_again_after_a_steady_run() -> None:
    restarts = Restarts(Policy.ALWAYS)

    def delay_s(ran_s: float) -> float | None:
        return restarts.delay_s(exit_code=1, condition=None, by_person=False, ran_s=ran_s)

    assert [delay_s(1) for _ in range(9)][-1] == BACKOFF_MAX_S
    assert delay_s(60) == 1.0
