"""The stages between a decision and its action: hold, silences, record of a wait, capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from gpuwarden.errors import GpuwardenError
from remediator import plan
from remediator.actuators import Actuator, Evicts, NotAllowedError
from remediator.capture.capture import CaptureRunner
from remediator.clients.alertmanager import Silences
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.limits import RemedyLimits
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Facts, Stage
from remediator.reasons import Reason
from remediator.remedies import guards, restart

log: Final = structlog.get_logger("executor")

CHECK_STOP_S: Final = 5.0
"""Interval between questions whether a held stop is allowed, seconds."""


@dataclass(frozen=True)
class Again:
    """The stage took time: read the facts and decide again."""


Gate = Callable[[Facts, plan.Step], plan.Step | Again]
"""One stage. It returns the given step, a wait instead of it, or `Again`."""


class Hold:
    """Replaces a step by a wait while an order or a safety limit forbids it."""

    def __init__(self, ledger: Ledger, *, host: str, limits: RemedyLimits) -> None:
        self._ledger = ledger
        self._host = host
        self._limits = limits

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Apply orders and limits. A step that trips the circuit breaker passes: its transaction records that."""
        if isinstance(step, plan.Untaint):  # in a pause a person may test the GPU
            return guards.global_hold(self._ledger.orders.current(), host=self._host, now=self._ledger.now()) or step
        here = isinstance(step, plan.Begin) or guards.is_first(step)
        if not (here or isinstance(step, plan.Wrangle | plan.Lose | plan.Taint | plan.Scale)):
            return step
        episode, now = facts.episode, self._ledger.now()
        safety_limits = self._limits.safety_limits_of(episode.remedy) if here else self._limits.safety_limits
        action = guards.proposed_action(episode, step)
        orders, recent = self._ledger.orders.with_activity(action, safety_limits, now=now)
        held: plan.Step | guards.TripBreaker | None
        if isinstance(step, plan.Wrangle):
            held = guards.may_wrangle(action, orders, recent, safety_limits, now=now)
        elif isinstance(step, plan.Taint) and facts.node is not None:
            held = guards.may_taint(action, orders, recent, safety_limits, facts.node, now=now)
        elif isinstance(step, plan.Scale):
            held = guards.may_scale(action, orders, recent, safety_limits, now=now)
        elif isinstance(step, plan.Lose):
            held = guards.may_hold(action, orders, recent, by=self._host, now=now)
        else:
            held = guards.apply_holds(step, facts, orders, recent, safety_limits, now=now)
        return held if isinstance(held, plan.Wait) else step

    def before_counting(self, episode: Episode) -> plan.Wait | None:
        """Return the wait that applies before the items are counted.

        `None` in a dry run, which records its action, and once the alert has ended: the episode may be over.
        """
        orders = self._ledger.orders.current()
        if not (episode.firing and orders.armed(host=self._host, remedy=episode.remedy)):
            return None
        return guards.global_hold(orders, host=self._host, now=self._ledger.now())


