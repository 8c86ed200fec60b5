"""`python -m bench.corpus.page` writes what came of the corpus into docs/corpus.md, between its marks."""

import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from bench.corpus import scenario, scores
from bench.corpus.judge import OURS, PEOPLE, Played, play
from bench.corpus.scenario import (
    DECIDED,
    DOINGS,
    GPU_STATES,
    HOST_STATES,
    INSTANCE_STATES,
    PROMETHEUS_STATES,
    REMEDIES,
    TELLING,
    UNREAD,
    Condition,
    Doing,
    Process,
)
from exporter.model.readings import THROTTLE_REASONS
from gpuwarden.job import JobClass, Phase, Trip
from testbed.check_release import CHECKOUT

PAGE: Final = CHECKOUT / "docs" / "corpus.md"
BEGIN: Final = "<!-- Below: written by `python -m bench.corpus.page`. -->"
END: Final = "<!-- Above: written by `python -m bench.corpus.page`. -->"


def render(played: Sequence[Played], page: str) -> str:
    """The page with what came of these scenarios."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([before + BEGIN, "", *_lines(played), "", END + after])


def _lines(played: Sequence[Played]) -> Iterator[str]:
    files = Counter(each.scenario.place.split(":")[0] for each in played)
    yield (
        f"{len(played)} scenarios: " + ", ".join(f"{count} in `{file}`" for file, count in sorted(files.items())) + "."
    )
    yield ""
    yield from _table(played)
    yield ""
    wanted = [(each, told) for each in played for told in each.scenario.told]
    heard = sum(
        any((one.policy, one.alert, one.of) == (PEOPLE, told.alert, told.of) for one in each.fired)
        for each, told in wanted
    )
    yield f"Of what nobody may act on, people are told of {heard} of {len(wanted)}."
    yield ""
    marked = [each for each in played if each.scenario.not_yet]
    yield "### Not yet"
    yield ""
    for each in marked:
        file, today = each.scenario.place.split(":")[0], "; ".join(each.wrong())
        yield f"- **{each.scenario.name}** (`{file}`). {each.scenario.not_yet} Today: {today}."
    if not marked:
        yield "None is marked so."
    yield ""
    yield "### What a program can do"
    yield ""
    yield "| word | what it means |"
    yield "|---|---|"
    for word, doing in DOINGS.items():
        yield f"| `{word}` | {', '.join(_said(doing)) or 'nothing but its heartbeat'} |"
    yield ""
    yield "### Its parts"
    yield ""
    yield "Each can be written beside `does`, and replaces what the word means."
    yield ""
    yield "| part | what it is | without it |"
    yield "|---|---|---|"
    meanings = _meanings(Doing.__doc__ or "")
    for part in fields(Doing):
        yield f"| `{part.name}` | {meanings[part.name]} | {_shown(part.default)} |"
    yield ""
    yield "### What can be said of a GPU"
    yield ""
    yield "One word is its state; a mapping, as `{state: lost, xid: 79}`, says more."
    yield ""
    yield "| part | what it is | without it |"
    yield "|---|---|---|"
    meanings = _meanings(Condition.__doc__ or "")
    for part in fields(Condition):
        yield f"| `{part.name}` | {meanings[part.name]} | {_shown(part.default)} |"
    yield ""
    yield "### What can be written where"
    yield ""
    yield "| where | one of |"
    yield "|---|---|"
    for where, known in _KNOWN.items():
        yield f"| {where} | {', '.join(f'`{each}`' for each in known)} |"


def _table(played: Sequence[Played]) -> Iterator[str]:
    """What each policy made of them; empty where a figure is of nothing that the policy is made for."""
    heads = (
        "policy", "false kills", "missed: jobs", "missed: all else", "from wedge to verdict: median, worst",
        "from the earliest moment: worst", "evaluations too late: worst",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for name, found in scores(played):
        took = f"{statistics.median(found.took_s):.0f} s, {max(found.took_s):.0f} s" if found.took_s else ""
        late = f"{max(found.late_s):.0f} s" if found.late_s else ""
        evaluations = max(found.late_evaluations, default="")
        others = f"{found.missed_others} of {found.others}" if name.startswith(OURS) else ""
        missed = f"{found.missed} of {found.wedged}"
        yield f"| {name} | {found.false} | {missed} | {others} | {took} | {late} | {evaluations} |"


_KNOWN: Final[Mapping[str, Iterable[object]]] = {
    "the `process` of what is done": Process,
    "its `phase`": Phase,
    "what of it is `unread`": UNREAD,
    "the `job_class` of a worker": JobClass,
    "the `state` of `gpus`": GPU_STATES,
    "that of an instance": INSTANCE_STATES,
    "what of a GPU is `throttled`": THROTTLE_REASONS,
    "`hosts`": HOST_STATES,
    "`prometheus`": PROMETHEUS_STATES,
    "the `trip` of a verdict": Trip,
    "its `remedy`": REMEDIES,
    "what is decided `then`": DECIDED,
    "the `alert` of what is told": TELLING,
}


def _meanings(docstring: str) -> Mapping[str, str]:
    """What a docstring says of each of its arguments, by name."""
    _, args = docstring.split("Args:\n")
    return {name: " ".join(said.split()) for name, said in _ARGUMENT.findall(args)}


_ARGUMENT: Final = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


def _shown(value: object) -> str:
    """A default as a scenario would write it."""
    only = value[0] if isinstance(value, tuple) and value else value
    if only is None or only == ():
        return ""
    return f"`{str(only).lower() if isinstance(only, bool) else only}`"


def _said(doing: Doing) -> Iterator[str]:
    """What is otherwise than where nothing is said, as a scenario would write it."""
    for each in fields(Doing):
        value: Any = getattr(doing, each.name)
        if value != each.default:
            yield f"`{each.name}: {_shown(value).strip('`')}`"


def main(page: Path = PAGE) -> int:
    """Play all scenarios and write the page."""
    page.write_text(render(play(scenario.read()), page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
