"""What the rules make of a corpus of what really happens, beside what people use instead of them today.

`scenario` says what a scenario is, `host` plays one and publishes it as the exporter would, and `judge` asks promtool
what fires.
"""

from collections.abc import Iterator, Sequence

from bench.corpus import scenario_file
from bench.corpus.judge import OURS, POLICY_NAMES, JudgeError, Played, Score, play, score
from bench.corpus.scenario_file import ScenarioError
from bench.figures import BenchError, Figure, figure, progress
from gpuwarden.job import Condition


def measure() -> Iterator[Figure]:
    """Every scenario by every policy; what is marked `not_yet` is told apart for ours.

    Raises:
        BenchError: a scenario cannot be understood, or promtool fails.
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
    for name, found in scores(played):
        yield figure("corpus", f"{name}: false kills", "", [found.false])
        yield figure("corpus", f"{name}: missed, of {found.wedged} wedged jobs", "", [found.missed])
        if name.startswith(OURS):
            yield figure("corpus", f"{name}: missed, of {found.others} others", "", [found.missed_others])
        if found.took_s:
            yield figure("corpus", f"{name}: from wedge to verdict", "s", found.took_s)
            yield figure("corpus", f"{name}: from the earliest moment to verdict", "s", found.late_s)
            yield figure("corpus", f"{name}: the same, evaluations too late", "", found.late_evaluations)


def scores(played: Sequence[Played]) -> Iterator[tuple[str, Score]]:
    """Each policy by its name: ours, ours without what is marked `not_yet` or is left to a budget, and the others."""
    yield f"{OURS}, but for what is marked", score([each for each in played if not each.scenario.not_yet], OURS)
    found_at_once = [
        each for each in played if Condition.BUDGET not in {verdict.condition for verdict in each.scenario.verdicts}
    ]
    yield f"{OURS}, but for what a budget ends", score(found_at_once, OURS)
    yield OURS, score(played, OURS)
    for policy in POLICY_NAMES:
        yield f"{policy} only" if policy != "timeout or idle" else policy, score(played, policy)
