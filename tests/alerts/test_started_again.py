"""A real Prometheus that is stopped, and started again once everything is otherwise: whom the alerts name then.

Prometheus marks nothing as vanished when it is stopped or started, so it tells for five minutes what it saw before.
"""

from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.asking import PLAIN
from tests.remediator.prometheus import Scraped, Series, prometheus, silent_server, wedge
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

NAMED: Final = "gpuwarden_job_overdue_id"
Named = set[tuple[str, ...]]


def told(url: str, expression: str, *labels: str) -> Named:
    """These labels of every series that there is."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False, verify=PLAIN)
    found = answer.raise_for_status().json()["data"]["result"]
    return {tuple(each["metric"].get(label, "") for label in labels) for each in found}


@pytest.mark.parametrize(("before", "now"), [(6, 7), (7, 6)], ids=["a later one", "an earlier one"])
def test_the_attempt_that_is_there_is_named_and_judged_by_its_own_silence(
    before: int, now: int, tmp_path: Path
) -> None:
    host = Scraped()
    folder = tmp_path / "prometheus"
    with host:
        host.series = wedge(1.0, attempt=before)
        with prometheus(folder, host.address) as url:
            eventually(lambda: told(url, NAMED, "attempt") == {(str(before),)}, "it is seen", within_s=30)
        host.series = wedge(130.0, attempt=now)
        with prometheus(folder, host.address) as url:
            alert = 'ALERTS{alertname="GpuwardenJobStalled", alertstate="firing"}'
            eventually(lambda: told(url, alert), "the wedge is told", within_s=30)

            assert told(url, NAMED, "attempt") == {("6",), ("7",)}, "what was before is told beside it"
            assert told(url, f"last_over_time({alert}[5m])", "job_id", "attempt") == {("7", str(now))}


def test_the_incarnation_of_a_server_that_is_there_is_named(tmp_path: Path) -> None:
    host = Scraped()
    folder = tmp_path / "prometheus"
    with host:
        host.series = another(silent_server(0.0))
        with prometheus(folder, host.address) as url:
            eventually(lambda: told(url, "gpuwarden_server_info", "incarnation"), "it is seen", within_s=30)
            (before,) = told(url, "gpuwarden_server_info", "incarnation")
        host.series = silent_server()
        with prometheus(folder, host.address) as url:
            alert = 'ALERTS{alertname="GpuwardenServerUnanswering", alertstate="firing"}'
            eventually(lambda: told(url, alert), "the silence is told", within_s=30)
            (now,) = told(url, "gpuwarden_server_info", "incarnation") - {before}

            assert before in told(url, "gpuwarden_server_info", "incarnation"), "what was before is told beside it"
            assert told(url, f"last_over_time({alert}[5m])", "incarnation") == {now}


def another(series: Series) -> Series:
    """The same, of an incarnation that comes first in any order."""
    return {
        (name, labels.replace('incarnation="', 'incarnation="0')): value for (name, labels), value in series.items()
    }
