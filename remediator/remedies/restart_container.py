"""Remedy `restart_container`: free the container of a server that is asked and does not answer. There is no job.

Order: confirm from the host's own exporter, write the intent, confirm and stop, see it dead, start. What it is about is
one incarnation of one container. Whoever else ends that incarnation first (Docker's restart policy, what restarts
unhealthy containers, a person) has settled it: nothing is stopped after them, and nothing is started. A container that
holds workers is theirs, and is judged by their jobs. Pure.
"""

from typing import Final

from gpuwarden.facts import ServerFacts
from gpuwarden.job import Trip
from remediator import freeing
from remediator.plan import (
    Begin,
    Close,
    ContainerState,
    Facts,
    Intent,
    Outcome,
    Step,
    Stop,
    Wait,
    Withdraw,
    WouldAct,
)

TRIPS: Final = frozenset({Trip.SERVER})
"""The trips that `confirm` can confirm; an alert with another is refused at the door."""


def decide(facts: Facts) -> Step:
    """The next step of one episode."""
    free = facts.episode.free
    if free is None:
        return _consider(facts)
    if not free.over:
        return freeing.go_on(
            facts, free, stop=lambda: _stop_if_still_silent(facts, free), ended=lambda: _ended_without_us(facts)
        )
    return freeing.close(free, None)


def adopt(_: Facts) -> Step:
    """Nothing is owed for another host: a server has no job to settle."""
    return Wait(reason="settled", because="a server has no job; its container waits for its own host")


def confirm(seen: ServerFacts) -> tuple[bool, str]:
    """Whether fresh local evidence shows a server that does nothing, and the sentence that says so.

    Asked without an answer, every GPU idle, RAM and I/O still, each for the whole silence that its owner allows; and it
    has answered before, in this incarnation. Any unknown is a no. CPU time counts for nothing: what hangs in a driver
    may well spin.
    """
    silence_s = seen.silence_allowed_s
    if not seen.probe or not silence_s:
        return False, f"it is not asked as a server: {seen.probe_unknown or 'its labels ask for nothing'}"
    if not seen.answered:
        return False, "it has not answered yet in this incarnation: it may still load, or its probe may be wrong"
    if seen.unanswered_s is None:
        return False, f"whether it answers is unknown: {seen.probe_unknown or 'not asked'}"
    if seen.gpu_idle_s is None:
        return False, f"GPU unknown: {seen.gpu_unknown or 'not measured'}"
    if seen.ram_still_s is None:
        return False, f"RAM unknown: {seen.ram_unknown or 'not measured'}"
    if seen.io_still_s is None:
        return False, f"I/O unknown: {seen.work_unknown or 'not measured'}"
    figures = (
        f"unanswered for {seen.unanswered_s:.1f} s by its {seen.probe} probe, GPU idle {seen.gpu_idle_s:.1f} s, "
        f"RAM still {seen.ram_still_s:.1f} s, I/O still {seen.io_still_s:.1f} s of {silence_s:.1f} s allowed"
    ) + (", simulated GPU" if seen.gpu_simulated else "")
    return min(seen.unanswered_s, seen.gpu_idle_s, seen.ram_still_s, seen.io_still_s) >= silence_s, figures


def _consider(facts: Facts) -> Step:
    """Nothing is promised yet: is it the same incarnation of a server, and do we see ourselves that it is silent?"""
    seen, accused = facts.server, facts.episode.incarnation
    if seen is None:
        return freeing.doubt(facts, "no_evidence", f"no local evidence: {facts.unknown}")
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        return freeing.doubt(facts, "stale_evidence", f"the exporter's newest look is {seen.sample_age_s:.1f} s old")
    if seen.container_incarnation is None:
        return _unlisted(facts)
    if seen.container_incarnation != accused:
        return Close(outcome=Outcome.SUPERSEDED, because="the incarnation that was accused has been replaced since")
    if seen.workers is None:
        return freeing.doubt(facts, "unconfirmed", "whether workers live in it is unknown")
    if seen.workers:
        because = f"container {seen.container} holds {seen.workers} workers: it is judged by their jobs"
        return Close(outcome=Outcome.REFUSED, because=because)
    silent, figures = confirm(seen)
    if not silent:
        return freeing.doubt(facts, "unconfirmed", f"not confirmed on this host: {figures}")
    if not facts.container_known:
        return freeing.doubt(facts, "no_container", f"the container engine does not answer: {facts.unknown}")
    container = facts.container
    if container is None or _is_over(facts):
        return _ended(facts)
    return _begin(facts, container, seen, figures)


