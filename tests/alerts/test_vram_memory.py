"""Of two tenants that are level the one that was named stays so over scrapes that fail, in a real Prometheus."""

import math
import time
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.asking import PLAIN
from tests.remediator.prometheus import Scraped, Series, prometheus
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

GIB: Final = 2**30
NAMED: Final = 'ALERTS{alertname="GpuwardenVramVictim"}'


def tenants(over: dict[str, float]) -> Series:
    """A GPU that is short of memory, and who is over its budget by how much, GiB."""
    figures = {
        "memory_free_bytes": GIB,
        "memory_returning_bytes": 0,
        "memory_floor_bytes": 1.5 * GIB,
        "memory_tie_bytes": GIB / 4,
    }
    series = {(f"gpuwarden_gpu_{name}", 'gpu="GPU-0"'): value for name, value in figures.items()}
    for name, gib in over.items():
        whose = f'container="{name}"'
        series |= {
            ("gpuwarden_container_gpu_memory_over_budget_bytes", f'{whose},gpu="GPU-0"'): gib * GIB,
            ("gpuwarden_container_recyclable", whose): 1,
            ("gpuwarden_container_info", f'{whose},incarnation="{name}@1"'): 1,
        }
    return series


def test_two_that_are_level_do_not_change_places_while_scrapes_fail(tmp_path: Path) -> None:
    host = Scraped()
    with host, prometheus(tmp_path / "prometheus", host.address) as url:

        def asked(expression: str) -> list[str]:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False, verify=PLAIN)
            return [each["metric"]["container"] for each in answer.raise_for_status().json()["data"]["result"]]

        host.series = tenants({"first": 3.01, "second": 3.0})
        eventually(lambda: asked(NAMED) == ["first"], "the one that is ahead is named", within_s=30)
        host.series = None
        eventually(lambda: asked(NAMED) == [], "nothing is known while scrapes fail", within_s=30)
        host.series = tenants({"first": 3.0, "second": 3.1})
        eventually(lambda: asked(NAMED), "somebody is named again", within_s=30)

        assert asked(f"group by (container) (last_over_time({NAMED}[5m]))") == ["first"]
        host.series = tenants({"first": 3.0, "second": 3.5})
        eventually(lambda: asked(NAMED) == ["second"], "more than a tie ahead it is the other's turn", within_s=30)


def test_the_alerts_own_expression_names_the_same_at_any_time_between_two_evaluations(tmp_path: Path) -> None:
    """As the remediator asks for it before it acts."""
    host = Scraped()
    with host, prometheus(tmp_path / "prometheus", host.address) as url:

        def data(path: str, **query: str) -> dict[str, Any]:
            answer = httpx.get(f"{url}/api/v1/{path}", params=query, trust_env=False, verify=PLAIN)
            found: dict[str, Any] = answer.raise_for_status().json()["data"]
            return found

        def named(expression: str) -> list[str]:
            return [each["metric"]["container"] for each in data("query", query=expression)["result"]]

        host.series = tenants({"over": 3.0, "less": 0.5})
        eventually(lambda: named(NAMED) == ["over"], "it is named", within_s=30)
        rules = (rule for group in data("rules", type="alert")["groups"] for rule in group["rules"])
        (expression,) = (rule["query"] for rule in rules if rule["name"] == "GpuwardenVramVictim")

        def undisturbed() -> list[list[str]]:
            """What it names; nothing where a scrape failed, which takes every figure away."""
            began_s = time.monotonic()
            found = [named(expression) for _ in range(200)]
            passed_s = math.ceil(time.monotonic() - began_s) + 2
            (up,) = data("query", query=f'min_over_time(up{{job="host"}}[{passed_s}s])')["result"]
            return found if up["value"][1] == "1" else []

        assert eventually(undisturbed, "no scrape fails for 200 queries") == [["over"]] * 200
