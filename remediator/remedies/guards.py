"""Whether what a remedy wants may be begun now: armed or not, paused, braked, cooling down, approved. Pure.

People's orders are kept in the ledger, each with who gave it and why; what stands follows from them alone. Nothing is
armed that nobody armed. Every refusal is a `Wait`: the episode stays open, is looked at again on the timer, and nothing
of it is used up. What has taken a job from its attempt, or stopped a container, is finished whatever is ordered then,
but for a disarming, which ends every act at once.
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
    Stage,
    Step,
    Stop,
    Subject,
    Wait,
    Warn,
    Wrangle,
)
from remediator.reasons import Reason


class Act(StrEnum):
    """What can be ordered."""

    ARM = "arm"
    ASK = "ask"  # armed, and a person is asked about each free
    DISARM = "disarm"
    APPROVE = "approve"
    DECLINE = "decline"
    PAUSE = "pause"
    RESUME = "resume"  # a pause was ended, or called off
    BREAKER = "breaker"
    RELEASE = "release"


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
"""Acts of one topic undo one another: of each topic, host and remedy only the newest order can still matter.

An approval is about one episode: of those the newest for each of them. Pauses stand beside one another, each until
its time or its own end.
"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order. No host is every host, no remedy every remedy. Times are Unix seconds.

    `until` ends a pause, which begins at `since`, and an approval that nothing was begun for. `ends` is the number of
    the pause that an order ends; a resume without one ends all that run. An approval, or the refusal of one, is about
    one episode, and in it about `key`, the container's incarnation that was to be freed when the person was asked.
    """

    act: Act
    at: float
    who: str
    because: str
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
        """What it is about, in words."""
        if self.episode_id is not None:
            return f"episode {self.episode_id} on {self.host}"
        if self.act is Act.PAUSE or self.ends is not None:
            return f"pause {self.ends or self.order_id} on {self.host or 'every host'}"
        return f"{self.remedy or 'every remedy'} on {self.host or 'every host'}"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders that may still matter, oldest first."""

    given: Sequence[Order] = ()

    def arming(self, *, host: str, remedy: str) -> Order | None:
        """The newest order to arm or disarm that is about a remedy on a host; `None` where nobody gave one."""
        about = [
            each
            for each in self.given
            if TOPIC[each.act] == "arming" and each.host in (None, host) and each.remedy in (None, remedy)
        ]
        return about[-1] if about else None

    def armed(self, *, host: str, remedy: str) -> bool:
        """Whether a remedy acts on a host, if only on what a person approves."""
        order = self.arming(host=host, remedy=remedy)
        return order is not None and order.act is not Act.DISARM

    def asks(self, *, host: str, remedy: str) -> bool:
        """Whether it acts only on what a person approves."""
        order = self.arming(host=host, remedy=remedy)
        return order is not None and order.act is Act.ASK

    def pauses(self, *, host: str | None, now: float) -> list[Order]:
        """The pauses of a host, or with no host of any, that run or are still to come; by when they begin."""
        left: list[Order] = []
        for order in self.given:
            if order.act is Act.PAUSE:
                left.append(order)
            elif order.act is Act.RESUME:
                left = [each for each in left if not _is_ended(each, order)]
        here = [each for each in left if (host is None or each.host in (None, host)) and _ends_s(each, now) > 0]
        return sorted(here, key=lambda each: begins_s(each, now))

    def pause(self, *, host: str, now: float) -> Order | None:
        """The pause that runs on a host, the one that ends last."""
        running = [each for each in self.pauses(host=host, now=now) if begins_s(each, now) <= 0]
        return max(running, key=lambda each: _ends_s(each, now), default=None)

    def breaker(self) -> Order | None:
        """The order that latched the brake; `None` while it is not latched."""
        latest = self._brakes()
        return latest if latest is not None and latest.act is Act.BREAKER else None

    def released_at(self) -> float | None:
        """When a person last released the brake: a storm is counted from there."""
        latest = self._brakes()
        return latest.at if latest is not None and latest.act is Act.RELEASE else None

    def _brakes(self) -> Order | None:
        brakes = [each for each in self.given if each.act in (Act.BREAKER, Act.RELEASE)]
        return brakes[-1] if brakes else None


RATE_WINDOW_S: Final = 3600.0
"""The window in which frees are counted, seconds."""


