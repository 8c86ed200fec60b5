"""Values of a GPU."""

import pytest

from exporter.model.gpu import GpuFigures
from tests.exporter import builders as build

pytestmark = pytest.mark.pure


def test_gpu_names_unknown_metrics_that_hide_its_use() -> None:
    unknown = {"utilization": "not_supported", "temperature": "not_supported", "processes": "asleep"}

    assert build.gpu(0, figures=GpuFigures(unknown=unknown)).unread_metrics == {"utilization": "not_supported"}
    assert build.gpu(0).unread_metrics == {}
