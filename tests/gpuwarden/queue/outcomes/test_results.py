"""Results that the databases cannot store: the kept part."""

import json
from typing import Any

import pytest

from gpuwarden.errors import WorkerStopping
from gpuwarden.queue import keep_result
from gpuwarden.queue.models import RESULT_MAX_BYTES


class Panic(BaseException):
    """As PyO3 turns a Rust panic into."""


class Number:
    def item(self) -> float:
        return 1.5


class Textless:
    def __str__(self) -> str:
        raise Panic


class Named:
    def __str__(self) -> str:
        return "named"


class Broken(dict[str, int]):
    def items(self) -> Any:
        raise Panic

    def __str__(self) -> str:
        return "broken"


CYCLE: list[Any] = [1]
CYCLE.append(CYCLE)


@pytest.mark.parametrize("result", [None, 1, "a", [1, {"a": 2.5}], (1, 2)])
def test_json_is_kept_as_it_is(result: Any) -> None:
    assert keep_result(result) == (result, None)


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        pytest.param(float("nan"), None, id="NaN"),
        pytest.param([1.5, float("inf"), True], [1.5, None, True], id="infinity"),
        pytest.param({"a\0": "b\0", "c": None}, {"a\\x00": "b\\x00", "c": None}, id="NUL"),
        pytest.param({("a", 1): {1}}, {"('a', 1)": [1]}, id="keys and sets"),
        pytest.param([Number()], [1.5], id="number of a library"),
        pytest.param([Named(), 1], ["named", 1], id="object"),
        pytest.param([Textless(), 1], ["the text of this Textless cannot be read: Panic", 1], id="no text"),
        pytest.param(Broken(a=1), "broken", id="broken dictionary"),
        pytest.param({"n": 10**5000, "m": 1}, {"n": None, "m": 1}, id="huge integer"),
    ],
)
def test_rest_of_a_result_is_kept(result: Any, kept: Any) -> None:
    found, lost = keep_result(result)

    assert found == kept
    assert lost


def test_cyclic_result_is_kept_to_a_depth() -> None:
    kept, lost = keep_result(CYCLE)

    assert kept[1][1][0] == 1
    assert lost


def test_result_that_is_too_long_keeps_its_short_values() -> None:
    kept, lost = keep_result({"a": 1, "log": "x" * RESULT_MAX_BYTES, "b": "c"})

    assert kept == {"a": 1, "log": None, "b": "c"}
    assert "bytes as JSON, more than" in str(lost)


@pytest.mark.parametrize("result", ["x" * RESULT_MAX_BYTES, [1] * RESULT_MAX_BYTES, {"x" * RESULT_MAX_BYTES: 1}])
def test_result_of_one_long_value_is_dropped(result: Any) -> None:
    kept, lost = keep_result(result)

    assert kept is None
    assert lost


def test_kept_part_fits_for_any_size() -> None:
    kept, _ = keep_result({str(n): [float("nan")] * n for n in range(500)})

    assert len(json.dumps(kept)) <= RESULT_MAX_BYTES
    assert kept["1"] == [None]


def test_stop_of_the_worker_passes() -> None:
    class Stopping:
        def __str__(self) -> str:
            raise WorkerStopping

    with pytest.raises(WorkerStopping):
        keep_result([Stopping()])
