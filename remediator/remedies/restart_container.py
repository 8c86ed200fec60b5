"""Remedy `restart_container`: restart a container without a job, for one of `container_conditions`. Pure."""

from typing import Final

from remediator.plan import Facts, Step
from remediator.remedies import restart_without_job
from remediator.remedies.container_conditions import CONDITIONS, confirm

CONFIRMABLE: Final = frozenset(CONDITIONS)
"""The conditions that it can confirm; the webhook refuses others."""


def decide(facts: Facts) -> Step:
    """Return the next step of one episode."""
    return restart_without_job.decide(facts, confirm=confirm)
