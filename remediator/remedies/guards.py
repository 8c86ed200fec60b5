"""Checks before an action begins: arming, pauses, the circuit breaker, cool-downs and approval. Pure.

A hold is a `Wait`: the episode stays open and is checked again. Once an action has fenced a job or stopped a container,
only disarming its remedy holds it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpuwarden.job import State
from remediator.plan import (
    Advance,
    Begin,
    BlockRun,
    Episode,
    Facts,
    Fence,
    Kind,
    LockWorker,
    Lose,
    NodeFacts,
    Scale,
    Stage,
    Step,
    Stop,
    Subject,
    Taint,
    Wait,
    Warn,
    Wrangle,
)
from remediator.reasons import Reason


class Act(StrEnum):
    """Kind of order."""

    ARM = "arm"
    ASK = "ask"  # armed; each action needs an approval
    DISARM = "disarm"
    APPROVE = "approve"
    DECLINE = "decline"
    PAUSE = "pause"
    RESUME = "resume"  # ends or cancels a pause
    BREAKER = "breaker"
    RELEASE = "release"  # closes the circuit breaker


TOPIC: Final[Mapping[Act, str]] = {
    Act.ARM: "arming",
    Act.ASK: "arming",
    Act.DISARM: "arming",
    Act.APPROVE: "approval",
    Act.DECLINE: "approval",
    Act.PAUSE: "pause",
    Act.RESUME: "pause",
    Act.BREAKER: "breaker",
    Act.RELEASE: "breaker",
}
"""A new order replaces earlier ones of its topic, per host and remedy or per episode. Pauses are independent."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order. Times are Unix seconds. A `host` or `remedy` of `None` means all of them.

    `since` is the start of a pause, `until` the end of a pause or an unused approval. `ends` is the pause that a resume
    ends; `None` ends all that have begun. An approval or refusal has the action's `episode_id` and `key`.
    """

    act: Act
    at: float
    who: str
    reason: str
    host: str | None = None
    remedy: str | None = None
    until: float | None = None
    episode_id: int | None = None
    key: str | None = None
    order_id: int | None = None
    since: float | None = None
    ends: int | None = None

    @property
    def scope(self) -> str:
        """What the order applies to, as text."""
        if self.episode_id is not None:
            return f"episode {self.episode_id} on {self.host}"
        if self.act is Act.PAUSE or self.ends is not None:
            return f"pause {self.ends or self.order_id} on {self.host or 'every host'}"
        return f"{self.remedy or 'every remedy'} on {self.host or 'every host'}"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders in force, oldest first."""

    given: Sequence[Order] = ()

    def arming(self, *, host: str, remedy: str) -> Order | None:
        """Return the newest order that arms or disarms the remedy on the host."""
        about = [
            each
            for each in self.given
            if TOPIC[each.act] == "arming" and each.host in (None, host) and each.remedy in (None, remedy)
        ]
        return about[-1] if about else None

    def armed(self, *, host: str, remedy: str) -> bool:
        """Whether the remedy acts on the host."""
        order = self.arming(host=host, remedy=remedy)
        return order is not None and order.act is not Act.DISARM

    def needs_approval(self, *, host: str, remedy: str) -> bool:
        """Whether each action of the remedy needs an approval."""
        order = self.arming(host=host, remedy=remedy)
        return order is not None and order.act is Act.ASK

    def pauses(self, *, host: str | None, now: float) -> list[Order]:
        """Return current and future pauses, by start. `host=None` means all hosts."""
        left: list[Order] = []
        for order in self.given:
            if order.act is Act.PAUSE:
                left.append(order)
            elif order.act is Act.RESUME:
                left = [each for each in left if not _is_ended(each, order)]
        here = [each for each in left if (host is None or each.host in (None, host)) and _ends_s(each, now) > 0]
        return sorted(here, key=lambda each: begins_s(each, now))

    def pause(self, *, host: str, now: float) -> Order | None:
        """Return the current pause of the host that ends last."""
        running = [each for each in self.pauses(host=host, now=now) if begins_s(each, now) <= 0]
        return max(running, key=lambda each: _ends_s(each, now), default=None)

    def breaker(self) -> Order | None:
        """Return the order that opened the circuit breaker, if it is open."""
        latest = self._latest_breaker_order()
        return latest if latest is not None and latest.act is Act.BREAKER else None

    def breaker_reset_at(self) -> float | None:
        """When an operator last closed the circuit breaker."""
        latest = self._latest_breaker_order()
        return latest.at if latest is not None and latest.act is Act.RELEASE else None

    def _latest_breaker_order(self) -> Order | None:
        orders = [each for each in self.given if each.act in (Act.BREAKER, Act.RELEASE)]
        return orders[-1] if orders else None


