"""Judges scenarios: by the rules that ship, through the real promtool, and by what people use instead of them today.

Every scenario is played in one run. promtool tells which alerts fired and since when, for it prints what a query gives
that is expected to give something else; so what happened is read, and judged here.
"""

import json
import math
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.corpus.host import Key, identities, recycled, series, tally
from bench.corpus.scenario import REMEDIES, TELLING, Scenario, Timeline, Verdict
from deploy.standalone import debian_packages
from gpuwarden.job import Condition
from remediator.plan import BlockRun, LockWorker, Migrate, Wait
from remediator.remedies import wrangle
from testbed.check_release import CHECKOUT, RULES_GLOB

POLICIES: Final = Path(__file__).with_name("policies.rules.yaml")
POLICY_NAMES: Final = ("timeout", "heartbeat", "no step", "idle", "timeout or idle")
TIME_LIMIT_S: Final = 3600
"""After how long the policies of `TIMEOUTS` end any job, as `POLICIES` says."""
TIMEOUTS: Final = ("timeout", "timeout or idle")
OURS: Final = "gpuwarden"
PEOPLE: Final = "people"
"""Whose policy an alert is that only tells them: it acts on nobody."""
TIMEOUT_S: Final = 1800
"""For one run of promtool, which ends one that hangs. All scenarios take minutes on a machine with other work to do."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
HOST_LABELS: Final = ("host", "worker_host", "nodename", "gang")
"""The labels whose values are those of one scenario among all that are played beside each other."""
SAMPLES_MAX: Final = 8_000
UNHEARD_S: Final = 60
RAN: Final = "gpuwarden_job_elapsed_seconds"
NAMING: Final = ("job_id", "attempt", "incarnation")
"""The labels by which an alert says which attempt, or which incarnation, it accuses."""
NAMELESS: Final = ("wrangle", "GpuwardenServerProbeFailing")
"""The remedy, and the alert, for which it says neither: it is for whoever works on a run's items, or for a person."""

JOBS: Final = (Condition.STALL, Condition.GANG, Condition.HEALTH, Condition.DEAD_WORKER, Condition.BUDGET)
"""What goes wrong with jobs, rather than with servers, tenants or hosts."""

_METRIC = re.compile(r"\b(?:gpuwarden_[a-z0-9_]+|up)\b")
_ANSWER = re.compile(r'expr: "[^\n]*# (\d+)", time: [^\n]*\n\s*exp: ?[^\n]*\n\s*got: ?([^\n]*)')
_BROKEN = re.compile(r"rule: \S+, time: .*err: .*")
_SAMPLE = re.compile(r"\{((?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*)\} ([-+0-9.E]+)")
_LABEL = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


class JudgeError(Exception):
    """promtool did not say what was asked of it."""


