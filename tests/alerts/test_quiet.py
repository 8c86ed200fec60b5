"""What quiet is the exporter says, once: a rule that has it from there asks for no sign of life besides."""

import re
from typing import Final

import pytest

from tests.alerts.test_literals import rules

QUIET: Final = {
    "GpuwardenJobStalled": "gpuwarden_job_quiet_seconds",
    "GpuwardenJobUnhealthy": "gpuwarden_job_quiet_seconds",
    "GpuwardenJobGpuLost": "gpuwarden_job_quiet_gpu_lost_seconds",
    "GpuwardenSharedJobStalled": "gpuwarden_job_quiet_apart_seconds",
}

ASKED_BESIDES: Final = {
    ("GpuwardenJobStalled", "gpuwarden_job_beat_age_seconds"): "a job is armed by its first beat",
    ("GpuwardenSharedJobStalled", "gpuwarden_job_beat_age_seconds"): "likewise",
    ("GpuwardenJobGpuLost", "gpuwarden_container_gpu_idle_seconds"): "a second exporter may measure every GPU",
}
"""The signs of life that they ask for all the same, and why."""

_SIGN: Final = re.compile(
    r"gpuwarden_(?:container|worker)_(?:gpu_idle|gpu_lost|\w+_still)_seconds"
    r"|gpuwarden_job_(?:beat_age_seconds|phase_age_seconds|phase)\b"
)


def expressions() -> dict[str, str]:
    """What each alert asks."""
    return {rule["alert"]: re.sub(r"#[^\n]*", "", rule["expr"]) for rule in rules() if "alert" in rule}


@pytest.mark.parametrize("alert", QUIET)
def test_a_rule_that_asks_how_quiet_a_job_is_asks_once_and_for_no_sign_of_life_that_is_in_it(alert: str) -> None:
    expression = expressions()[alert]

    assert re.findall(r"gpuwarden_job_quiet\w*", expression) == [QUIET[alert]]
    assert _SIGN.findall(expression) == [name for rule, name in ASKED_BESIDES if rule == alert]


def test_in_which_phases_work_is_life_is_no_rules_to_say() -> None:
    asking = {
        alert: told
        for alert, text in expressions().items()
        if (told := re.findall(r"gpuwarden_job_phase\{.*?\}", text))
    }

    assert asking == {"GpuwardenJobSlowed": ['gpuwarden_job_phase{phase="step"}']}, "which goes by steps alone"
