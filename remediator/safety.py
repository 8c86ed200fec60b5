"""Whether what a remedy wants may be begun now: armed or not, paused, braked, cooling down. Pure.

People's orders are kept in the ledger, each with who gave it and why; what stands follows from them alone. Nothing is
armed that nobody armed. Every refusal is a `Wait`: the episode stays open, is looked at again on the timer, and nothing
of it is used up. What has taken a job from its attempt, or stopped a container, is finished whatever is ordered then,
but for a disarming, which ends every act at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpuwarden.job import State
from remediator.plan import Begin, Facts, Fence, Stage, Step, Stop, Wait, Warn


class Act(StrEnum):
    """What can be ordered."""

    ARM = "arm"
    DISARM = "disarm"
    PAUSE = "pause"
    RESUME = "resume"
    BRAKE = "brake"
    RELEASE = "release"


TOPIC: Final[Mapping[Act, str]] = {
    Act.ARM: "arming",
    Act.DISARM: "arming",
    Act.PAUSE: "pause",
    Act.RESUME: "pause",
    Act.BRAKE: "brake",
    Act.RELEASE: "brake",
}
"""Acts of one topic undo one another: of each topic, host and remedy only the newest order can still matter."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order. No host is every host, no remedy every remedy; `until` ends a pause. Times are Unix seconds."""

    act: Act
    at: float
    who: str
    because: str
    host: str | None = None
    remedy: str | None = None
    until: float | None = None

    @property
    def scope(self) -> str:
        """What it is about, in words."""
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
            if each.act in (Act.ARM, Act.DISARM) and each.host in (None, host) and each.remedy in (None, remedy)
        ]
        return about[-1] if about else None

    def armed(self, *, host: str, remedy: str) -> bool:
        """Whether a remedy acts on a host."""
        order = self.arming(host=host, remedy=remedy)
        return order is not None and order.act is Act.ARM

    def pauses(self, *, host: str | None, now: float) -> list[Order]:
        """The pauses in force on a host, or with no host anywhere.

        A pause of every host and one of this host stand beside each other; `resume` for a host ends the second only.
        """
        standing: dict[str | None, Order] = {}
        for order in self.given:
            if order.act is Act.PAUSE:
                standing[order.host] = order
            elif order.act is Act.RESUME and order.host is None:
                standing.clear()
            elif order.act is Act.RESUME:
                standing.pop(order.host, None)
        here = [each for each in standing.values() if host is None or each.host in (None, host)]
        return [each for each in here if each.until is None or each.until > now]

    def brake(self) -> Order | None:
        """The order that latched the brake; `None` while it is not latched."""
        latest = self._brakes()
        return latest if latest is not None and latest.act is Act.BRAKE else None

    def released_at(self) -> float | None:
        """When a person last released the brake: a storm is counted from there."""
        latest = self._brakes()
        return latest.at if latest is not None and latest.act is Act.RELEASE else None

    def _brakes(self) -> Order | None:
        brakes = [each for each in self.given if each.act in (Act.BRAKE, Act.RELEASE)]
        return brakes[-1] if brakes else None


@dataclass(frozen=True, kw_only=True)
class Safeguards:
    """What bounds an armed remediator, from the settings; seconds. A `cooldown_s` of 0 is none."""

    cooldown_s: float = 300.0
    storm_targets: int = 3
    storm_share: float = 0.25
    storm_window_s: float = 600.0

    def storm_above(self, fleet: int | None) -> int:
        """How many distinct targets within the window are still single faults, in a fleet of so many workers.

        With the defaults 3 up to 15 workers, 4 of 16, 25 of 100: a box of one, two or three workers has no storm, for
        its cool-downs bound it; on one of four or eight the fourth container is one too many.
        """
        return max(self.storm_targets, int(self.storm_share * (fleet or 0)))


@dataclass(frozen=True, kw_only=True)
class Recent:
    """What was done lately, as the ledger has it.

    `targets` are the containers that a free was begun for within the storm window, and since the brake was released.
    `freed_s_ago` is how long ago the one at hand was last freed, by the wall clock; negative where that was set back.
    `fleet` is how many workers the executors see together, `None` while none has told.
    """

    targets: frozenset[str] = frozenset()
    freed_s_ago: float | None = None
    fleet: int | None = None


@dataclass(frozen=True, kw_only=True)
class Latch:
    """This one would be a storm: the brake is to be latched, and holds everything that has not begun."""

    because: str


def may_begin(
    orders: Orders, recent: Recent, safeguards: Safeguards, *, host: str, remedy: str, target: str, now: float
) -> Wait | Latch | None:
    """Whether the free of `target` may be begun: `None`, or why not."""
    if not orders.armed(host=host, remedy=remedy):
        return Wait(reason="dry_run", because=f"disarmed just now: {_told(orders.arming(host=host, remedy=remedy))}")
    if (held := may_go_on(orders, host=host, now=now)) is not None:
        return held
    ago_s = recent.freed_s_ago
    if ago_s is not None and abs(ago_s) < safeguards.cooldown_s:
        because = (
            f"it was freed {max(0.0, ago_s):.0f} s ago and cools down for {safeguards.cooldown_s:.0f} s: "
            "what wedges again so soon is not mended by a restart; taken up again by itself afterwards"
        )
        return Wait(reason="cooldown", because=because)
    count, above = len(recent.targets | {target}), safeguards.storm_above(recent.fleet)
    if count > above:
        fleet = "an unknown number of" if recent.fleet is None else f"{recent.fleet}"
        because = (
            f"{count} containers to be freed within {safeguards.storm_window_s:.0f} s, with {fleet} workers; above "
            f"{above} they have one cause, which no restart mends"
        )
        return Latch(because=because)
    return None


def may_go_on(orders: Orders, *, host: str, now: float) -> Wait | None:
    """Whether what is only promised may be begun in earnest: `None`, or why not."""
    brake = orders.brake()
    if brake is not None:
        because = f"the brake is latched: {brake.because}; `gpuwarden brake release` once a person has looked"
        return Wait(reason="brake", because=because)
    pauses = orders.pauses(host=host, now=now)
    if pauses:
        return Wait(
            reason="paused", because=f"paused: {_told(pauses[-1])}; it ends by itself, and `gpuwarden resume` ends it"
        )
    return None


def hold(step: Step, facts: Facts, orders: Orders, recent: Recent, safeguards: Safeguards, *, now: float) -> Step:
    """The step that a remedy chose, or the wait that stands before it.

    What latches the brake passes: it is told as it is begun, in the transaction that would have begun it.
    """
    host = facts.episode.host
    if isinstance(step, Begin):
        verdict = may_begin(
            orders,
            recent,
            safeguards,
            host=host,
            remedy=facts.episode.remedy,
            target=target(host, step.container_handle),
            now=now,
        )
        return verdict if isinstance(verdict, Wait) else step
    if isinstance(step, Warn | Fence | Stop) and is_untouched(facts):
        return may_go_on(orders, host=host, now=now) or step
    return step


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


def _told(order: Order | None) -> str:
    return "nobody armed it" if order is None else f"by {order.who}" + (f": {order.because}" if order.because else "")