class CheckSilences:
    """Replaces a step by a wait while Alertmanager silences its alert. Silenced actions ask for no approval.

    Args:
        silences: client of the Alertmanagers; `None` turns the check off.
        limits: limits of each remedy.
    """

    def __init__(self, silences: Silences | None, *, limits: RemedyLimits) -> None:
        self._silences = silences
        self._limits = limits

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Check only steps that would begin now, and requests for approval."""
        episode = facts.episode
        asks = isinstance(step, plan.Wait) and step.asks is not None
        begins = isinstance(step, plan.Begin | plan.Wrangle | plan.Lose | plan.Taint | plan.Scale) or (
            guards.is_first(step) and guards.is_untouched(facts)
        )
        if self._silences is None or not (begins or asks):
            return step
        result = self._silences.of(episode.fingerprints, host=episode.host)
        silenced = guards.check_silences(result.silences, result.unknown, self._limits.safety_limits)
        if silenced is None and begins and result.unknown:
            log.warning("silences unknown, action continues", reason=result.unknown)
        return silenced or step


class CheckStop:
    """Replaces the stop of a pod, and the warning and fence before it, by a wait while its eviction is not allowed."""

    def __init__(self, actuators: Mapping[str, Actuator], timers: Timers, clock: SuspendAwareClock) -> None:
        self._actuators = actuators
        self._timers = timers
        self._clock = clock

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Check a stop, and the first step of a restart that needs one."""
        free, timers = facts.episode.free, self._timers.of(facts.episode.episode_id)
        actuator = None if free is None else self._actuators.get(free.data["kind"])
        # A worker fenced before an eviction that is not allowed would lose its job and keep its memory.
        begins = isinstance(step, plan.Stop) or (_ends_it(facts, step) and guards.is_untouched(facts))
        if not begins or free is None or not isinstance(actuator, Evicts):
            return step
        now_s = self._clock.now_s()
        if timers.stop_held is not None and now_s < timers.stop_held[1]:
            return timers.stop_held[0]
        timers.stop_held = None
        try:
            actuator.check_stop(free.data["handle"])
        except NotAllowedError as error:
            held = plan.Wait(reason=error.reason, message=str(error))
        except GpuwardenError as error:
            held = plan.Wait(reason=Reason.ENGINE_UNREACHABLE, message=f"unknown whether a stop is allowed: {error}")
        else:
            return step
        timers.stop_held = held, now_s + CHECK_STOP_S
        return held


class RecordWait:
    """Records a wait. Any other step ends the previous wait."""

    def __init__(self, waits: WaitRecorder, timers: Timers) -> None:
        self._waits = waits
        self._timers = timers

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step:
        """Record the wait, if it is one, and return the step."""
        if isinstance(step, plan.Wait):
            self._waits.record(facts.episode, step)
        else:
            self._timers.of(facts.episode.episode_id).current_wait = ""
        return step


class CaptureBeforeStop:
    """Saves stacks and logs of processes before a step ends them.

    Args:
        ledger: stores the capture.
        capture_runner: takes the capture; `None` turns captures off.
        timers: the captures that this process already tried.
    """

    def __init__(self, ledger: Ledger, capture_runner: CaptureRunner | None, timers: Timers) -> None:
        self._ledger = ledger
        self._capture_runner = capture_runner
        self._timers = timers

    def __call__(self, facts: Facts, step: plan.Step) -> plan.Step | Again:
        """Capture once per restart, before its first destructive step. Returns `Again` after a new capture.

        The first such step is the warning or the fence: a fenced worker may exit within a second. A dry run captures
        once per episode and pauses no process.
        """
        capture_runner, container, episode = self._capture_runner, facts.container, facts.episode
        if capture_runner is None or container is None or not container.running or not _ends_it(facts, step):
            return step
        intent_id = None if episode.free is None else episode.free.intent_id
        tried = self._timers.of(episode.episode_id).captured
        if intent_id in tried or self._ledger.captures.has(episode):
            return step
        tried.add(intent_id)  # also if saving fails: do not delay the stop twice
        armed = not isinstance(step, plan.WouldAct)
        captured = capture_runner.capture(episode, container, facts.place, armed=armed, now=self._ledger.now())
        log.info("capture saved", episode=episode.episode_id, worker=episode.worker, reason=captured.message)
        self._ledger.captures.save(episode, captured, now=self._ledger.now())
        return Again()


def _ends_it(facts: Facts, step: plan.Step) -> bool:
    """Whether a step is the first destructive step of a restart, or its dry run."""
    free = facts.episode.free
    if free is None:
        return isinstance(step, plan.WouldAct)
    first = isinstance(step, plan.Warn | plan.Fence | plan.Stop) and free.stage is Stage.PLANNED
    return first and (not facts.container_known or restart.is_up(facts, free))
