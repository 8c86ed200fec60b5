"""The remedies, one file each: a pure `decide(facts) -> Step`, and the conditions it can confirm.

An alert names its remedy in the label `remedy`. To add a remedy: a file here, its line in `REMEDIES`, a test in
tests/remediator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuwarden.job import Condition
from remediator.plan import Facts, Step, Subject
from remediator.remedies import (
    hold_lost_host,
    recycle_container,
    restart_container,
    restart_worker,
    scale_tenant,
    taint_node,
    wrangle,
)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """How episodes of a remedy are decided, what local evidence confirms, and what its alerts must name."""

    decide: Callable[[Facts], Step]
    conditions: frozenset[Condition]
    subject: Subject = Subject.WORKER


REMEDIES: Final[Mapping[str, Remedy]] = {
    "restart_worker": Remedy(decide=restart_worker.decide, conditions=restart_worker.CONFIRMABLE),
    "restart_container": Remedy(
        decide=restart_container.decide,
        conditions=restart_container.CONFIRMABLE,
        subject=Subject.SERVER,
    ),
    "hold_lost_host": Remedy(decide=hold_lost_host.decide, conditions=hold_lost_host.CONFIRMABLE, subject=Subject.HOST),
    "recycle_container": Remedy(
        decide=recycle_container.decide,
        conditions=recycle_container.CONFIRMABLE,
        subject=Subject.TENANT,
    ),
    "taint_node": Remedy(decide=taint_node.decide, conditions=taint_node.CONFIRMABLE, subject=Subject.GPU),
    "scale_tenant": Remedy(decide=scale_tenant.decide, conditions=scale_tenant.CONFIRMABLE, subject=Subject.ON_DEMAND),
    "wrangle": Remedy(decide=wrangle.decide, conditions=wrangle.CONFIRMABLE, subject=Subject.RUN),
}