START_SEEN_S: Final = 10.0
"""Time in which the exporter sees that a tenant was started, seconds."""

RATE_WINDOW_S: Final = 3600.0
"""Window of the restart limit, seconds."""


@dataclass(frozen=True, kw_only=True)
class SafetyLimits:
    """Rate limits and cool-downs, from the settings. A cool-down of 0 is off.

    The circuit breaker opens above `containers_max` or `restarts_max`. `vram_cooldown_s` is for VRAM restarts on one
    GPU. With `unknown_holds` no action begins while an Alertmanager cannot be queried.
    """

    cooldown_s: float = 300.0
    breaker_targets: int = 3
    breaker_share: float = 0.25
    breaker_window_s: float = 600.0
    breaker_restarts: int = 6
    vram_cooldown_s: float = 120.0
    unknown_holds: bool = False

    @property
    def start_cooldown_s(self) -> float:
        """Least time between two starts of tenants on demand."""
        return max(self.vram_cooldown_s, START_SEEN_S)

    def containers_max(self, fleet: int | None) -> int:
        """Containers that may need a restart within the window. Defaults: 3 for up to 15 workers, 25 for 100."""
        return max(self.breaker_targets, int(self.breaker_share * (fleet or 0)))

    def tainted_max(self, nodes: int) -> int:
        """Nodes that may be tainted. Defaults: 3 of up to 15, 25 of 100."""
        return max(self.breaker_targets, int(self.breaker_share * nodes))

    def restarts_max(self, fleet: int | None) -> int:
        """Restarts in an hour. Defaults: 6 for up to 6 workers, then one per worker."""
        return max(self.breaker_restarts, fleet or 0)


@dataclass(frozen=True, kw_only=True)
class ProposedAction:
    """The action that a step would begin, or that is already planned.

    `handle` names the container and survives a restart. `key` is the container incarnation or the decision about a run.
    `gpus` are the GPUs of a VRAM restart. `lock_target` is the worker to lock or the run to block.
    """

    episode_id: int
    host: str
    remedy: str
    handle: str
    key: str
    message: str
    gpus: frozenset[str] = frozenset()
    lock_target: str | None = None
    gone: bool = False

    @property
    def target(self) -> str:
        """Key of the container."""
        return target(self.host, self.handle)


@dataclass(frozen=True, kw_only=True)
class RecentActivity:
    """Recent actions and orders, from the ledger. Counts start at the last breaker reset.

    `targets` and `lock_targets` cover the breaker window, `restarts` covers `RATE_WINDOW_S`. `restarted_s_ago` is below
    0 if the wall clock was set back. `gpu_restarted_s_ago` is for another container on one of the GPUs; 0 during its
    restart. `fleet` is the number of workers. `answer` is the last approval or refusal of this episode.
    """

    targets: frozenset[str] = frozenset()
    restarts: int = 0
    restarted_s_ago: float | None = None
    gpu_restarted_s_ago: float | None = None
    fleet: int | None = None
    lock_targets: frozenset[str] = frozenset()
    answer: Order | None = None


@dataclass(frozen=True, kw_only=True)
class Silence:
    """One Alertmanager silence; author and comment are "" if unknown."""

    silence_id: str
    by: str = ""
    comment: str = ""


@dataclass(frozen=True, kw_only=True)
class TripBreaker:
    """Open the circuit breaker, which holds every action that has not begun."""

    message: str = field(compare=False)


