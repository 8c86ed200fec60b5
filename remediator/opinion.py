"""A second opinion: whether Prometheus says of a target now what its alert said, and what follows from that. Pure.

Labels are data: none of them is ever put into an expression. Prometheus tells the rules that it has loaded, and is then
asked for the value of the rule's own expression, unmodified, and for the age of its samples; the target's series is
picked from the answers here. An answer by old samples, of another rule, cut short or not to be read is no answer.

Prometheus hears of a host only what its exporter told at the last scrape. So local evidence remains the gate, and this
can hold an act back and never bring one about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from gpuwarden.errors import GpuwardenError
from remediator import freeing
from remediator.plan import Advance, Episode, Facts, Kind, Stage, Step, Subject, Wait, Withdraw
from remediator.safety import is_untouched

RULES_MAX: Final = 10
"""Rules asked about for one episode."""

AGES: Final[Mapping[Subject, str]] = {
    Subject.WORKER: "time() - timestamp(gpuwarden_worker_info)",
    Subject.SERVER: "time() - timestamp(gpuwarden_server_info)",
    Subject.TENANT: "time() - timestamp(gpuwarden_container_info)",
}
"""How old the newest sample of every worker, server or container is: seconds, by Prometheus's own clock."""


class OpinionError(GpuwardenError):
    """What Prometheus says is no answer."""


class Policy(StrEnum):
    """What a second opinion may do: nothing and is not asked; be recorded; hold by a denial; hold by silence too."""

    IGNORE = "ignore"
    ADVISE = "advise"
    HEED = "heed"
    REQUIRE = "require"


