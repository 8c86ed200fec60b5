"""The remedies, one file each: `decide(facts) -> Step`, and the trips it can confirm, pure.

An alert names its remedy in the label `remedy`. To add one: a file here, its line in `REMEDIES`, a test in
tests/remediator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuwarden.job import Trip
from remediator.plan import Facts, Step, Subject
from remediator.remedies import lose_node, recycle_container, restart_container, restart_worker, wrangle


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """How an episode is decided, and which trips local evidence can confirm.

    `subject` is what its episodes are about: an alert for it names that, and nothing else.
    """

    decide: Callable[[Facts], Step]
    trips: frozenset[Trip]
    subject: Subject = Subject.WORKER


REMEDIES: Final[Mapping[str, Remedy]] = {
    "restart_worker": Remedy(decide=restart_worker.decide, trips=restart_worker.TRIPS),
    "restart_container": Remedy(
        decide=restart_container.decide,
        trips=restart_container.TRIPS,
        subject=Subject.SERVER,
    ),
    "lose_node": Remedy(decide=lose_node.decide, trips=lose_node.TRIPS, subject=Subject.HOST),
    "recycle_container": Remedy(
        decide=recycle_container.decide,
        trips=recycle_container.TRIPS,
        subject=Subject.TENANT,
    ),
    "wrangle": Remedy(decide=wrangle.decide, trips=wrangle.TRIPS, subject=Subject.RUN),
}