@dataclass(frozen=True, kw_only=True)
class Safeguards:
    """What bounds an armed remediator, from the settings; seconds. A cool-down of 0 is none.

    `vram_cooldown_s` is a GPU's: so long after one container on it was freed, nobody else goes for its memory's sake.

    `unknown_holds`: nothing is begun while an Alertmanager does not tell whether it is silenced.
    """

    cooldown_s: float = 300.0
    breaker_targets: int = 3
    breaker_share: float = 0.25
    breaker_window_s: float = 600.0
    breaker_restarts: int = 6
    vram_cooldown_s: float = 120.0
    unknown_holds: bool = False

    def storm_above(self, fleet: int | None) -> int:
        """How many distinct targets within the window are still single faults, in a fleet of so many workers.

        With the defaults 3 up to 15 workers, 4 of 16, 25 of 100: a box of one, two or three workers has no storm, for
        its cool-downs bound it; on one of four or eight the fourth container is one too many.
        """
        return max(self.breaker_targets, int(self.breaker_share * (fleet or 0)))

    def frees_above(self, fleet: int | None) -> int:
        """How many frees within an hour, of whichever containers, still mend something, in a fleet of so many workers.

        With the defaults 6 up to 6 workers, then one for each: on a small box a container that wedges every ten minutes
        has a person called within the hour, and in a large fleet it does not stop the mending of all the others.
        """
        return max(self.breaker_restarts, fleet or 0)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A free that a remedy wants to begin, or has promised and not begun in earnest.

    `handle` is the container's, which survives a restart, `key` its incarnation's, which does not. `gpus` are those
    that it is to be freed for, where it is for their memory. What is wanted of a run has no container, and its deed for
    a key; `condemns` is the worker to be locked, or the run to be blocked, and `None` where neither is.
    """

    episode_id: int
    host: str
    remedy: str
    handle: str
    key: str
    message: str
    gpus: frozenset[str] = frozenset()
    condemns: str | None = None

    @property
    def target(self) -> str:
        """How the container is told from every other one of the fleet."""
        return target(self.host, self.handle)


@dataclass(frozen=True, kw_only=True)
class Recent:
    """What was done and said lately, as the ledger has it.

    `targets` are the containers that a free was begun for within the storm window, and since the brake was released;
    `frees` how many frees were begun within `RATE_WINDOW_S`, and since then. `freed_s_ago` is how long ago the one at
    hand was last freed, by the wall clock; negative where that was set back. `fleet` is how many workers the executors
    see together, `None` while none has told. `answer` is what a person last said about the episode at hand.
    `gpu_freed_s_ago` is how long ago another container was freed on one of the wish's GPUs, 0 while one is. `condemned`
    are the workers that were to be locked and the runs to be blocked within the storm window, and since the release.
    """

    targets: frozenset[str] = frozenset()
    frees: int = 0
    freed_s_ago: float | None = None
    gpu_freed_s_ago: float | None = None
    fleet: int | None = None
    condemned: frozenset[str] = frozenset()
    answer: Order | None = None


@dataclass(frozen=True, kw_only=True)
class Silence:
    """One silence of an Alertmanager; who made it and why is "" where that could not be asked."""

    silence_id: str
    by: str = ""
    comment: str = ""


@dataclass(frozen=True, kw_only=True)
class Latch:
    """This one would be a storm: the brake is to be latched, and holds everything that has not begun."""

    message: str = field(compare=False)


def wish(episode: Episode, step: Step) -> Wish:
    """What a step would begin; of one that was promised, what the promise was. The key of a silent host is its own."""
    free = episode.free
    handle, key = ("", "") if free is None else (free.data["handle"], free.key)
    if isinstance(step, Begin):
        handle, key = step.container_handle, step.free_key
    elif isinstance(step, Lose):
        key = episode.host
    elif isinstance(step, Wrangle):
        key = step.deed
    return Wish(
        episode_id=episode.episode_id,
        host=episode.host,
        remedy=episode.remedy,
        handle=handle,
        key=key,
        message=step.message,
        gpus=_gpus_freed_for(episode, step),
        condemns=_condemns(episode, step),
    )


def _condemns(episode: Episode, step: Step) -> str | None:
    if isinstance(step, LockWorker):
        return condemned_worker(step.host, step.worker)
    return condemned_run(episode.worker) if isinstance(step, BlockRun) else None


def condemned_worker(host: str, worker: str) -> str:
    """How a worker that is to be locked is told from every other one, and from a run."""
    return f"worker {target(host, worker)}"


def condemned_run(run_id: str) -> str:
    """How a run that is to be blocked is told from every other one, and from a worker."""
    return f"run {run_id}"


def _gpus_freed_for(episode: Episode, step: Step) -> frozenset[str]:
    return frozenset(step.gpus if isinstance(step, Begin) and episode.subject is Subject.TENANT else ())


def may_begin(wish: Wish, orders: Orders, recent: Recent, safeguards: Safeguards, *, now: float) -> Wait | Latch | None:
    """Whether a free may be begun: `None`, or why not.

    A person is asked only where nothing else holds it, and before a storm is counted: what nobody approved is none.
    """
    if (disarmed := _disarmed(wish, orders)) is not None:
        return disarmed
    if (held := may_go_on(orders, host=wish.host, now=now)) is not None:
        return held
    ago_s = recent.freed_s_ago
    if ago_s is not None and abs(ago_s) < safeguards.cooldown_s:
        message = (
            f"it was freed {max(0.0, ago_s):.0f} s ago and cools down for {safeguards.cooldown_s:.0f} s: "
            "what wedges again so soon is not mended by a restart; taken up again by itself afterwards"
        )
        return Wait(reason=Reason.COOLDOWN, message=message)
    ago_s = recent.gpu_freed_s_ago
    if ago_s is not None and (ago_s == 0 or abs(ago_s) < safeguards.vram_cooldown_s):
        told = f"was freed {max(0.0, ago_s):.0f} s ago" if ago_s else "is promised to be freed, or is being freed"
        message = (
            f"another container on its GPU {told}: one goes at a time, and what is free is measured anew "
            f"{safeguards.vram_cooldown_s:.0f} s afterwards"
        )
        return Wait(reason=Reason.GPU_COOLDOWN, message=message)
    return is_approved(wish, orders, recent, now=now) or _storm(wish, recent, safeguards)


def _disarmed(wish: Wish, orders: Orders) -> Wait | None:
    if orders.armed(host=wish.host, remedy=wish.remedy):
        return None
    order = orders.arming(host=wish.host, remedy=wish.remedy)
    return Wait(reason=Reason.DRY_RUN, message=f"disarmed just now: {_told(order)}")


def _storm(wish: Wish, recent: Recent, safeguards: Safeguards) -> Latch | None:
    """Whether one more free would be a storm: of too many containers at once, or of whichever too often."""
    fleet = "an unknown number of" if recent.fleet is None else f"{recent.fleet}"
    count, above = len(recent.targets | {wish.target}), safeguards.storm_above(recent.fleet)
    if count > above:
        message = (
            f"{count} containers to be freed within {safeguards.breaker_window_s:.0f} s, with {fleet} workers; above "
            f"{above} they have one cause, which no restart mends"
        )
        return Latch(message=message)
    frees, frees_above = recent.frees + 1, safeguards.frees_above(recent.fleet)
    if frees > frees_above:
        message = (
            f"{frees} frees within {RATE_WINDOW_S:.0f} s, with {fleet} workers; above {frees_above} the same things "
            "wedge again and again, which no restart mends"
        )
        return Latch(message=message)
    return None


def may_go_on(orders: Orders, *, host: str, now: float) -> Wait | None:
    """Whether what is only promised may be begun in earnest: `None`, or why not."""
    breaker = orders.breaker()
    if breaker is not None:
        message = f"the brake is latched: {breaker.because}; `gpuwarden breaker reset` once a person has looked"
        return Wait(reason=Reason.CIRCUIT_BREAKER, message=message)
    pause = orders.pause(host=host, now=now)
    if pause is not None:
        message = (
            f"paused: {_told(pause)}; it ends in {_ends_s(pause, now):.0f} s, and `gpuwarden resume {pause.order_id}` "
            "ends it"
        )
        return Wait(reason=Reason.PAUSED, message=message)
    return None


def may_hold(wish: Wish, orders: Orders, recent: Recent, *, by: str, now: float) -> Wait | None:
    """Whether the jobs of a silent host may be taken for lost by another: `None`, or why not.

    What is ordered for either host holds it. Nothing is freed by that, so that it neither cools down nor counts as a
    storm.
    """
    if (held := may_go_on(orders, host=wish.host, now=now)) is not None:
        return held
    if (held := may_go_on(orders, host=by, now=now)) is not None:
        return replace(held, message=f"on {by}, which would hold its jobs: {held.message}")
    return is_approved(wish, orders, recent, now=now)


def may_wrangle(
    wish: Wish, orders: Orders, recent: Recent, safeguards: Safeguards, *, now: float
) -> Wait | Latch | None:
    """Whether a worker may be locked, or a run blocked or moved: `None`, or why not.

    Nothing is freed by that, so that it does not cool down. But where one worker after another is found faulty, or one
    run after another, they have one cause, and that is a storm too. One that is found so again, for another run or by
    another host, is still one. A run that moves condemns nobody.
    """
    if (disarmed := _disarmed(wish, orders)) is not None:
        return disarmed
    held = may_go_on(orders, host=wish.host, now=now) or is_approved(wish, orders, recent, now=now)
    if held is not None or wish.condemns is None:
        return held
    count, above = len(recent.condemned | {wish.condemns}), safeguards.storm_above(recent.fleet)
    if count <= above:
        return None
    message = (
        f"{count} workers to be locked and runs to be blocked within {safeguards.breaker_window_s:.0f} s; above "
        f"{above} they have one cause, which no lock mends"
    )
    return Latch(message=message)


def is_approved(wish: Wish, orders: Orders, recent: Recent, *, now: float, begun: bool = False) -> Wait | None:
    """Whether a person has said yes to this free, where one is to be asked: `None`, or why not.

    A yes is for one incarnation and for a time, in which it is to be `begun`: with the warning, where there is one. A
    no stands for its incarnation, whatever is armed later.
    """
    answer = recent.answer if recent.answer is not None and recent.answer.key == wish.key else None
    if answer is not None and answer.act is Act.DECLINE:
        message = f"declined {_told(answer)}; `gpuwarden approve {wish.episode_id}` if it is to be done after all"
        return Wait(reason=Reason.DECLINED, message=message)
    if not orders.asks(host=wish.host, remedy=wish.remedy):
        return None
    if answer is not None and (begun or answer.until is None or answer.until > now):
        return None
    late = "" if answer is None else "an approval ran out before it could be begun; "
    message = (
        f"{late}a person is asked: `gpuwarden approve {wish.episode_id}` or `gpuwarden decline {wish.episode_id}`: "
        f"{wish.message}"
    )
    return Wait(reason=Reason.APPROVAL, message=message, asks=wish.key)


def heed(silences: Sequence[Silence], unknown: str, safeguards: Safeguards) -> Wait | None:
    """Whether silences hold what may be begun otherwise: `None`, or why.

    `unknown` says which Alertmanager did not tell; another one's silence holds all the same.
    """
    if silences:
        told = "; ".join(f"{each.silence_id} by {each.by or '?'}: {each.comment or '?'}" for each in silences)
        message = f"silenced in Alertmanager: {told}; taken up again by itself when the silence ends"
        return Wait(reason=Reason.SILENCED, message=message)
    if unknown and safeguards.unknown_holds:
        message = f"whether it is silenced is unknown, and --silences-unknown says hold: {unknown}"
        return Wait(reason=Reason.SILENCES_UNKNOWN, message=message)
    return None


def hold(step: Step, facts: Facts, orders: Orders, recent: Recent, safeguards: Safeguards, *, now: float) -> Step:
    """The step that a remedy chose, or the wait that stands before it.

    What latches the brake passes: it is told as it is begun, in the transaction that would have begun it.
    """
    if isinstance(step, Begin):
        verdict = may_begin(wish(facts.episode, step), orders, recent, safeguards, now=now)
        return verdict if isinstance(verdict, Wait) else step
    if is_first(step) and is_untouched(facts):
        held = may_go_on(orders, host=facts.episode.host, now=now)
        free = facts.episode.free
        warned = free is not None and "warned" in free.data
        return held or is_approved(wish(facts.episode, step), orders, recent, begun=warned, now=now) or step
    return step


def is_first(step: Step) -> bool:
    """Whether a step may be the first that is done for a free; what is seen dead is started next."""
    if isinstance(step, Advance):
        return step.kind is Kind.FREE and step.stage is Stage.DEAD
    return isinstance(step, Warn | Fence | Stop)


def is_untouched(facts: Facts) -> bool:
    """Whether nothing has been done for an episode but to promise it: no job taken, no container stopped."""
    free, settle, job = facts.episode.free, facts.episode.settle, facts.job
    if free is not None and free.stage is not Stage.PLANNED:
        return False
    if job is not None and job.state is State.FENCING and job.attempt == facts.episode.attempt:
        return False  # it was fenced, and what fenced it ended before it could say so
    return settle is None or settle.stage in (Stage.PLANNED, Stage.ABANDONED)


def target(host: str, handle: str) -> str:
    """How a container is told from every other one of the fleet; its handle survives a restart."""
    return f"{host}/{handle}"


def begins_s(pause: Order, now: float) -> float:
    """In how many seconds a pause begins; one without a beginning began when it was ordered."""
    return (pause.at if pause.since is None else pause.since) - now


def _ends_s(pause: Order, now: float) -> float:
    """In how many seconds a pause ends."""
    return (math.inf if pause.until is None else pause.until) - now


def _is_ended(pause: Order, by: Order) -> bool:
    """Whether a resume ends a pause: that of its number, else each that had begun on its host."""
    if by.ends is not None:
        return by.ends == pause.order_id
    return by.host in (None, pause.host) and begins_s(pause, by.at) <= 0


def _told(order: Order | None) -> str:
    return "nobody armed it" if order is None else f"by {order.who}" + (f": {order.because}" if order.because else "")
