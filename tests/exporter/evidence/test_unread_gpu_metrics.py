"""What is told of GPUs that their driver refuses: once each, and once that it is over."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from exporter.evidence.unread_gpu_metrics import OVER_S, Unwatched, UnwatchedHistory
from exporter.model.readings import Gpu, GpuFigures, GpuReadings
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

Look = tuple[Gpu, ...] | GpuReadings | None


def refused(because: str = "Insufficient Permissions", *, uuid: str = "GPU-0", **figures: str) -> Gpu:
    return build.gpu(0, uuid=uuid, unknown=because, figures=GpuFigures(unknown=figures))


WELL = build.gpu(0)
REFUSED = refused(gpu="no_permission")
LATE = refused("utilisation: Timeout", utilization="timeout")
NO_MEMORY = refused("utilisation: Timeout; memory: Timeout", utilization="timeout", memory="timeout")
UNANSWERED = replace(build.gpus(), failed=("gpu",))
GONE = replace(build.gpus(), gone={"renderD128": "GPU-0", "renderD129": "GPU-9"})


def told(*looks: Look, every_s: float = 1.0) -> list[str]:
    """What is new at each look, by its number, and of which GPUs it is over."""
    history = UnwatchedHistory()
    found: list[str] = []
    for number, look in enumerate(looks):
        readings = build.gpus(*look) if isinstance(look, tuple) else look
        new, over = history.observe(readings, now_s=number * every_s)
        found += [f"{number} {each.gpu} {' '.join(each.figures)}" for each in new]
        found += [f"{number} {gpu} over" for gpu in over]
    return found


def test_what_is_refused_is_told_with_its_reason_and_the_drivers_own_words() -> None:
    (new,), over = UnwatchedHistory().observe(build.gpus(REFUSED, build.gpu(1)), now_s=0.0)

    assert new == Unwatched(
        gpu="GPU-0", number="0", figures={"gpu": "no_permission"}, because="Insufficient Permissions"
    )
    assert over == ()


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        pytest.param([(WELL,)] * 3, [], id="nothing is refused"),
        pytest.param([(REFUSED,)] * 200, ["0 GPU-0 gpu"], id="once, however long it lasts"),
        pytest.param([(LATE,), (NO_MEMORY,)] * 100, ["0 GPU-0 utilization", "1 GPU-0 memory"], id="what is new alone"),
        pytest.param([(LATE,), (WELL,)] * 100, ["0 GPU-0 utilization"], id="now and then"),
        pytest.param([(LATE,), *[(WELL,)] * 70], ["0 GPU-0 utilization", "60 GPU-0 over"], id="over"),
        pytest.param(
            [(LATE,), *[(WELL,)] * 70, (LATE,)],
            ["0 GPU-0 utilization", "60 GPU-0 over", "71 GPU-0 utilization"],
            id="again",
        ),
        pytest.param(
            [(NO_MEMORY,), *[(LATE,)] * 70, (NO_MEMORY,)],
            ["0 GPU-0 utilization memory", "71 GPU-0 memory"],
            id="one of two again",
        ),
        pytest.param(
            [(replace(REFUSED, uuid="unidentified-0"),), *[(WELL,)] * 70],
            ["0 unidentified-0 gpu", "60 unidentified-0 over"],
            id="it says its name by now",
        ),
        pytest.param([(REFUSED,), *[None] * 70], ["0 GPU-0 gpu"], id="no source answers"),
        pytest.param([(REFUSED,), *[UNANSWERED] * 70], ["0 GPU-0 gpu"], id="its source does not answer"),
        pytest.param([(REFUSED,), *[(replace(WELL, lost=True),)] * 70], ["0 GPU-0 gpu"], id="it is lost"),
        pytest.param([(REFUSED,), *[GONE] * 70], ["0 GPU-0 gpu"], id="it is lost, and listed no more"),
        pytest.param([(REFUSED,), *[(replace(WELL, lost=None),)] * 70], ["0 GPU-0 gpu"], id="it hangs"),
        pytest.param(
            [(refused(utilization="not_told", memory="asleep", xid="hung"), refused(uuid="GPU-1", gpu="hung"))],
            [],
            id="what is of no account, comes and goes, or is told elsewhere",
        ),
        pytest.param([(refused(utilization="not_supported"),)], ["0 GPU-0 utilization"], id="it never has that figure"),
    ],
)  # fmt: skip
def test_each_refusal_is_told_once_and_its_end_once(looks: Sequence[Any], expected: list[str]) -> None:
    assert OVER_S == 60
    assert told(*looks) == expected