def proposed_action(episode: Episode, step: Step) -> ProposedAction:
    """Return the action that a step would begin, or that is planned."""
    free = episode.free
    handle, key = ("", "") if free is None else (free.data["handle"], free.key)
    if isinstance(step, Begin):
        handle, key = step.container_handle, step.free_key
    elif isinstance(step, Scale):
        handle, key = step.container_handle, f"{'start' if step.on else 'stop'} {step.container_handle}"
    elif isinstance(step, Lose):
        key = episode.host
    elif isinstance(step, Taint):
        key = episode.worker
    elif isinstance(step, Wrangle):
        key = step.deed
    return ProposedAction(
        episode_id=episode.episode_id,
        host=episode.host,
        remedy=episode.remedy,
        handle=handle,
        key=key,
        message=step.message,
        gpus=_vram_gpus(episode, step),
        lock_target=_lock_target(episode, step),
        gone=isinstance(step, Begin) and step.gone,
    )


def _lock_target(episode: Episode, step: Step) -> str | None:
    if isinstance(step, LockWorker):
        return worker_lock_key(step.host, step.worker)
    return run_lock_key(episode.worker) if isinstance(step, BlockRun) else None


def worker_lock_key(host: str, worker: str) -> str:
    """Return the key of a worker lock, unique in the fleet."""
    return f"worker {target(host, worker)}"


def run_lock_key(run_id: str) -> str:
    """Return the key of a blocked run."""
    return f"run {run_id}"


def _vram_gpus(episode: Episode, step: Step) -> frozenset[str]:
    if isinstance(step, Scale):
        return step.gpus if step.on else frozenset()
    return frozenset(step.gpus if isinstance(step, Begin) and episode.subject is Subject.TENANT else ())


def may_begin(
    action: ProposedAction, orders: Orders, recent: RecentActivity, safety_limits: SafetyLimits, *, now: float
) -> Wait | TripBreaker | None:
    """Check whether a restart may begin: `None`, or the hold.

    Approval comes before the limits: the circuit breaker does not count an action without approval.
    """
    if (disarmed := _check_armed(action, orders)) is not None:
        return disarmed
    if (held := global_hold(orders, host=action.host, now=now)) is not None:
        return held
    ago_s = recent.restarted_s_ago
    # A crash after a restart is no second hang. The circuit breaker still bounds its restarts.
    if not action.gone and ago_s is not None and abs(ago_s) < safety_limits.cooldown_s:
        message = (
            f"restarted {max(0.0, ago_s):.0f} s ago; waits for the cool-down of {safety_limits.cooldown_s:.0f} s "
            "(--cooldown-s), then checks the evidence again"
        )
        return Wait(reason=Reason.COOLDOWN, message=message)
    if (cooling := _check_gpu_cooldown(recent, safety_limits)) is not None:
        return cooling
    return is_approved(action, orders, recent, now=now) or _check_limits(action, recent, safety_limits)


def may_scale(
    action: ProposedAction,
    orders: Orders,
    recent: RecentActivity,
    safety_limits: SafetyLimits,
    *,
    started_s_ago: float | None = None,
    now: float,
) -> Wait | None:
    """Check whether a tenant on demand may be started or stopped. Its minimum time bounds the rate.

    `started_s_ago` is the time since another one of the host was started.
    """
    held = _check_armed(action, orders) or global_hold(orders, host=action.host, now=now)
    if held is not None:
        return held
    if (cooling := _check_gpu_cooldown(recent, safety_limits)) is not None:
        return cooling
    wait_s = safety_limits.start_cooldown_s
    if started_s_ago is not None and abs(started_s_ago) < wait_s:
        message = (
            f"another tenant on demand was started {max(0.0, started_s_ago):.0f} s ago; waits for the cool-down of "
            f"{wait_s:.0f} s (--vram-cooldown-s), then reads the free memory again"
        )
        return Wait(reason=Reason.GPU_COOLDOWN, message=message)
    return is_approved(action, orders, recent, now=now)


def _check_gpu_cooldown(recent: RecentActivity, safety_limits: SafetyLimits) -> Wait | None:
    ago_s = recent.gpu_restarted_s_ago
    if ago_s is None or (ago_s != 0 and abs(ago_s) >= safety_limits.vram_cooldown_s):
        return None
    activity = f"was restarted {max(0.0, ago_s):.0f} s ago" if ago_s else "has a restart planned or running"
    message = (
        f"another container on its GPU {activity}; waits for the cool-down of "
        f"{safety_limits.vram_cooldown_s:.0f} s (--vram-cooldown-s), then reads the free memory again"
    )
    return Wait(reason=Reason.GPU_COOLDOWN, message=message)


