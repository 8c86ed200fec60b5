"""What a rule costs as jobs turn over: a series that is another for each job is read once in it, if at all."""

import re
from collections import Counter

from deploy.check import CHECKOUT
from tests.alerts.generated import TOKEN
from tests.alerts.test_literals import rules

PAGE = CHECKOUT / "docs" / "metrics.md"

AGAIN = {("GpuwardenGangStuck", "gpuwarden_gang_rank_attempt"): 4}
"""What is read more often, and how often: of ranks alone, whose jobs are fewer than those of single workers by far."""


def of_each_job() -> set[str]:
    """The metrics of the exporter that bear a job's id, or a gang's, which is the id of its first."""
    return set(re.findall(r"^\| `(\w+)` \| \w+ \|[^|]*`(?:job_id|gang)`", PAGE.read_text(), re.MULTILINE))


def test_a_series_that_each_job_has_of_its_own_is_read_once_in_a_rule() -> None:
    found = of_each_job()
    read = Counter(
        (str(rule.get("alert", rule.get("record"))), name)
        for rule in rules()
        for token in TOKEN.finditer(str(rule["expr"]))
        if token.lastgroup in ("word", "selector") and (name := token.group().partition("{")[0]) in found
    )

    assert "gpuwarden_job_info" in found
    assert ("GpuwardenJobStalled", "gpuwarden_job_info") in read
    assert {each: times for each, times in read.items() if times > 1} == AGAIN, (
        "all that ended since the head block began are gone through at each reading"
    )