@dataclass(frozen=True, kw_only=True)
class Fired:
    """An alert that would be acted on: by whose policy, what for, on whom, and when it first fired, seconds.

    `named` are the labels by which it says which attempt, or which incarnation, that is.
    """

    policy: str
    alert: str
    remedy: str
    condition: str
    of: str
    at_s: int
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one policy made of one scenario."""

    policy: str
    false: tuple[Fired, ...]
    found: Mapping[Verdict, Fired]
    missed: tuple[Verdict, ...]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A scenario, what fired in it, and when the job began that each worker has as it ends, seconds."""

    scenario: Scenario
    fired: tuple[Fired, ...]
    began_s: Mapping[str, float] = field(default_factory=dict)

    def wrong(self) -> list[str]:
        """What our rules did otherwise than the scenario wants, a sentence each."""
        ours = [each for each in self.fired if each.policy == OURS]
        people = [each for each in self.fired if each.policy == PEOPLE]
        return [*_wrong(self.scenario, ours), *_wrongly_told(self.scenario, people, _first(ours))]

    def judgement(self, policy: str) -> Judgement:
        """By any policy: whoever is acted on before anything is wrong with it is a false kill."""
        first = _first(each for each in self.fired if each.policy == policy)
        if policy in TIMEOUTS:
            first |= {each.of: each for each in self._ended_at_last(policy) if each.of not in first}
        wanted = _wanted(self.scenario, first)
        false = [each for of, each in first.items() if of not in wanted or each.at_s < wanted[of].since_s]
        found = {verdict: first[of] for of, verdict in wanted.items() if of in first and first[of] not in false}
        gone = {each.of for each in false}
        return Judgement(
            policy=policy,
            false=tuple(false),
            found=found,
            missed=tuple(verdict for of, verdict in wanted.items() if verdict not in found and of not in gone),
        )

    def _ended_at_last(self, policy: str) -> Iterator[Fired]:
        """Whom a time limit would end after the scenario, if he wedged and his job is still there as it ends."""
        for verdict in self.scenario.verdicts:
            for of in (verdict.of, *verdict.or_of):
                began_s = self.began_s.get(of)
                if verdict.condition in JOBS and began_s is not None and began_s <= verdict.due_s:
                    at_s = self.scenario.evaluated_s(began_s + TIME_LIMIT_S)
                    yield Fired(policy=policy, alert="at last", remedy="", condition="", of=of, at_s=at_s)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one policy made of many scenarios: kills of what was sound, wedged jobs it missed, and how long it took.

    `missed_others`, of `others`, are verdicts on servers, tenants, hosts and whoever fails items, for which no other
    policy is made. `late_s` is from the earliest moment at which what is known allows a verdict until it came, and
    `late_evaluations` by how many evaluations that is after the first one of the first scrape that shows it: for ours
    of every verdict, for the others of jobs'.
    """

    false: int
    missed: int
    wedged: int
    missed_others: int
    others: int
    took_s: list[float]
    late_s: list[float]
    late_evaluations: list[int]


def score(played: Sequence[Played], policy: str) -> Score:
    """Sum up one policy."""
    judged = [(each.scenario, each.judgement(policy)) for each in played]
    missed = Counter(verdict.condition in JOBS for _, each in judged for verdict in each.missed)
    wanted = Counter(verdict.condition in JOBS for each in played for verdict in each.scenario.verdicts)
    found = [
        (one, verdict, fired.at_s)
        for one, each in judged
        for verdict, fired in each.found.items()
        if policy == OURS or verdict.condition in JOBS
    ]
    return Score(
        false=sum(len(each.false) for _, each in judged),
        missed=missed[True],
        wedged=wanted[True],
        missed_others=missed[False],
        others=wanted[False],
        took_s=[float(at_s - verdict.since_s) for _, verdict, at_s in found if verdict.condition in JOBS],
        late_s=[float(at_s - verdict.due_s) for _, verdict, at_s in found],
        late_evaluations=[
            max(0, -(-(at_s - one.deadline_s(verdict)) // one.evaluate_s)) for one, verdict, at_s in found
        ],
    )


def play(scenarios: Sequence[Scenario], rules: Sequence[Path] | None = None) -> list[Played]:
    """Play scenarios through promtool, by the rules that ship unless given others.

    Raises:
        PartMissing: there is no promtool.
        JudgeError: it failed, or did not come to an end.
    """
    rules = [*(sorted(CHECKOUT.glob(RULES_GLOB)) if rules is None else rules), POLICIES]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        began_s: dict[int, dict[str, float]] = {}
        files = list(_written(Path(folder), scenarios, rules, metrics(rules), began_s))
        said = _said(debian_packages.find("promtool"), files, folder)
    if broken := _BROKEN.search(said):
        raise JudgeError(f"a rule fails in the corpus: {broken[0]}")
    answers = _ANSWER.findall(said)
    asked = [number for number, each in enumerate(scenarios) for _ in _evaluated(each)]
    if missing := [scenarios[number].name for number in asked if str(number) not in {told for told, _ in answers}]:
        raise JudgeError(f"promtool told nothing about {missing[0]!r}:\n{said[:2000]}")
    fired = [(int(told), each) for told, got in answers for each in _fired(int(told), got)]
    fired = [(told, acted) for told, each in fired if (acted := _acted(scenarios[told], each)) is not None]
    return [
        Played(
            scenario=scenario,
            fired=tuple(each for told, each in fired if told == number),
            began_s=began_s[number],
        )
        for number, scenario in enumerate(scenarios)
    ]


def _said(promtool: Path, files: Sequence[Path], folder: str) -> str:
    """What promtool prints about these test files; what it writes itself it writes into the folder."""
    try:
        return subprocess.run(
            [promtool, "test", "rules", *files],
            env={**debian_packages.env_for_parts(), "GOGC": "400", "GOMAXPROCS": "2", "TMPDIR": folder},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise JudgeError(
            f"{promtool} did not end within {TIMEOUT_S} s and was killed; play fewer scenarios, or with less beside it"
        ) from late


def metrics(rules: Iterable[Path]) -> frozenset[str]:
    """The series of ours that rules name."""
    return frozenset(_METRIC.findall("\n".join(each.read_text(encoding="utf-8") for each in rules)))


def _written(
    folder: Path,
    scenarios: Sequence[Scenario],
    rules: Sequence[Path],
    wanted: frozenset[str],
    began_s: dict[int, dict[str, float]],
) -> Iterator[Path]:
    """A test file for each interval of evaluation, for promtool knows one a file; and when the last jobs began."""
    files: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for fleet in _fleets(scenarios):
        one = scenarios[fleet[0]]
        its = {number: series(scenarios[number], wanted=wanted) for number in fleet}
        began_s |= {number: _began_s(scenarios[number], found) for number, found in its.items()}
        files[one.evaluate_s].append(
            {
                "interval": f"{one.scrape_s}s",
                "input_series": [each for number in fleet for each in _series(number, its[number])],
                "promql_expr_test": [each for number in fleet for each in _asked(number, scenarios[number])],
            }
        )
    for evaluate_s, cases in files.items():
        file = folder / f"{evaluate_s}.test.yaml"
        test = {"rule_files": list(map(str, rules)), "evaluation_interval": f"{evaluate_s}s", "tests": cases}
        file.write_text(json.dumps(test))  # which is YAML
        yield file


def _fleets(scenarios: Sequence[Scenario]) -> Iterator[list[int]]:
    """Which scenarios are played side by side, as one fleet under one Prometheus, which is much quicker.

    Their hosts are told apart by their names. Where somebody is not heard of, it matters who else is: those are played
    alone. promtool takes 10,000 samples for one query, of which the rule about lost nodes wants two every 10 s.
    """
    together: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, scenario in sorted(enumerate(scenarios), key=lambda each: each[1].plays_s):
        if scenario.prometheus or any(map(_falls_silent, scenario.hosts.values())):
            yield [number]
            continue
        fleet = together[scenario.scrape_s, scenario.evaluate_s]
        if fleet and (len(fleet) + 2) * scenario.plays_s / 10 * 2 > SAMPLES_MAX:
            yield fleet
            fleet = together[scenario.scrape_s, scenario.evaluate_s] = []
        fleet.append(number)
    yield from together.values()


def _falls_silent(timeline: Timeline) -> bool:
    """Whether a host is not heard of for so long that it matters."""
    ends = [*(since_s for since_s, _ in timeline[1:]), math.inf]
    unheard = ("unscraped", "unwatched", "frozen", "asleep")
    return any(
        state in unheard and end_s - since_s > UNHEARD_S for (since_s, state), end_s in zip(timeline, ends, strict=True)
    )


def _began_s(scenario: Scenario, its: Mapping[Key, Sequence[float | str | None]]) -> dict[str, float]:
    """When the job began that each worker has as the scenario ends, by the last scrape of it."""
    last = {dict(labels)["worker"]: (found[-1], len(found) - 1) for (name, labels), found in its.items() if name == RAN}
    return {
        worker: number * scenario.scrape_s - ran_s
        for worker, (ran_s, number) in last.items()
        if isinstance(ran_s, float) and not math.isnan(ran_s)
    }


def _series(number: int, its: Mapping[Key, Sequence[float | str | None]]) -> Iterator[dict[str, str]]:
    for (name, labels), found in its.items():
        written = (
            f"{label}={json.dumps(_host(number, value) if label in HOST_LABELS else value)}" for label, value in labels
        )
        yield {"series": f"{name}{{{', '.join(written)}}}", "values": values(found)}


def _host(number: int, name: str) -> str:
    """A host of one scenario in the fleet of all of them."""
    return f"{number}-{name}"


def _evaluated(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """From when to when Prometheus runs: where it is down it decides nothing."""
    since_s: int | None = 0
    for at_s, state in (*scenario.prometheus, (scenario.plays_s, "down")):
        if state == "down" and since_s is not None:
            yield since_s, at_s
        since_s = None if state == "down" else at_s if since_s is None else since_s


def _asked(number: int, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """When each alert first fired, for each time that Prometheus runs; and always something."""
    for since_s, until_s in _evaluated(scenario):
        window_s = until_s - since_s + 1  # a range leaves its beginning out in newer versions
        alerts = f'ALERTS{{alertstate="firing", host=~"{_host(number, ".*")}"}}'
        firing = f"min_over_time(timestamp({alerts})[{window_s}s:{scenario.evaluate_s}s])"
        yield {"expr": f"{firing} or vector(-1) # {number}", "eval_time": f"{until_s}s", "exp_samples": []}


def values(found: Sequence[float | str | None]) -> str:
    """Samples as promtool reads them; what goes on by equal whole numbers as one."""
    written = []
    start = 0
    while start < len(found):
        first = found[start]
        end = start + 1
        step = 0
        if isinstance(first, float):
            following = found[end] if end < len(found) else None
            step = int(following - first) if isinstance(following, float) and (following - first).is_integer() else 0
            while first.is_integer() and end < len(found) and found[end] == first + step * (end - start):
                end += 1
        elif first is None:
            while end < len(found) and found[end] is None:
                end += 1
        more = end - start - 1
        if first is None:
            written.append(f"_x{more + 1}")
        elif isinstance(first, str):
            written.append(first)
        elif math.isnan(first):
            written.append("NaN")
        else:
            figure = str(int(first)) if first.is_integer() else repr(first)
            written.append(f"{figure}{step:+d}x{more}" if more else figure)
        start = end
    return " ".join(written)


def accuses(labels: Mapping[str, str], *, at_s: int) -> Fired | None:
    """Who does what to whom, by the labels of an alert that first fired at that second; `None` where nobody does."""
    remedy = labels.get("remedy", "")
    policy = OURS if remedy else PEOPLE if labels.get("alertname") in TELLING else labels.get("policy")
    if policy is None:
        return None
    target = REMEDIES.get(remedy) or TELLING.get(labels["alertname"], "worker")
    of = labels.get(target, f"nobody: no label {target}")
    if target == "gpu":
        of = f"{labels.get('host', 'nobody: no label host')}/{of.removeprefix('GPU-')}"
    return Fired(
        policy=policy, alert=labels["alertname"], remedy=remedy, condition=labels.get("condition", ""),
        of=of, at_s=at_s,
        named={name: labels[name] for name in NAMING if name in labels},
    )  # fmt: skip


def _fired(number: int, got: str) -> Iterator[Fired]:
    for labels, value in _SAMPLE.findall(got):
        fired = accuses(dict(_LABEL.findall(labels)), at_s=int(float(value)))
        if fired is not None:
            yield replace(fired, of=fired.of.removeprefix(_host(number, "")))


def _acted(scenario: Scenario, fired: Fired) -> Fired | None:
    """An alert from when it is acted on: of those over their VRAM budgets the remedy chooses one; `None` for never."""
    if fired.remedy != "recycle_container":
        return fired
    asked = [
        at_s
        for since_s, until_s in _evaluated(scenario)
        for at_s in range(since_s, until_s + 1)
        if at_s >= fired.at_s and at_s % scenario.evaluate_s == 0
    ]
    at_s = recycled(scenario, fired.of, asked)
    return None if at_s is None else replace(fired, at_s=at_s)


def _first(fired: Iterable[Fired]) -> dict[str, Fired]:
    """Of each target, the first: it is acted on once, and what fires about it afterwards is of the same wedge."""
    first: dict[str, Fired] = {}
    for each in sorted(fired, key=lambda each: (each.at_s, each.alert)):
        first.setdefault(each.of, each)
    return first


def _wanted(scenario: Scenario, first: Mapping[str, Fired]) -> dict[str, Verdict]:
    """Each verdict by whom it is of: where any of several will do, of the first that was acted on."""
    found = {}
    for each in scenario.verdicts:
        hit = [first[of] for of in (each.of, *each.or_of) if of in first]
        of = min(hit, key=lambda one: one.at_s).of if hit else each.of
        found[of] = each
    return found


def _wrong(scenario: Scenario, fired: Sequence[Fired]) -> Iterator[str]:
    first = _first(fired)
    wanted = _wanted(scenario, first)
    for of, each in first.items():
        if of not in wanted:
            yield f"{each.alert} acts on {of} at {each.at_s}s, with which nothing is wrong"
    for of, verdict in wanted.items():
        if of not in first:
            yield f"nothing acts on {' or '.join((verdict.of, *verdict.or_of))}, which is due at {verdict.due_s}s"
            continue
        acts, at_s, last_s = f"{first[of].alert} acts on {of}", first[of].at_s, scenario.deadline_s(verdict)
        said = [f"{one.remedy} for {one.condition}" for one in fired if (one.of, one.at_s) == (of, at_s)]
        if at_s < verdict.due_s:
            yield f"{acts} at {at_s}s, which is due at {verdict.due_s}s and not before"
        elif at_s > last_s:
            yield f"{acts} at {at_s}s, which is late: it is due at {verdict.due_s}s, to be told by {last_s}s"
        elif f"{verdict.remedy} for {verdict.condition}" not in said:
            yield f"{acts}: {', '.join(said)}; {verdict.remedy} for {verdict.condition} is wanted"
        elif verdict.then and (decided := _decided(scenario, of, at_s)) != verdict.then:
            yield f"{acts}, and then is decided: {decided}; {verdict.then} is wanted"
        else:
            yield from _wrongly_named(scenario, [one for one in fired if (one.of, one.at_s) == (of, at_s)])


def _decided(scenario: Scenario, of: str, at_s: int) -> str:
    """What the remediator of its host decides about a worker and its run, by the counts of that second."""
    (program,) = [each for each in scenario.programs if each.name == of]
    verdict = wrangle.classify(tally(scenario, program.run, at_s), wrangle.Rules(), host=program.host)
    match verdict:
        case BlockRun():
            return "block"
        case LockWorker() | Migrate():
            word = "lock" if isinstance(verdict, LockWorker) else "move"
            return word if verdict.worker == of else f"{word} of {verdict.worker}"
        case Wait():
            return "wait"
    return "leave"


def _wrongly_told(scenario: Scenario, fired: Sequence[Fired], acted: Mapping[str, Fired]) -> Iterator[str]:
    """What people are told of somebody after he was `acted` on is of the same wedge."""
    first: dict[tuple[str, str], Fired] = {}
    for each in sorted(fired, key=lambda each: each.at_s):
        first.setdefault((each.alert, each.of), each)
    wanted = {(each.alert, each.of): each for each in scenario.told}
    for whose, each in first.items():
        if whose not in wanted and (each.of not in acted or each.at_s <= acted[each.of].at_s):
            yield f"{each.alert} tells of {each.of} at {each.at_s}s, of which nothing is to be told"
    for whose, told in wanted.items():
        found = first.get(whose)
        if found is None:
            yield f"{told.alert} tells nobody of {told.of}, which is due at {told.due_s}s"
        elif not told.due_s <= found.at_s <= scenario.deadline_s(told):
            by = f"due at {told.due_s}s, to be told by {scenario.deadline_s(told)}s"
            yield f"{found.alert} tells of {found.of} at {found.at_s}s; it is {by}"
        else:
            yield from _wrongly_named(scenario, [found])


def _wrongly_named(scenario: Scenario, fired: Sequence[Fired]) -> Iterator[str]:
    """Whoever is accused is to be the one that is there: what names another attempt is dropped, or hits it."""
    for each in fired:
        there = identities(scenario, each.at_s).get(each.of, {})
        if each.remedy not in NAMELESS and each.alert not in NAMELESS and each.named != there:
            yield f"{each.alert} names {_identity(each.named)} of {each.of} at {each.at_s}s; it is {_identity(there)}"


def _identity(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {labels[name]}" for name in NAMING if name in labels) or "nobody"