def _check_armed(action: ProposedAction, orders: Orders) -> Wait | None:
    if orders.armed(host=action.host, remedy=action.remedy):
        return None
    order = orders.arming(host=action.host, remedy=action.remedy)
    return Wait(reason=Reason.DRY_RUN, message=f"not armed: {_describe_order(order)}")


def _check_limits(action: ProposedAction, recent: RecentActivity, safety_limits: SafetyLimits) -> TripBreaker | None:
    fleet = "an unknown number of" if recent.fleet is None else f"{recent.fleet}"
    count, allowed = len(recent.targets | {action.target}), safety_limits.containers_max(recent.fleet)
    if count > allowed:
        message = (
            f"{count} containers need a restart within {safety_limits.breaker_window_s:.0f} s, with {fleet} workers, "
            f"{allowed} allowed: they probably have one cause, which restarts do not fix"
        )
        return TripBreaker(message=message)
    restarts, restarts_max = recent.restarts + 1, safety_limits.restarts_max(recent.fleet)
    if restarts > restarts_max:
        message = (
            f"{restarts} restarts within {RATE_WINDOW_S:.0f} s, with {fleet} workers, {restarts_max} allowed: "
            "the same targets fail again and again, which restarts do not fix"
        )
        return TripBreaker(message=message)
    return None


def global_hold(orders: Orders, *, host: str, now: float) -> Wait | None:
    """Return the hold that applies to every action: circuit breaker or pause."""
    breaker = orders.breaker()
    if breaker is not None:
        message = f"the circuit breaker is open: {breaker.reason}; check the cause, then `gpuwarden breaker reset`"
        return Wait(reason=Reason.CIRCUIT_BREAKER, message=message)
    pause = orders.pause(host=host, now=now)
    if pause is not None:
        message = (
            f"paused: {_describe_order(pause)}; ends in {_ends_s(pause, now):.0f} s or with "
            f"`gpuwarden resume {pause.order_id}`"
        )
        return Wait(reason=Reason.PAUSED, message=message)
    return None


def may_hold(action: ProposedAction, orders: Orders, recent: RecentActivity, *, by: str, now: float) -> Wait | None:
    """Check whether host `by` may mark a lost host's jobs. Orders for both hosts apply, limits do not."""
    if (held := global_hold(orders, host=action.host, now=now)) is not None:
        return held
    if (held := global_hold(orders, host=by, now=now)) is not None:
        return replace(held, message=f"on {by}, which would mark the jobs of {action.host} lost: {held.message}")
    return is_approved(action, orders, recent, now=now)


def may_taint(
    action: ProposedAction,
    orders: Orders,
    recent: RecentActivity,
    safety_limits: SafetyLimits,
    node: NodeFacts,
    *,
    now: float,
) -> Wait | None:
    """Check whether a node may be tainted. A fault that all nodes show is rather one of the observer."""
    held = _check_armed(action, orders) or global_hold(orders, host=action.host, now=now)
    if held is not None:
        return held
    allowed = safety_limits.tainted_max(node.nodes)
    if node.tainted_nodes >= allowed:
        message = f"{node.tainted_nodes} of {node.nodes} nodes are tainted, {allowed} allowed: one cause is probable"
        return Wait(reason=Reason.MANY_TAINTED, message=message)
    return is_approved(action, orders, recent, now=now)


def may_wrangle(
    action: ProposedAction, orders: Orders, recent: RecentActivity, safety_limits: SafetyLimits, *, now: float
) -> Wait | TripBreaker | None:
    """Check whether a worker may be locked, or a run blocked or moved. No cool-down applies."""
    if (disarmed := _check_armed(action, orders)) is not None:
        return disarmed
    held = global_hold(orders, host=action.host, now=now) or is_approved(action, orders, recent, now=now)
    if held is not None or action.lock_target is None:
        return held
    count, allowed = len(recent.lock_targets | {action.lock_target}), safety_limits.containers_max(recent.fleet)
    if count <= allowed:
        return None
    message = (
        f"{count} workers and runs to lock or block within {safety_limits.breaker_window_s:.0f} s; above "
        f"{allowed} they probably have one cause, which locks do not fix"
    )
    return TripBreaker(message=message)


