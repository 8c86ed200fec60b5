"""What a GPU's figures say of themselves."""

import pytest

from exporter.model.gpu import GpuFigures
from tests.exporter import builders as build

pytestmark = pytest.mark.pure


def test_a_gpu_names_the_unknown_figures_that_hide_what_is_done_on_it() -> None:
    unknown = {"utilization": "not_supported", "temperature": "not_supported", "processes": "asleep"}

    assert build.gpu(0, figures=GpuFigures(unknown=unknown)).unread_metrics == {"utilization": "not_supported"}
    assert build.gpu(0).unread_metrics == {}