class Verdict(StrEnum):
    """What Prometheus said of a target."""

    CONFIRMS = "confirms"
    DENIES = "denies"
    SILENT = "silent"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one Prometheus said. `source` is its address, without a password."""

    source: str
    verdict: Verdict
    because: str


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """What all of them said: one that confirms is enough, for of two replicas one may lag behind by a scrape."""

    answers: Sequence[Answer]

    @property
    def verdict(self) -> Verdict:
        """The answer that counts."""
        found = {each.verdict for each in self.answers}
        return next((each for each in (Verdict.CONFIRMS, Verdict.DENIES) if each in found), Verdict.SILENT)

    @property
    def because(self) -> str:
        """Who was asked, and what each said."""
        return "; ".join(f"{each.source} {_WORDS[each.verdict]}: {each.because}" for each in self.answers)


_WORDS: Final = {Verdict.CONFIRMS: "confirms", Verdict.DENIES: "denies", Verdict.SILENT: "does not tell"}


def hold(step: Step, facts: Facts, opinion: Opinion | None, policy: Policy) -> Step:
    """The step, or the wait that a second opinion puts before it.

    Silence holds only what nothing was done for yet: a job that was taken from its attempt is not left half taken for
    a Prometheus that is down. A denial holds that too, for it may speak of a target that works again.
    """
    if opinion is None or policy in (Policy.IGNORE, Policy.ADVISE):
        return step
    if opinion.verdict is Verdict.DENIES:
        return _denied(facts, f"Prometheus denies it: {opinion.because}")
    if opinion.verdict is Verdict.SILENT and policy is Policy.REQUIRE and is_untouched(facts):
        return Wait(reason="prometheus_silent", because=f"Prometheus is to confirm it: {opinion.because}")
    return step


def _denied(facts: Facts, because: str) -> Step:
    if facts.episode.free is None:
        return freeing.doubt(facts, "prometheus_denies", because)
    if not freeing.late(facts, facts.free_for_s):
        return Wait(reason="prometheus_denies", because=because)
    if is_untouched(facts):
        return Withdraw(because=f"nothing was done: {because}")
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, because=f"{because}: a person must look")


def judge(values: Sequence[tuple[str, float | None]], age_s: float | None, *, fresh_s: float) -> tuple[Verdict, str]:
    """What each rule's value for the target says, by samples of that age; `None` for a rule that has none.

    A target of which there is no fresh sample is not known to be well: then an expression without it says nothing.
    """
    if age_s is None:
        return Verdict.SILENT, "it has no sample of the target"
    if age_s > fresh_s:
        return Verdict.SILENT, f"its newest sample of the target is {age_s:.0f} s old"
    seen = f"by samples {age_s:.0f} s old"
    for rule, value in values:
        if value is not None:
            return Verdict.CONFIRMS, f"{rule} holds still, at {value:g}, {seen}"
    return Verdict.DENIES, f"{', '.join(sorted({rule for rule, _ in values}))} does not hold any more, {seen}"


# --- answers of Prometheus's HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/)


class _Rule(BaseModel):
    name: str
    query: str
    labels: dict[str, str] = {}


class _Group(BaseModel):
    rules: list[_Rule]


class _Groups(BaseModel):
    groups: list[_Group]


class Answered(BaseModel):
    """What every answer has that is one."""

    status: Literal["success"]
    warnings: list[str] = []


class _Rules(Answered):
    data: _Groups


class _Sample(BaseModel):
    metric: dict[str, str]
    value: tuple[float, float]


class _Vector(BaseModel):
    kind: Literal["vector"] = Field(alias="resultType")
    result: list[_Sample]


class _Values(Answered):
    data: _Vector


_Read = TypeVar("_Read", bound=Answered)


def expressions(answer: bytes, episode: Episode) -> Sequence[tuple[str, str]]:
    """The rules that accused this episode's target and their expressions, as `/api/v1/rules` tells them.

    Raises:
        OpinionError: there are none, or too many, or the answer cannot be read.
    """
    rules = [rule for group in parse(_Rules, answer).data.groups for rule in group.rules]
    its = {
        (rule.name, rule.query)
        for rule in rules
        if rule.name in episode.rules and rule.labels.get("remedy") == episode.remedy
    }
    if not its:
        raise OpinionError(f"it has no rule that accused the target: {', '.join(sorted(episode.rules)) or 'none did'}")
    if len(its) > RULES_MAX:
        raise OpinionError(f"it has {len(its)} rules that accused the target, and is asked for {RULES_MAX} at most")
    return sorted(its)


def value_of(answer: bytes, episode: Episode) -> float | None:
    """The value that a rule's expression has for the target, its very incarnation and attempt; `None` for none.

    Raises:
        OpinionError: the answer cannot be read, or its series do not tell whom they speak of.
    """
    wanted = _identity(episode)
    series = _series(answer)
    for each in series:
        if wanted.items() <= each.metric.items():
            return each.value[1]
    for each in series:
        if lacks := sorted(wanted.keys() - each.metric.keys()):
            raise OpinionError(f"its rule's series have no label {', '.join(lacks)}")
    return None


def age_of(answer: bytes, episode: Episode) -> float | None:
    """How old the newest sample of the target is, whatever its incarnation, seconds; `None` where there is none.

    Raises:
        OpinionError: the answer cannot be read.
    """
    name = _name(episode)
    its = {"host": episode.host, name: episode.worker}
    return min((each.value[1] for each in _series(answer) if its.items() <= each.metric.items()), default=None)


def _identity(episode: Episode) -> dict[str, str]:
    claimed = {"incarnation": episode.incarnation, "job_id": episode.job_id, "attempt": episode.attempt}
    known = {label: str(value) for label, value in claimed.items() if value is not None}
    return {"host": episode.host, _name(episode): episode.worker, **known}


def _name(episode: Episode) -> str:
    return "worker" if episode.subject is Subject.WORKER else "container"


def _series(answer: bytes) -> Sequence[_Sample]:
    return parse(_Values, answer).data.result


def parse(wanted: type[_Read], answer: bytes) -> _Read:
    """An answer as what was wanted.

    Raises:
        OpinionError: it cannot be read, or may not be whole.
    """
    try:
        found = wanted.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise OpinionError(f"its answer cannot be read: {where or 'it'}: {first['msg'][:200]}") from None
    if found.warnings:  # of several stores behind it, one may not have answered
        raise OpinionError(f"it warns that its answer may not be whole: {found.warnings[0][:200]}")
    return found
