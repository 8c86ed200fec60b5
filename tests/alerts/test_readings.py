"""Rules read no series per job, except of gangs, because their cost would grow with the number of jobs."""

import re
from collections import Counter

from testbed.check_release import CHECKOUT
from tests.alerts.test_literals import rules
from tools.mutation.generated import TOKEN

PAGE = CHECKOUT / "docs" / "reference" / "metrics.md"

OF_GANGS = {
    ("GpuwardenGangStuck", "gpuwarden_gang_rank_attempt"): 1,
    ("GpuwardenJobStalled", "gpuwarden_gang_rank_attempt"): 1,
    ("GpuwardenJobStalled", "gpuwarden_gang_rank_active_attempt"): 1,
    ("GpuwardenJobUnhealthy", "gpuwarden_gang_rank_attempt"): 1,
    ("GpuwardenJobUnhealthy", "gpuwarden_gang_rank_active_attempt"): 1,
}
"""Exceptions, and their number of uses: gangs have far fewer jobs than single workers."""


def series_per_job() -> set[str]:
    """Metrics of the exporter with a job or gang id as label, except those of overdue jobs."""
    found = re.findall(r"^\| `(\w+)` \| \w+ \|[^|]*`(?:job_id|gang)`", PAGE.read_text(), re.MULTILINE)
    return {name for name in found if "_overdue_" not in name}


def test_rules_read_no_series_per_job_except_of_gangs() -> None:
    found = series_per_job()
    read = Counter(
        (str(rule.get("alert", rule.get("record"))), name)
        for rule in rules()
        for token in TOKEN.finditer(str(rule["expr"]))
        if token.lastgroup in ("word", "selector") and (name := token.group().partition("{")[0]) in found
    )

    assert read == OF_GANGS, "each evaluation reads the series of all jobs in the head block"
