"""What a rule costs as jobs turn over: a series that is another for each job is read by no rule, but of gangs."""

import re
from collections import Counter

from testbed.check_release import CHECKOUT
from tests.alerts.test_literals import rules
from tools.mutation.generated import TOKEN

PAGE = CHECKOUT / "docs" / "metrics.md"

OF_GANGS = {
    ("GpuwardenGangStuck", "gpuwarden_gang_rank_attempt"): 1,
}
"""What is read all the same, and how often: of ranks alone, whose jobs are far fewer than those of single workers."""


def of_each_job() -> set[str]:
    """The metrics of the exporter that bear as a label a job's id, or a gang's, which is the id of its first.

    But those of whom is overdue, which are of nobody in health.
    """
    found = re.findall(r"^\| `(\w+)` \| \w+ \|[^|]*`(?:job_id|gang)`", PAGE.read_text(), re.MULTILINE)
    return {name for name in found if "_overdue_" not in name}


def test_no_rule_reads_a_series_that_each_job_has_of_its_own() -> None:
    found = of_each_job()
    read = Counter(
        (str(rule.get("alert", rule.get("record"))), name)
        for rule in rules()
        for token in TOKEN.finditer(str(rule["expr"]))
        if token.lastgroup in ("word", "selector") and (name := token.group().partition("{")[0]) in found
    )

    assert read == OF_GANGS, "all that ended since the head block began are gone through at each reading"
