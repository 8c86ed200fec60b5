"""Simulated GPUs: valid and invalid files."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.model.gpu import Gpu, GpuProcess, GpuReadings
from exporter.sources.gpu import simulated
from exporter.sources.gpu.simulated import SimulationError

WHOLE: dict[str, Any] = {
    "uuid": "GPU-sim-0",
    "index": 0,
    "name": "Simulated GPU",
    "utilization_ratio": 0.93,
    "memory_used_bytes": 2147483648,
    "memory_size_bytes": 17179869184,
    "processes": [{"pid": 4242, "utilization_ratio": 0.93, "memory_bytes": 2147483648}],
}


def write(folder: Path, *gpus: dict[str, Any]) -> Path:
    path = folder / "gpus.json"
    path.write_text(json.dumps({"gpus": gpus}))
    return path


def test_full_file_is_read_and_marked_as_simulated(tmp_path: Path) -> None:
    found = simulated.read(write(tmp_path, WHOLE))

    assert found == GpuReadings(
        source="simulated",
        gpus=(
            Gpu(
                uuid="GPU-sim-0",
                index=0,
                name="Simulated GPU",
                utilization_ratio=0.93,
                memory_used_bytes=2147483648,
                memory_size_bytes=17179869184,
                memory_free_bytes=15032385536,
                processes=(GpuProcess(pid=4242, utilization_ratio=0.93, memory_bytes=2147483648),),
            ),
        ),
    )


@pytest.mark.parametrize("field", ["utilization_ratio", "memory_used_bytes", "memory_size_bytes", "processes"])
@pytest.mark.parametrize("spelt", ["null", "missing"])
def test_missing_field_is_unknown_not_zero(field: str, spelt: str, tmp_path: Path) -> None:
    fields = {name: value for name, value in WHOLE.items() if name != field}

    (found,) = simulated.read(write(tmp_path, fields | ({field: None} if spelt == "null" else {}))).gpus

    assert getattr(found, field) is None
    assert (found.memory_free_bytes is None) == field.startswith("memory")
    assert found.unknown == (
        "the simulated driver reports none" if field in ("utilization_ratio", "processes") else None
    )


def test_empty_process_list_is_measured(tmp_path: Path) -> None:
    assert simulated.read(write(tmp_path, WHOLE | {"processes": []})).gpus[0].processes == ()


def test_process_without_values_is_unknown_not_zero(tmp_path: Path) -> None:
    (found,) = simulated.read(write(tmp_path, WHOLE | {"processes": [{"pid": 1}]})).gpus

    assert found.processes == (GpuProcess(pid=1, utilization_ratio=None, memory_bytes=None),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "the file: Invalid JSON", id="empty"),
        pytest.param('{"gpus": [{"uuid": "GPU-s', "the file: Invalid JSON", id="half-written"),
        pytest.param("[]", "the file: Input should be an object", id="not an object"),
        pytest.param("{}", "gpus: Field required", id="no gpus"),
        pytest.param(json.dumps({"gpus": [WHOLE | {"utilization_ratio": 93}]}), "utilization_ratio", id="percentage"),
        pytest.param(
            json.dumps({"gpus": [WHOLE | {"utilization_ratio": float("nan")}]}), "utilization_ratio", id="not a number"
        ),
        pytest.param(json.dumps({"gpus": [WHOLE | {"memory_used_bytes": -1}]}), "memory_used_bytes", id="negative"),
        pytest.param(json.dumps({"gpus": [WHOLE | {"processes": [{"pid": 0}]}]}), "processes.0.pid", id="pid 0"),
        pytest.param(json.dumps({"gpus": [WHOLE | {"utilisation": 1}]}), "gpus.0.utilisation", id="unknown field"),
        pytest.param(json.dumps({"gpus": [WHOLE, WHOLE]}), "share one uuid or index", id="duplicate GPU"),
        pytest.param(
            json.dumps({"gpus": [WHOLE, WHOLE | {"uuid": "other"}]}), "share one uuid or index", id="duplicate index"
        ),
    ],
)
def test_invalid_file_is_rejected_with_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(text)

    with pytest.raises(SimulationError, match=message) as refused:
        simulated.read(path)

    assert str(path) in str(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"no simulated GPUs: .*nowhere\.json"):
        simulated.read(tmp_path / "nowhere.json")


def test_file_is_read_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    assert len(simulated.read(path).gpus) == 1

    write(tmp_path)

    assert simulated.read(path).gpus == ()
