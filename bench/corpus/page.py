"""The words of scenarios and the results, written into README.md in this folder.

`python -m bench.corpus --page` writes the words and keeps the results of the last `python -m bench --only corpus`.
"""

import inspect
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.corpus.judge import OURS, Played, Score
from bench.corpus.scenario import (
    DECIDED,
    DOINGS,
    GPU_STATES,
    HOST_STATES,
    INSTANCE_STATES,
    NOTICES,
    PROMETHEUS_STATES,
    REMEDIES,
    UNREAD,
    Doing,
    GpuHealth,
    Process,
    Program,
)
from exporter.model.gpu import THROTTLE_REASONS
from gpuwarden.job import Condition, JobClass, Phase

PAGE: Final = Path(__file__).with_name("README.md")
RESULTS: Final = "\n## Results\n"
"""Heading of the second part of the page."""

DUE: Final[Mapping[Condition, tuple[str, str]]] = {
    Condition.STALL: (
        "a stepping job is inactive: GPUs idle, RAM unchanged; or stuck: GPU saturated, or unknown with an idle CPU",
        (
            "inactive: its stall timeout (120 s; 300 s in load, eval, checkpoint and save) after its last activity; "
            "stuck: 20 times its longest step and at least 600 s"
        ),
    ),
    Condition.GANG: ("every rank of a gang is stuck", "when the last rank is; `of` is the worker of rank 0"),
    Condition.HEALTH: (
        "a job never stepped, or lost a GPU, and is inactive",
        "after 300 s or its longer stall timeout; with all GPUs not before 660 s of its attempt",
    ),
    Condition.BUDGET: ("a job exceeds its time budget", "when the budget ends"),
    Condition.DEAD_WORKER: (
        "a worker with a job is stopped, gone or a zombie",
        "30 s after its last heartbeat, CPU time and start of its container",
    ),
    Condition.SERVER: ("a server fails its probe, its GPUs idle and nothing else active", "after `silence_s`"),
    Condition.VRAM: (
        "a GPU has less than 1536 MiB free",
        "at once; not in the first 30 s of an exporter; `of` is the tenant most over its budget",
    ),
    Condition.HOST_LOST: (
        "a host is silent, while at least as many hosts are heard as are silent",
        "180 s after the gateway last heard it",
    ),
    Condition.GPU_FAULTY: (
        "a GPU of a Kubernetes node is lost, in quarantine, or had a fatal XID",
        "at once; a lost one after 60 s",
    ),
    Condition.ITEMS: ("a worker fails items of a run and completed none", "at its sixth failure"),
}
"""What each condition is, and when its verdict is due."""

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "a GPU is idle or busy, RAM changes or not": (
        "workers: {a: {0s: hangs}, b: {0s: {does: hangs, ram_mib_per_s: 60}}, c: {0s: computes}, d: {0s: decodes}}",
    ),
    "a load from a cold disk, and from a warm page cache": (
        "workers: {a: {0s: loads, 8m: steps}, b: {0s: maps, 8m: steps}}",
    ),
    "a first step that takes seven minutes": ("workers: {w: {0s: loads, 2m: computes, 9m: steps}}",),
    "a checkpoint to slow storage, and to a server that does not answer": (
        (
            "workers: {a: {0s: steps, 4m: {does: checkpoints, io_mib_per_s: 0.5}, 9m: steps}, "
            "b: {0s: steps, 4m: {does: waits for NFS, phase: checkpoint}, 9m: steps}}"
        ),
    ),
    "an evaluation, announced and not": (
        (
            "workers: {a: {0s: steps, 4m: evaluates, 9m: steps}, "
            "b: {0s: steps, 4m: {does: evaluates, phase: step}, 9m: steps}}"
        ),
    ),
    "a job that slows down": (
        (
            "workers: {w: {0s: {does: steps, vram_mib: 8000}, 40m: {does: steps, step_every_s: 4}, "
            "50m: {does: steps, step_every_s: 8}}}"
        ),
    ),
    "a collective that misses a rank, at 100 %": ("workers: {w: {0s: loads, 2m: steps, 5m: spins}}",),
    "the same in a gang of two hosts": (
        (
            "workers: {w: {gang: g, ranks: 2, rank: 0, 0s: steps, 5m: spins}, "
            "v: {host: b, gang: g, ranks: 2, rank: 1, 0s: steps, 5m: hangs}}"
        ),
    ),
    "a held Python lock, and a worker stopped by a signal": (
        "workers: {a: {0s: steps, 4m: holds the GIL}, b: {0s: steps, 4m: is stopped}}",
    ),
    "a worker killed and started again, and a container restarted": (
        (
            "workers: {a: {0s: steps, 5m: is killed, 5m20s: starts again, 6m: waits}, "
            "b: {0s: steps, 5m: starts again, 5m20s: waits}}"
        ),
    ),
    "a zombie worker": ("workers: {w: {0s: steps, 5m: ends unreaped}}",),
    "a zombie server": ("servers: {llm: {0s: answers, 5m: ends unreaped}}",),
    "a job that ends between two scrapes": ("workers: {w: {0s: waits, 4m1s: steps, 4m9s: waits}}",),
    "an exporter that restarts, and failing scrapes": (
        "hosts: {a: {5m: unwatched, 5m10s: watched, 8m: unscraped, 9m: watched}}",
    ),
    "a clock set an hour ahead, and back": ("hosts: {a: {5m: clock set, 8m: watched}}",),
    "a Prometheus that restarts": ("prometheus: {5m: down, 5m40s: up}",),
    "a lost GPU, and one whose use is unknown": (
        "workers: {w: {gpus: [0, 1], 0s: steps}}",
        "gpus: {0: {5m: lost}, 1: {0s: unmeasured}}",
    ),
    "the same with its error (XID), and an error of a program": (
        "workers: {w: {gpus: [0, 1], 0s: steps, 5m: hangs}}",
        "gpus: {0: {5m: {state: lost, xid: 79}}, 1: {4m: {xid: 31}}}",
    ),
    "an uncorrected memory error": (
        "workers: {w: {0s: steps, 5m: is killed, 5m20s: starts again, 6m: waits}}",
        "gpus: {0: {5m: {xid: 48, ecc_uncorrected: 1}}}",
    ),
    "a GPU throttled by heat for half an hour": (
        "workers: {w: {0s: {does: steps, vram_mib: 8000}, 40m: {does: steps, vram_mib: 8000, step_every_s: 6}}}",
        "gpus: {0: {40m: {throttled: hw_thermal_slowdown}, 1h10m: works}}",
    ),
    "two MIG instances of one GPU": ("workers: {w: {gpus: [0:0], 0s: steps, 5m: hangs}, v: {gpus: [0:1], 0s: steps}}",),
    "an instance that is removed": (
        "workers: {w: {gpus: [0:0], 0s: waits}, v: {gpus: [0:1], 0s: steps}}",
        "gpus: {0:0: {5m: vanished}}",
    ),
    "two GPUs, one of them busy": ("workers: {w: {gpus: [0, 1], 0s: {does: steps, gpu_ratio: [0, 0.95]}}}",),
    "a busy neighbour on the same GPU": ("workers: {w: {0s: steps, 5m: hangs}, v: {0s: steps}}",),
    "a burst of GPU memory, and a slow leak": (
        (
            "tenants: {a: {budget_mib: 3000, 0s: {does: holds, vram_mib: 2800}, 5m: {does: holds, vram_mib: 9000}, "
            "6m: {does: holds, vram_mib: 2800}}, "
            "b: {budget_mib: 3000, gpus: [1], 0s: {does: holds, vram_mib: 2800, vram_mib_per_s: 0.5}}}"
        ),
    ),
    "two tenants equally over their budgets": (
        (
            "tenants: {a: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7000}}, "
            "b: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7100}}}"
        ),
    ),
    "a host cut off for a minute, and one for an hour": (
        "workers: {w: {0s: steps}, v: {host: b, 0s: steps}, u: {host: c, 0s: steps}}",
        "hosts: {a: {5m: unscraped, 6m: watched}, b: {5m: unscraped, 1h5m: watched}}",
    ),
    "a worker that fails every item, and a run whose items all fail": (
        (
            "workers: {w: {run: r, 0s: {does: steps, fails_every_s: 20}}, "
            "v: {run: r, 0s: {does: steps, finishes_every_s: 20}}, u: {run: s, 0s: {does: steps, fails_every_s: 20}}}"
        ),
    ),
    "several workers in one container": (
        "workers: {w: {container: c, 0s: steps, 5m: hangs}, v: {container: c, 0s: steps}}",
    ),
}
"""Events, and the keys of a scenario with them."""


