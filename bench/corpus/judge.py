"""Judge scenarios by our rules and by common alternatives, with the real promtool.

One run of promtool plays all scenarios. The expected result of each query is wrong on purpose, so that promtool prints
the actual one: which alerts fired, and when.
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

from bench.corpus.host import Key, identities, recycle_second, series, tally
from bench.corpus.scenario import NOTICES, REMEDIES, Scenario, Timeline, Verdict
from deploy.standalone import debian_packages
from gpuwarden.job import Condition
from remediator.plan import BlockRun, LockWorker, Migrate, Wait
from remediator.remedies import wrangle
from testbed.check_release import CHECKOUT, RULES_GLOB

POLICIES: Final = Path(__file__).with_name("policies.rules.yaml")
POLICY_NAMES: Final = ("timeout", "heartbeat", "no step", "idle", "timeout or idle")
TIME_LIMIT_S: Final = 3600
"""Job timeout of the policies in `TIMEOUTS`, as in `POLICIES`."""
TIMEOUTS: Final = ("timeout", "timeout or idle")
OURS: Final = "gpuwarden"
PEOPLE: Final = "people"
"""Policy of alerts without a remedy."""
TIMEOUT_S: Final = 1800
"""For one run of promtool, which takes minutes on a busy machine."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - `TemporaryDirectory` makes a private folder in it
HOST_LABELS: Final = ("host", "worker_host", "nodename", "gang")
"""Labels whose values get the number of their scenario as a prefix."""
SAMPLES_MAX: Final = 8_000
SILENCE_S: Final = 60
RAN: Final = "gpuwarden_job_elapsed_seconds"
NAMING: Final = ("job_id", "attempt", "incarnation")
"""Labels that identify an attempt or an incarnation."""
NAMELESS: Final = ("wrangle", "GpuwardenServerProbeFailing")
"""A remedy and an alert without these labels."""

JOBS: Final = (Condition.STALL, Condition.GANG, Condition.HEALTH, Condition.DEAD_WORKER, Condition.BUDGET)
"""Conditions of jobs; the others are of servers, tenants and hosts."""

_METRIC = re.compile(r"\b(?:gpuwarden_[a-z0-9_]+|up)\b")
_ANSWER = re.compile(r'expr: "[^\n]*# (\d+)", time: [^\n]*\n\s*exp: ?[^\n]*\n\s*got: ?([^\n]*)')
_BROKEN = re.compile(r"rule: \S+, time: .*err: .*")
_SAMPLE = re.compile(r"\{((?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*)\} ([-+0-9.E]+)")
_LABEL = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


class JudgeError(Exception):
    """promtool or Prometheus failed."""


