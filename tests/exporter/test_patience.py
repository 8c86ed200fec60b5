"""How long a job may show no sign of life, by its phase and its owner's word."""

from typing import Any

import pytest

from exporter.patience import Patience
from gpuwarden.job import JobClass, Phase
from tests.exporter import builders as build

PATIENCE = Patience(load_s=310.0, eval_s=320.0, checkpoint_s=330.0, save_s=340.0)


@pytest.mark.parametrize(
    ("job", "silence_s"),
    [
        pytest.param({"phase": Phase.STEP}, 120.0, id="what its owner allows, in its steps"),
        pytest.param({"phase": Phase.LOAD}, 310.0, id="the load's own"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="the evaluation's own"),
        pytest.param({"phase": Phase.CHECKPOINT}, 330.0, id="the checkpoint's own"),
        pytest.param({"phase": Phase.SAVE}, 340.0, id="the save's own"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 900.0}, 900.0, id="no less than its owner allows"),
        pytest.param({"phase": Phase.EVAL, "patience_s": 1800.0}, 1800.0, id="what the job asks for"),
        pytest.param({"phase": Phase.EVAL, "patience_s": 60.0}, 60.0, id="what the job asks for, though it is less"),
        pytest.param({"phase": Phase.STEP, "patience_s": 700.0}, 700.0, id="what it asks for in its steps"),
        pytest.param({"phase": Phase.IDLE}, 0.0, id="none is policed while it is idle"),
        pytest.param({"phase": Phase.IDLE, "patience_s": 60.0}, 0.0, id="nor for its asking"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 0.0}, 0.0, id="nor where its owner wants none policed"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 0.0, "patience_s": 60.0}, 0.0, id="whatever it asks for"),
    ],
)
def test_the_silence_that_a_job_is_allowed_is(job: dict[str, Any], silence_s: float) -> None:
    assert PATIENCE.silence_s(build.job_file(**job)) == silence_s


@pytest.mark.parametrize(
    ("job", "window_s"),
    [
        pytest.param({}, 300.0, id="the host's, in its steps"),
        pytest.param({"stall_timeout_s": 900.0}, 900.0, id="never less than the silence its owner allows"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="nor than its phase is allowed"),
        pytest.param({"phase": Phase.EVAL, "patience_s": 1800.0}, 1800.0, id="nor than it asks for"),
        pytest.param({"phase": Phase.EVAL, "patience_s": 60.0}, 300.0, id="and never less than the host's"),
        pytest.param({"stall_timeout_s": 0.0}, 300.0, id="the host's where silence is not policed"),
        pytest.param({"stall_timeout_s": 0.0, "phase": Phase.SAVE}, 340.0, id="by its phase, there too"),
        pytest.param({"job_class": JobClass.GPU_VIDEO, "stall_timeout_s": 0.0}, 300.0, id="of a video model"),
        pytest.param({"phase": Phase.IDLE}, None, id="none while it is idle"),
        pytest.param({"job_class": JobClass.CPU}, None, id="none of a class without a GPU"),
    ],
)
def test_the_window_in_which_a_gpu_job_is_to_show_life_is(job: dict[str, Any], window_s: float | None) -> None:
    assert PATIENCE.window_s(build.job_file(**job), 300.0) == window_s