def is_approved(
    action: ProposedAction, orders: Orders, recent: RecentActivity, *, now: float, begun: bool = False
) -> Wait | None:
    """Check the approval of an action: `None` if it is approved or needs none.

    An approval expires unless the action has `begun`. A refusal applies until the action's `key` changes.
    """
    answer = recent.answer if recent.answer is not None and recent.answer.key == action.key else None
    if answer is not None and answer.act is Act.DECLINE:
        message = f"declined {_describe_order(answer)}; to allow the action: `gpuwarden approve {action.episode_id}`"
        return Wait(reason=Reason.DECLINED, message=message)
    if not orders.needs_approval(host=action.host, remedy=action.remedy):
        return None
    if answer is not None and (begun or answer.until is None or answer.until > now):
        return None
    late = "" if answer is None else "the approval expired before the action began; "
    message = (
        f"{late}waiting for approval: `gpuwarden approve {action.episode_id}` or "
        f"`gpuwarden decline {action.episode_id}`: {action.message}"
    )
    return Wait(reason=Reason.APPROVAL, message=message, asks=action.key)


def check_silences(silences: Sequence[Silence], unknown: str, safety_limits: SafetyLimits) -> Wait | None:
    """Hold a silenced action. With `unknown_holds`, also hold an action with unknown silences."""
    if silences:
        listed = "; ".join(f"{each.silence_id} by {each.by or '?'}: {each.comment or '?'}" for each in silences)
        message = f"silenced in Alertmanager: {listed}; continues when the silence ends"
        return Wait(reason=Reason.SILENCED, message=message)
    if unknown and safety_limits.unknown_holds:
        message = f"cannot query Alertmanager for silences, and --silences-unknown is hold: {unknown}"
        return Wait(reason=Reason.SILENCES_UNKNOWN, message=message)
    return None


def apply_holds(
    step: Step, facts: Facts, orders: Orders, recent: RecentActivity, safety_limits: SafetyLimits, *, now: float
) -> Step:
    """Return the chosen step, or the hold that applies."""
    if isinstance(step, Begin):
        verdict = may_begin(proposed_action(facts.episode, step), orders, recent, safety_limits, now=now)
        return verdict if isinstance(verdict, Wait) else step
    if is_first(step) and is_untouched(facts):
        held = global_hold(orders, host=facts.episode.host, now=now)
        free = facts.episode.free
        warned = free is not None and "warned" in free.data
        return held or is_approved(proposed_action(facts.episode, step), orders, recent, begun=warned, now=now) or step
    return step


def is_first(step: Step) -> bool:
    """Whether a step may be the first that changes a job or container."""
    if isinstance(step, Advance):
        return step.kind is Kind.FREE and step.stage is Stage.DEAD
    return isinstance(step, Warn | Fence | Stop)


def is_untouched(facts: Facts) -> bool:
    """Whether no job is fenced and no container is stopped yet."""
    free, settle, job = facts.episode.free, facts.episode.settle, facts.job
    if free is not None and free.stage is not Stage.PLANNED:
        return False
    if job is not None and job.state is State.FENCING and job.attempt == facts.episode.attempt:
        return False  # fenced, but the executor stopped before it recorded this
    return settle is None or settle.stage in (Stage.PLANNED, Stage.ABANDONED)


def target(host: str, handle: str) -> str:
    """Return the key of a container, unique in the fleet. The first word of a handle survives a restart."""
    return f"{host}/{handle.partition(' ')[0]}"


def begins_s(pause: Order, now: float) -> float:
    """Return the seconds until a pause begins. A pause without `since` begins with its order."""
    return (pause.at if pause.since is None else pause.since) - now


def _ends_s(pause: Order, now: float) -> float:
    return (math.inf if pause.until is None else pause.until) - now


def _is_ended(pause: Order, by: Order) -> bool:
    if by.ends is not None:
        return by.ends == pause.order_id
    return by.host in (None, pause.host) and begins_s(pause, by.at) <= 0


def _describe_order(order: Order | None) -> str:
    return (
        "no order arms the remedy"
        if order is None
        else f"by {order.who}" + (f": {order.reason}" if order.reason else "")
    )