def write_words() -> None:
    """Write the words; the results stay as they are."""
    PAGE.write_text(words() + results(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def results(text: str) -> str:
    """The part of the page with the results."""
    _, heading, rest = text.partition(RESULTS)
    return heading + rest


def write_results(played: Sequence[Played], scores: Iterable[tuple[str, Score]]) -> None:
    """Write the page with new results."""
    when = datetime.now(tz=UTC).date().isoformat()
    PAGE.write_text(words() + "\n".join([RESULTS, *_results(played, scores, when), ""]), encoding="utf-8")


def words() -> str:
    """The part of the page with the words of scenarios, from `scenario`."""
    return "\n".join(_words()) + "\n"


def _words() -> Iterator[str]:
    yield from (
        "# Scenarios: words and results",
        "",
        "<!-- Written by `python -m bench.corpus --page` and `python -m bench --only corpus`; change bench/corpus. -->",
        "",
        "`bench/README.md` explains the corpus; `bench/corpus/scenario.py` has the keys of a scenario.",
        "",
        "## Verdicts",
        "",
        *_table(("condition", "what happens", "due"), ((f"`{name}`", *texts) for name, texts in DUE.items())),
        "",
        "## Examples",
        "",
        *_table(
            ("what happens", "how to write it"),
            ((what, " ".join(f"`{line}`" for line in lines)) for what, lines in EXAMPLES.items()),
        ),
        "",
        "## Activities",
        "",
        "`4m: hangs`, or with parts: `4m: {does: hangs, cpu_cores: 1}`.",
        "",
        *_table(("word", "parts"), ((f"`{word}`", _parts(doing)) for word, doing in DOINGS.items())),
        "",
        "## Parts of an activity",
        "",
        *_fields(Doing),
        "",
        "## Parts of a GPU's state",
        "",
        "`5m: lost`, or with parts: `5m: {state: lost, xid: 79}`.",
        "",
        *_fields(GpuHealth),
        "",
        "## Settings of a program",
        "",
        *_fields(Program, without=("kind", "name", "does")),
        "",
        "## States",
        "",
        *_table(
            ("of", "state", "meaning"),
            (
                (of, f"`{state}`", meaning)
                for of, states in (("GPU", GPU_STATES), ("host", HOST_STATES), ("Prometheus", PROMETHEUS_STATES))
                for state, meaning in states.items()
            ),
        ),
        "",
        "## Values",
        "",
        *_table(
            ("key", "values"),
            (
                (f"`{key}`", ", ".join(f"`{value}`" for value in values))
                for key, values in (
                    ("process", Process),
                    ("phase", Phase),
                    ("unread", UNREAD),
                    ("job_class", JobClass),
                    ("state", INSTANCE_STATES),
                    ("throttled", THROTTLE_REASONS),
                    ("condition", [each for each in Condition if each in DUE]),
                    ("remedy", REMEDIES),
                    ("then", DECIDED),
                    ("alert", NOTICES),
                )
            ),
        ),
        "",
        "`state` is the state of a MIG instance.",
    )


def _results(played: Sequence[Played], scores: Iterable[tuple[str, Score]], when: str) -> Iterator[str]:
    scenarios = [each.scenario for each in played]
    files = Counter(each.place.partition(":")[0] for each in scenarios)
    marked = [f"{each.place}: {each.name}: {each.not_yet}" for each in scenarios if each.not_yet]
    found = [
        any((fired.alert, fired.of) == (notice.alert, notice.of) for fired in each.fired)
        for each in played
        for notice in each.scenario.notices
    ]
    yield f"{when}: {len(scenarios)} scenarios: {', '.join(f'{count} in `{name}`' for name, count in files.items())}."
    yield ""
    yield from _table(
        ("policy", "false kills", "missed: jobs", "missed: others", "fault to verdict: median, worst",
         "earliest moment to verdict: worst", "evaluations too late: worst"),
        (_score(name, score) for name, score in scores),
    )  # fmt: skip
    yield from ("", f"Alerts without a remedy: {sum(found)} of {len(found)} fire.", "")
    yield f"Marked `not_yet`: {'; '.join(marked) or 'none'}."


def _score(name: str, found: Score) -> tuple[str, ...]:
    took_s, late_s, late = found.took_s, found.late_s, found.late_evaluations
    return (
        name,
        str(found.false),
        f"{found.missed} of {found.jobs}",
        f"{found.missed_others} of {found.others}" if name.startswith(OURS) else "",
        f"{statistics.median(took_s):.0f} s, {max(took_s):.0f} s" if took_s else "",
        f"{max(late_s):.0f} s" if late_s else "",
        str(max(late)) if late else "",
    )


def _parts(doing: Doing) -> str:
    """What an activity differs in from the default."""
    found = (
        f"`{each.name}: {_written(getattr(doing, each.name))}`"
        for each in fields(Doing)
        if getattr(doing, each.name) != each.default
    )
    return ", ".join(found) or "only its heartbeat"


def _fields(of: type[Any], *, without: Sequence[str] = ()) -> list[str]:
    """A table of a dataclass: names, meanings from its docstring, and defaults.

    Raises:
        KeyError: the docstring does not explain a field.
    """
    text = inspect.getdoc(of) or ""
    meanings = dict(re.findall(r"^    (\w+): (.*?)$(?=\n    \w|\n*\Z)", text, re.MULTILINE | re.DOTALL))
    rows = []
    for each in fields(of):
        if each.name not in without:
            meaning = " ".join(meanings[each.name].split()).removesuffix(".")
            rows.append((f"`{each.name}`", meaning, _written(each.default)))
    return _table(("part", "meaning", "default"), rows)


def _written(value: object) -> str:
    """A value as in a scenario; nothing for an empty one."""
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
