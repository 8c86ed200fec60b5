"""Judge the alert rules, and common alternatives to them, by a corpus of scenarios.

`scenario` defines a scenario, `host` plays it and publishes the exporter's series, and `judge` runs promtool. `page`
writes the words of scenarios and the results.
"""

from collections.abc import Iterator, Sequence

from bench.corpus import page, scenario_file
from bench.corpus.judge import OURS, POLICY_NAMES, JudgeError, Played, Score, play, score
from bench.corpus.scenario_file import ScenarioError
from bench.figures import BenchError, Figure, figure, progress
from gpuwarden.job import Condition


def measure() -> Iterator[Figure]:
    """Judge every scenario by every policy, and write the results into bench/corpus/README.md.

    Raises:
        BenchError: a scenario is invalid, or promtool fails.
    """
    try:
        scenarios = scenario_file.read()
        progress(f"corpus, {len(scenarios)} scenarios")
        played = play(scenarios)
    except (ScenarioError, JudgeError) as error:
        raise BenchError(str(error)) from error
    for each in played:
        marked = "not yet" if each.scenario.not_yet else "wrong"
        for wrong in each.wrong():
            progress(f"{marked}: {each.scenario.place}: {wrong}")
    found_by_policy = list(scores(played))
    page.write_results(played, found_by_policy)
    for name, found in found_by_policy:
        yield figure("corpus", f"{name}: false kills", "", [found.false])
        yield figure("corpus", f"{name}: missed, of {found.jobs} jobs", "", [found.missed])
        if name.startswith(OURS):
            yield figure("corpus", f"{name}: missed, of {found.others} others", "", [found.missed_others])
        if found.took_s:
            yield figure("corpus", f"{name}: from fault to verdict", "s", found.took_s)
            yield figure("corpus", f"{name}: from the earliest moment to verdict", "s", found.late_s)
            yield figure("corpus", f"{name}: the same, evaluations too late", "", found.late_evaluations)


def scores(played: Sequence[Played]) -> Iterator[tuple[str, Score]]:
    """Score of each policy; for ours also without `not_yet` and without budget verdicts."""
    yield f"{OURS}, without not_yet", score([each for each in played if not each.scenario.not_yet], OURS)
    without_budget = [
        each for each in played if Condition.BUDGET not in {verdict.condition for verdict in each.scenario.verdicts}
    ]
    yield f"{OURS}, without budget", score(without_budget, OURS)
    yield OURS, score(played, OURS)
    for policy in POLICY_NAMES:
        yield f"{policy} only" if policy != "timeout or idle" else policy, score(played, policy)
