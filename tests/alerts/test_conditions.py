"""Rules and `gpuwarden.conditions` agree: PromQL and Python cannot share code."""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from gpuwarden import conditions
from tests.alerts.test_rules_in_general import run_promtool

UNKNOWN: Final = math.nan


class _Case(NamedTuple):
    """Values of the series of a rule, and the Python condition."""

    series: Mapping[str, tuple[float, ...]]
    met: Callable[..., bool]


AGE: Final = (9.5, 10.0, 10.5, UNKNOWN)
LIMIT: Final = (10.0, 10.5, UNKNOWN)

CASES: Final[Mapping[str, _Case]] = {
    "GpuwardenJobOverBudget": _Case(
        {"gpuwarden_job_elapsed_seconds": AGE, "gpuwarden_job_budget_seconds": LIMIT}, conditions.reached
    ),
    "GpuwardenJobStalled": _Case(
        {
            "gpuwarden_job_step_beat_age_seconds": AGE,
            "gpuwarden_job_inactive_seconds": AGE,
            "gpuwarden_job_stall_timeout_seconds": LIMIT,
        },
        conditions.is_stalled,
    ),
    "GpuwardenJobStuck": _Case(
        {
            "gpuwarden_job_step_beat_age_seconds": AGE,
            "gpuwarden_job_stuck_after_seconds": LIMIT,
            "gpuwarden_container_no_progress_seconds": AGE,
            "gpuwarden_job_stuck_idle_seconds": LIMIT,
        },
        conditions.is_stuck,
    ),
    "GpuwardenJobUnhealthy": _Case(
        {
            "gpuwarden_job_inactive_seconds": AGE,
            "gpuwarden_job_health_window_seconds": LIMIT,
            "gpuwarden_job_elapsed_seconds": (29.5, 30.0, UNKNOWN),
            "gpuwarden_job_health_grace_seconds": (20.0, UNKNOWN),
        },
        conditions.is_unhealthy,
    ),
    "GpuwardenJobGpuLost": _Case(
        {"gpuwarden_job_inactive_gpu_lost_seconds": AGE, "gpuwarden_job_health_window_seconds": LIMIT},
        conditions.reached,
    ),
}


@pytest.mark.needs_parts
@pytest.mark.parametrize("alert", CASES)
def test_rule_fires_for_jobs_that_meet_its_condition(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    input_series, expected = [], []
    for number, figures in enumerate(itertools.product(*case.series.values())):
        slot = f'host="a", worker="w{number}", container="c{number}"'
        values = dict(zip(case.series, figures, strict=True))
        identity = {f'gpuwarden_job_overdue_id{{{slot}, attempt="1", incarnation="i"}}': 7.0}
        named = {f"{name}{{{slot}}}": value for name, value in values.items()}
        input_series += [
            {"series": name, "values": "NaN" if math.isnan(value) else f"{value:g}"}
            for name, value in (identity | named).items()
        ]
        if case.met(*(None if math.isnan(each) else each for each in figures)):
            expected.append({"labels": f'{{worker="w{number}"}}', "value": 1})
    question = f'count by (worker) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
    test = {
        "name": alert,
        "interval": "1s",
        "input_series": input_series,
        "promql_expr_test": [{"expr": question, "eval_time": "0s", "exp_samples": expected}],
    }

    assert expected
    assert run_promtool(tmp_path, test) == ""