def _unlisted(facts: Facts) -> Step:
    """The exporter does not list it: a listing may miss what is there, and its engine has the last word."""
    if not facts.container_known:
        because = (
            f"the exporter does not list it, and its engine does not tell: {facts.unknown or 'it cannot be asked'}"
        )
        return freeing.doubt(facts, "no_container", because)
    if _is_over(facts):
        return _ended(facts)
    return freeing.doubt(facts, "no_container", "the exporter does not list it, and its engine says that it runs")


def _is_over(facts: Facts) -> bool:
    """Whether the incarnation that was accused has ended, by its engine."""
    container = facts.container
    return container is None or container.incarnation != facts.episode.incarnation or not container.running


def _ended(facts: Facts) -> Close:
    return Close(outcome=Outcome.SUPERSEDED, because=f"{freeing.down(facts)}: its incarnation ended without us")


def _begin(facts: Facts, container: ContainerState, seen: ServerFacts, figures: str) -> Step:
    if not container.managed:
        because = f"container {container.name} did not opt in; nothing is done to it"
        return Close(outcome=Outcome.REFUSED, because=because)
    if container.vanishes:
        because = f"container {container.name} is removed when it ends (--rm), and could not be started again"
        return Close(outcome=Outcome.REFUSED, because=because)
    if container.paused:
        because = f"container {container.name} is paused: whoever did that goes on with it"
        return freeing.doubt(facts, "container_paused", because)
    if not facts.armed:
        if facts.episode.would_act:
            return Wait(reason="dry_run", because="dry run: would act, and does nothing")
        return WouldAct(because=f"would stop {container.name} and start it: {figures}")
    return Begin(
        trip=Trip.SERVER,
        free_key=container.incarnation,
        container_kind=container.kind,
        container_handle=container.handle,
        container_name=container.name,
        settle_key=None,
        worker_incarnation="",
        because=figures,
        gpus=tuple(seen.gpus or ()),
        pids=container.pids,
        cgroup=container.cgroup,
    )


def _stop_if_still_silent(facts: Facts, free: Intent) -> Step:
    """Facts are read again before the act: what answers meanwhile, or works, is left alone."""
    silent, figures = _still_silent(facts, free)
    if silent and not facts.armed:
        return Wait(reason="dry_run", because="disarmed since it began: nothing is stopped")
    if silent:
        return Stop(because=figures)
    if freeing.late(facts, facts.free_for_s):
        return Withdraw(because=f"no longer confirmed, and nothing was done: {figures}")
    return Wait(reason="unconfirmed", because=f"not stopped, for it is not confirmed any more: {figures}")


def _still_silent(facts: Facts, free: Intent) -> tuple[bool, str]:
    seen = facts.server
    if seen is None:
        return False, f"no local evidence: {facts.unknown}"
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        return False, f"the exporter's newest look is {seen.sample_age_s:.1f} s old"
    if seen.container_incarnation != free.key:
        return False, "the evidence does not speak of the incarnation that was promised to"
    if seen.workers != 0:
        return False, "workers live in it, or may"
    if facts.container is not None and facts.container.paused:
        return False, "the container is paused"
    return confirm(seen)


def _ended_without_us(facts: Facts) -> Step:
    """Nothing was done yet, and the incarnation is over: what became of it is its owner's, and is not started by us."""
    return Withdraw(because=f"{freeing.down(facts)}, before anything was done")