@dataclass(frozen=True, kw_only=True)
class Fired:
    """An alert of one policy, its target (`of`), and its first second; `named` has its labels of `NAMING`."""

    policy: str
    alert: str
    remedy: str
    condition: str
    of: str
    at_s: int
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Result of one policy for one scenario."""

    policy: str
    false: tuple[Fired, ...]
    found: Mapping[Verdict, Fired]
    missed: tuple[Verdict, ...]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A scenario, its alerts, and the start of each worker's last job, seconds."""

    scenario: Scenario
    fired: tuple[Fired, ...]
    began_s: Mapping[str, float] = field(default_factory=dict)

    def wrong(self) -> list[str]:
        """Faults of our rules, one sentence each."""
        ours = [each for each in self.fired if each.policy == OURS]
        people = [each for each in self.fired if each.policy == PEOPLE]
        return [*_check_verdicts(self.scenario, ours), *_check_notices(self.scenario, people, _first_by_target(ours))]

    def judgement(self, policy: str) -> Judgement:
        """Judge any policy: an action before a fault is a false kill."""
        first = _first_by_target(each for each in self.fired if each.policy == policy)
        if policy in TIMEOUTS:
            first |= {each.of: each for each in self._late_timeouts(policy) if each.of not in first}
        expected = _expected_verdicts(self.scenario, first)
        false = [each for of, each in first.items() if of not in expected or each.at_s < expected[of].since_s]
        found = {verdict: first[of] for of, verdict in expected.items() if of in first and first[of] not in false}
        gone = {each.of for each in false}
        return Judgement(
            policy=policy,
            false=tuple(false),
            found=found,
            missed=tuple(verdict for of, verdict in expected.items() if verdict not in found and of not in gone),
        )

    def _late_timeouts(self, policy: str) -> Iterator[Fired]:
        """Faulty jobs that are left at the end of the scenario, and that a time limit would end later."""
        for verdict in self.scenario.verdicts:
            for of in (verdict.of, *verdict.or_of):
                began_s = self.began_s.get(of)
                if verdict.condition in JOBS and began_s is not None and began_s <= verdict.due_s:
                    at_s = self.scenario.evaluated_s(began_s + TIME_LIMIT_S)
                    yield Fired(policy=policy, alert="at last", remedy="", condition="", of=of, at_s=at_s)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of one policy for many scenarios.

    Attributes:
        false: number of kills without a fault.
        missed: number of the faulty `jobs` without an action.
        jobs: number of verdicts on jobs.
        missed_others: number of the `others` without an action.
        others: number of verdicts on servers, tenants, hosts and items, which only our rules cover.
        took_s: time from fault to action, for jobs.
        late_s: time from the earliest possible moment to the action; of other policies only for jobs.
        late_evaluations: number of evaluations after the first one that can show the fault.
    """

    false: int
    missed: int
    jobs: int
    missed_others: int
    others: int
    took_s: list[float]
    late_s: list[float]
    late_evaluations: list[int]


def score(played: Sequence[Played], policy: str) -> Score:
    """Summarise one policy."""
    judged = [(each.scenario, each.judgement(policy)) for each in played]
    missed = Counter(verdict.condition in JOBS for _, each in judged for verdict in each.missed)
    expected = Counter(verdict.condition in JOBS for each in played for verdict in each.scenario.verdicts)
    found = [
        (one, verdict, fired.at_s)
        for one, each in judged
        for verdict, fired in each.found.items()
        if policy == OURS or verdict.condition in JOBS
    ]
    return Score(
        false=sum(len(each.false) for _, each in judged),
        missed=missed[True],
        jobs=expected[True],
        missed_others=missed[False],
        others=expected[False],
        took_s=[float(at_s - verdict.since_s) for _, verdict, at_s in found if verdict.condition in JOBS],
        late_s=[float(at_s - verdict.due_s) for _, verdict, at_s in found],
        late_evaluations=[
            max(0, -(-(at_s - one.deadline_s(verdict)) // one.evaluate_s)) for one, verdict, at_s in found
        ],
    )


def play(scenarios: Sequence[Scenario], rules: Sequence[Path] | None = None) -> list[Played]:
    """Play scenarios with promtool.

    Args:
        scenarios: to play.
        rules: rule files; ours by default.

    Raises:
        PartMissing: promtool is not installed.
        JudgeError: it failed or timed out.
    """
    rules = [*(sorted(CHECKOUT.glob(RULES_GLOB)) if rules is None else rules), POLICIES]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        began_s: dict[int, dict[str, float]] = {}
        files = list(_write_tests(Path(folder), scenarios, rules, metrics(rules), began_s))
        output = _run_promtool(debian_packages.find("promtool"), files, folder)
    if broken := _BROKEN.search(output):
        raise JudgeError(f"a rule fails in the corpus: {broken[0]}")
    answers = _ANSWER.findall(output)
    queried = [number for number, each in enumerate(scenarios) for _ in _evaluated_ranges(each)]
    if missing := [scenarios[number].name for number in queried if str(number) not in {of for of, _ in answers}]:
        raise JudgeError(f"promtool printed no result for {missing[0]!r}:\n{output[:2000]}")
    fired = [(int(of), each) for of, got in answers for each in _parse_fired(int(of), got)]
    fired = [(of, acted) for of, each in fired if (acted := _first_action(scenarios[of], each)) is not None]
    return [
        Played(
            scenario=scenario,
            fired=tuple(each for of, each in fired if of == number),
            began_s=began_s[number],
        )
        for number, scenario in enumerate(scenarios)
    ]


def _run_promtool(promtool: Path, files: Sequence[Path], folder: str) -> str:
    """Return promtool's output for test files; its own files go to the folder."""
    try:
        return subprocess.run(
            [promtool, "test", "rules", *files],
            env={**debian_packages.env_for_parts(), "GOGC": "400", "GOMAXPROCS": "2", "TMPDIR": folder},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise JudgeError(
            f"{promtool} was killed after {TIMEOUT_S} s: play fewer scenarios or stop other programs"
        ) from late


def metrics(rules: Iterable[Path]) -> frozenset[str]:
    """Names of our series in rules."""
    return frozenset(_METRIC.findall("\n".join(each.read_text(encoding="utf-8") for each in rules)))


def _write_tests(
    folder: Path,
    scenarios: Sequence[Scenario],
    rules: Sequence[Path],
    wanted: frozenset[str],
    began_s: dict[int, dict[str, float]],
) -> Iterator[Path]:
    """Write a test file per evaluation interval, and set `began_s`."""
    files: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for fleet in _fleets(scenarios):
        one = scenarios[fleet[0]]
        its = {number: series(scenarios[number], wanted=wanted) for number in fleet}
        began_s |= {number: _job_starts(scenarios[number], found) for number, found in its.items()}
        files[one.evaluate_s].append(
            {
                "interval": f"{one.scrape_s}s",
                "input_series": [each for number in fleet for each in _input_series(number, its[number])],
                "promql_expr_test": [each for number in fleet for each in _queries(number, scenarios[number])],
            }
        )
    for evaluate_s, cases in files.items():
        file = folder / f"{evaluate_s}.test.yaml"
        test = {"rule_files": list(map(str, rules)), "evaluation_interval": f"{evaluate_s}s", "tests": cases}
        file.write_text(json.dumps(test))  # which is YAML
        yield file


def _fleets(scenarios: Sequence[Scenario]) -> Iterator[list[int]]:
    """Group scenarios to play as one fleet under one Prometheus, which is much faster.

    A scenario with a silent host is played alone, because the other hosts matter there. promtool allows 10,000 samples
    per query, and the rule about lost hosts needs two every 10 s.
    """
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, scenario in sorted(enumerate(scenarios), key=lambda each: each[1].plays_s):
        if scenario.prometheus or any(map(_has_silence, scenario.hosts.values())):
            yield [number]
            continue
        fleet = groups[scenario.scrape_s, scenario.evaluate_s]
        if fleet and (len(fleet) + 2) * scenario.plays_s / 10 * 2 > SAMPLES_MAX:
            yield fleet
            fleet = groups[scenario.scrape_s, scenario.evaluate_s] = []
        fleet.append(number)
    yield from groups.values()


def _has_silence(timeline: Timeline) -> bool:
    """Whether a host sends nothing for longer than `SILENCE_S`."""
    ends = [*(since_s for since_s, _ in timeline[1:]), math.inf]
    silent = ("unscraped", "unwatched", "frozen", "asleep")
    return any(
        state in silent and end_s - since_s > SILENCE_S for (since_s, state), end_s in zip(timeline, ends, strict=True)
    )


def _job_starts(scenario: Scenario, its: Mapping[Key, Sequence[float | str | None]]) -> dict[str, float]:
    """Start of the last job of each worker, seconds."""
    last = {dict(labels)["worker"]: (found[-1], len(found) - 1) for (name, labels), found in its.items() if name == RAN}
    return {
        worker: number * scenario.scrape_s - ran_s
        for worker, (ran_s, number) in last.items()
        if isinstance(ran_s, float) and not math.isnan(ran_s)
    }


def _input_series(number: int, its: Mapping[Key, Sequence[float | str | None]]) -> Iterator[dict[str, str]]:
    for (name, labels), found in its.items():
        written = (
            f"{label}={json.dumps(_host(number, value) if label in HOST_LABELS else value)}" for label, value in labels
        )
        yield {"series": f"{name}{{{', '.join(written)}}}", "values": values(found)}


def _host(number: int, name: str) -> str:
    """Name of a scenario's host in the fleet."""
    return f"{number}-{name}"


def _evaluated_ranges(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Start and end of each run of Prometheus, seconds."""
    since_s: int | None = 0
    for at_s, state in (*scenario.prometheus, (scenario.plays_s, "down")):
        if state == "down" and since_s is not None:
            yield since_s, at_s
        since_s = None if state == "down" else at_s if since_s is None else since_s


def _queries(number: int, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Query the first second of each alert in each run of Prometheus; the result is never empty."""
    for since_s, until_s in _evaluated_ranges(scenario):
        window_s = until_s - since_s + 1  # newer versions exclude the start of a range
        alerts = f'ALERTS{{alertstate="firing", host=~"{_host(number, ".*")}"}}'
        firing = f"min_over_time(timestamp({alerts})[{window_s}s:{scenario.evaluate_s}s])"
        yield {"expr": f"{firing} or vector(-1) # {number}", "eval_time": f"{until_s}s", "exp_samples": []}


def values(found: Sequence[float | str | None]) -> str:
    """Write samples in promtool's notation; equal whole steps are one term."""
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


def parse_alert(labels: Mapping[str, str], *, at_s: int) -> Fired | None:
    """Read the policy, remedy and target of an alert that first fired at that second; `None` if it has no policy."""
    remedy = labels.get("remedy", "")
    policy = OURS if remedy else PEOPLE if labels.get("alertname") in NOTICES else labels.get("policy")
    if policy is None:
        return None
    target = REMEDIES.get(remedy) or NOTICES.get(labels["alertname"], "worker")
    of = labels.get(target, f"unknown: no label {target}")
    if target == "gpu":
        of = f"{labels.get('host', 'unknown: no label host')}/{of.removeprefix('GPU-')}"
    return Fired(
        policy=policy, alert=labels["alertname"], remedy=remedy, condition=labels.get("condition", ""),
        of=of, at_s=at_s,
        named={name: labels[name] for name in NAMING if name in labels},
    )  # fmt: skip


def _parse_fired(number: int, got: str) -> Iterator[Fired]:
    for labels, value in _SAMPLE.findall(got):
        fired = parse_alert(dict(_LABEL.findall(labels)), at_s=int(float(value)))
        if fired is not None:
            yield replace(fired, of=fired.of.removeprefix(_host(number, "")))


def _first_action(scenario: Scenario, fired: Fired) -> Fired | None:
    """Return the alert at its first action, if any: `recycle_container` chooses one of several containers."""
    if fired.remedy != "recycle_container":
        return fired
    evaluated = [
        at_s
        for since_s, until_s in _evaluated_ranges(scenario)
        for at_s in range(since_s, until_s + 1)
        if at_s >= fired.at_s and at_s % scenario.evaluate_s == 0
    ]
    at_s = recycle_second(scenario, fired.of, evaluated)
    return None if at_s is None else replace(fired, at_s=at_s)


def _first_by_target(fired: Iterable[Fired]) -> dict[str, Fired]:
    """First alert of each target; later ones belong to the same fault."""
    first: dict[str, Fired] = {}
    for each in sorted(fired, key=lambda each: (each.at_s, each.alert)):
        first.setdefault(each.of, each)
    return first


def _expected_verdicts(scenario: Scenario, first: Mapping[str, Fired]) -> dict[str, Verdict]:
    """Verdicts by target; of alternative targets, the first with an action."""
    found = {}
    for each in scenario.verdicts:
        hit = [first[of] for of in (each.of, *each.or_of) if of in first]
        of = min(hit, key=lambda one: one.at_s).of if hit else each.of
        found[of] = each
    return found


def _check_verdicts(scenario: Scenario, fired: Sequence[Fired]) -> Iterator[str]:
    first = _first_by_target(fired)
    expected = _expected_verdicts(scenario, first)
    for of, each in first.items():
        if of not in expected:
            yield f"{each.alert} acts on {of} at {each.at_s}s, but {of} has no fault"
    for of, verdict in expected.items():
        if of not in first:
            yield f"no action on {' or '.join((verdict.of, *verdict.or_of))}, due at {verdict.due_s}s"
            continue
        acts, at_s, last_s = f"{first[of].alert} acts on {of}", first[of].at_s, scenario.deadline_s(verdict)
        actions = [f"{one.remedy} for {one.condition}" for one in fired if (one.of, one.at_s) == (of, at_s)]
        if at_s < verdict.due_s:
            yield f"{acts} at {at_s}s, too early: due at {verdict.due_s}s"
        elif at_s > last_s:
            yield f"{acts} at {at_s}s, too late: due at {verdict.due_s}s, at the latest at {last_s}s"
        elif f"{verdict.remedy} for {verdict.condition}" not in actions:
            yield f"{acts}: {', '.join(actions)} instead of {verdict.remedy} for {verdict.condition}"
        elif verdict.then and (decision := _decide(scenario, of, at_s)) != verdict.then:
            yield f"{acts}, and decides {decision} instead of {verdict.then}"
        else:
            yield from _check_names(scenario, [one for one in fired if (one.of, one.at_s) == (of, at_s)])


def _decide(scenario: Scenario, of: str, at_s: int) -> str:
    """The remediator's decision about a worker and its run at that second."""
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


def _check_notices(scenario: Scenario, fired: Sequence[Fired], acted: Mapping[str, Fired]) -> Iterator[str]:
    """Check alerts without a remedy. After an action on the target they belong to the same fault."""
    first: dict[tuple[str, str], Fired] = {}
    for each in sorted(fired, key=lambda each: each.at_s):
        first.setdefault((each.alert, each.of), each)
    expected = {(each.alert, each.of): each for each in scenario.notices}
    for key, each in first.items():
        if key not in expected and (each.of not in acted or each.at_s <= acted[each.of].at_s):
            yield f"{each.alert} fires for {each.of} at {each.at_s}s, which is not expected"
    for key, notice in expected.items():
        found = first.get(key)
        deadline_s = scenario.deadline_s(notice)
        if found is None:
            yield f"{notice.alert} does not fire for {notice.of}, due at {notice.due_s}s"
        elif found.at_s < notice.due_s:
            yield f"{found.alert} fires for {found.of} at {found.at_s}s, too early: due at {notice.due_s}s"
        elif found.at_s > deadline_s:
            due = f"due at {notice.due_s}s, at the latest at {deadline_s}s"
            yield f"{found.alert} fires for {found.of} at {found.at_s}s, too late: {due}"
        else:
            yield from _check_names(scenario, [found])


def _check_names(scenario: Scenario, fired: Sequence[Fired]) -> Iterator[str]:
    """Check that alerts name the current attempt or incarnation; the remediator drops an alert with another one."""
    for each in fired:
        current = identities(scenario, each.at_s).get(each.of, {})
        if each.remedy not in NAMELESS and each.alert not in NAMELESS and each.named != current:
            names = f"{each.alert} names {_identity(each.named)} for {each.of} at {each.at_s}s"
            yield f"{names} instead of {_identity(current)}"


def _identity(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {labels[name]}" for name in NAMING if name in labels) or "no attempt"
