"""What a decided step passes before it is done: orders and safeguards, silences, the record of a wait, a capture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from remediator import plan
from remediator.capture.capture import Captor
from remediator.clients.alertmanager import Silences
from remediator.executor.limits import RemedyLimits
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Facts, Stage
from remediator.remedies import guards, restart

log: Final = structlog.get_logger("executor")


@dataclass(frozen=True)
class Again:
    """The stage took its time: facts are read and the step is decided again."""


Gate = Callable[[Facts, plan.Step], plan.Step | Again]
"""One stage: the step that it was given, a wait instead of it, or `Again`."""


class Hold:
    """The wait that an order or a safeguard puts before a step.

    Args:
        ledger: where orders and what was done lately are.
        host: this host's key.
        limits: what bounds each remedy.
    """

    def __init__(self, ledger: Ledger, *, host: str, limits: RemedyLimits) -> None:
        self._ledger = ledger
        self._host = host
        self._limits = limits

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """What latches the circuit breaker passes: it is recorded by the transaction that would begin it."""
        here = isinstance(step, plan.Begin) or guards.is_first(step)
        if not (here or isinstance(step, plan.Wrangle | plan.Lose)):
            return step
        episode, now = facts.episode, self._ledger.now()
        safeguards = self._limits.safeguards_of(episode.remedy) if here else self._limits.safeguards
        wish = guards.wish(episode, step)
        orders, recent = self._ledger.orders.standing(wish, safeguards, now=now)
        held: plan.Step | guards.Latch | None
        if isinstance(step, plan.Wrangle):
            held = guards.may_wrangle(wish, orders, recent, safeguards, now=now)
        elif isinstance(step, plan.Lose):
            held = guards.may_hold(wish, orders, recent, by=self._host, now=now)
        else:
            held = guards.hold(step, facts, orders, recent, safeguards, now=now)
        return held if isinstance(held, plan.Wait) else step

    def before_counting(self, episode: Episode) -> plan.Wait | None:
        """What holds a run whatever the count of its items would show, so that they are not counted.

        Not in a dry run, which records what it would do, nor where the alert has ended: then it may be over.
        """
        orders = self._ledger.orders.current()
        if not (episode.firing and orders.armed(host=self._host, remedy=episode.remedy)):
            return None
        return guards.may_go_on(orders, host=self._host, now=self._ledger.now())


class CheckSilences:
    """The wait that a silence in Alertmanager puts before a step. No person is asked to approve what is silenced.

    Args:
        silences: the Alertmanagers; `None`: no one is asked.
        limits: what bounds each remedy.
    """

    def __init__(self, silences: Silences | None, *, limits: RemedyLimits) -> None:
        self._silences = silences
        self._limits = limits

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Ask only about what would begin now, or what a person is asked about."""
        episode = facts.episode
        asks = isinstance(step, plan.Wait) and step.asks is not None
        begins = isinstance(step, plan.Begin | plan.Wrangle | plan.Lose) or (
            guards.is_first(step) and guards.is_untouched(facts)
        )
        if self._silences is None or not (begins or asks):
            return step
        heard = self._silences.of(episode.fingerprints, host=episode.host)
        silenced = guards.heed(heard.silences, heard.unknown, self._limits.safeguards)
        if silenced is None and begins and heard.unknown:
            log.warning("whether it is silenced is unknown; it goes on", because=heard.unknown)
        return silenced or step


class RecordWait:
    """Records a wait; any other step ends the wait before it."""

    def __init__(self, waits: WaitRecorder, timers: Timers) -> None:
        self._waits = waits
        self._timers = timers

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Pass the step on."""
        if isinstance(step, plan.Wait):
            self._waits.record(facts.episode, step)
        else:
            self._timers.of(facts.episode.episode_id).waits_for = ""
        return step


class Capture:
    """Keeps what the processes do that a step is about to end.

    Args:
        ledger: where it is kept.
        captor: what captures; `None`: nothing is captured.
        timers: what this process has tried for each episode.
    """

    def __init__(self, ledger: Ledger, captor: Captor | None, timers: Timers) -> None:
        self._ledger = ledger
        self._captor = captor
        self._timers = timers

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step | Again:
        """`Again` where something was captured only now.

        Once for each free, before its fence or, where there is none to come, its stop: a worker that is fenced may end
        itself within the second. In a dry run once for each episode, and without so much as stopping a process.
        """
        captor, container, episode = self._captor, facts.container, facts.episode
        if captor is None or container is None or not container.running or not _ends_it(facts, step):
            return step
        intent_id = None if episode.free is None else episode.free.intent_id
        tried = self._timers.of(episode.episode_id).captured
        if intent_id in tried or self._ledger.captures.has(episode):
            return step
        tried.add(intent_id)  # also where it cannot be kept: no stop waits for it twice
        armed = not isinstance(step, plan.WouldAct)
        captured = captor.capture(episode, container, facts.place, armed=armed, now=self._ledger.now())
        log.info("captured", episode=episode.episode_id, worker=episode.worker, because=captured.message)
        self._ledger.captures.save(episode, captured, now=self._ledger.now())
        return Again()


def _ends_it(facts: Facts, step: plan.Step) -> bool:
    """Whether a step is the first of those that end what runs, or says in a dry run that it would be."""
    free = facts.episode.free
    if free is None:
        return isinstance(step, plan.WouldAct)
    first = isinstance(step, plan.Warn | plan.Fence | plan.Stop) and free.stage is Stage.PLANNED
    return first and (not facts.container_known or restart.is_up(facts, free))
