"""Deliberate breakages of the alert rules: how many of them do the rules' tests catch? For `python -m bench`.

Every word of every rule that can be changed is, one at a time (tests/alerts/generated.py), beside those that somebody
thought of (tests/alerts/mutants.py). Which survive is said by name; those that nothing can tell from the rule are not
counted.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.figures import BenchError, Figure, Place, figure, progress
from deploy import parts
from tests.alerts import judging
from tests.alerts.generated import planted
from tests.alerts.judging import Breakage, UnsoundError
from tests.alerts.mutants import ALERTS, EQUIVALENT, MUTANTS, RULES


def measure(place: Place) -> Iterator[Figure]:
    """The score of each rule file, and of all of them: per cent of the mutants that are caught.

    Raises:
        PartMissing: there is no promtool.
        BenchError: the tests fail on the rules as they are, or a mutant breaks nothing.
    """
    try:
        yield from _measure(place)
    except UnsoundError as error:
        raise BenchError(str(error)) from error


def _measure(place: Place) -> Iterator[Figure]:
    promtool = parts.find("promtool")
    caught: Counter[str] = Counter()
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        broken = mutants(promtool, Path(folder, "parse"))
        of = Counter(each.rules for each in broken)
        progress(f"mutation, {len(broken)} broken rules, and {len(EQUIVALENT)} that are none")
        for judged in judging.judge_all(broken, promtool, Path(folder)):
            caught[judged.rules] += len(judged.caught)
            done[judged.rules] += len(judged.caught) + len(judged.survived)
            progress(f"mutation, {judged.rules}: {done.total()} of {len(broken)} done, {caught.total()} are caught")
            for name in judged.survived:
                progress(f"mutation, survived: {name}")
            if done[judged.rules] == of[judged.rules]:
                yield _score(judged.rules, caught[judged.rules], of[judged.rules])
    yield _score("all rules", caught.total(), done.total())


def mutants(promtool: Path, room: Path) -> list[Breakage]:
    """All that parse. `room` is made.

    Raises:
        UnsoundError: the text that a mutant breaks is in its rule file no more.
    """
    room.mkdir()
    words = [each for rules in RULES for each in planted(ALERTS / rules) if each.name not in EQUIVALENT]
    thought_of: list[Breakage] = [each for each in MUTANTS if each.name not in {word.name for word in words}]
    if moved_on := [each.name for each in thought_of if not each.applies]:
        found = f"the rules have moved on from what these break: {', '.join(moved_on)}"
        raise judging.UnsoundError(f"{found}; correct them in tests/alerts/mutants.py")
    return judging.parsing([*thought_of, *words], promtool, room)


def _score(what: str, caught: int, of: int) -> Figure:
    return figure("mutation", f"{what}: caught, of {of}", "%", [100 * caught / of])
