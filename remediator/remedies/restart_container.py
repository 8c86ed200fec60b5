"""Remedy `restart_container`: free a container without a job, by one of `container_conditions`. Pure."""

from typing import Final

from remediator.plan import Facts, Step
from remediator.remedies import restart_without_job
from remediator.remedies.container_conditions import CONDITIONS, confirm

CONFIRMABLE: Final = frozenset(CONDITIONS)
"""The trips that it can confirm; an alert with another is refused at the door."""


def decide(facts: Facts) -> Step:
    """The next step of one episode."""
    return restart_without_job.decide(facts, confirm=confirm)
