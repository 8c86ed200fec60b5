"""What was captured before a stop, as text for people: in short beside an episode's account, and in full.

Names, frames and lines are the target's own words: nothing of them reaches a terminal but what can be printed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuwarden.text import plain, when
from remediator import curves
from remediator.ledger import Kept

THREADS_SHOWN: Final = 16
"""Threads told of in short."""

FRAMES_SHOWN: Final = 3
"""Innermost frames of each thread told of in short."""

STATES: Final = {
    "R": "running", "S": "sleeping", "D": "in a wait that cannot be interrupted", "T": "stopped", "t": "traced",
    "Z": "dead, not yet waited for", "X": "dead", "I": "idle",
}  # fmt: skip
"""proc_pid_stat(5)."""

_FIGURES: Final = (
    ("alive", "alive", ""), ("phase", "phase", ""), ("step", "step", ""), ("beat_age_s", "last beat", " s ago"),
    ("heartbeat_age_s", "heartbeat", " s ago"), ("unanswered_s", "unanswered for", " s"),
    ("gpu_idle_s", "GPU idle for", " s"), ("ram_still_s", "RAM still for", " s"), ("io_still_s", "I/O still for", " s"),
    ("container_cpu_still_s", "CPU still for", " s"), ("cpu_still_s", "its process without CPU for", " s"),
)  # fmt: skip
"""Which of the exporter's facts are told, and how."""

CURVE_COLUMNS: Final = 60
"""Columns of a curve told of in short; in full it has one for each of its points."""

_BARS: Final = "▁▂▃▄▅▆▇█"

_Fields = Mapping[str, Any]


def in_short(kept: Kept, *, since: float) -> Iterator[str]:
    """Who was in which wait, the innermost Python frames of each thread, and the curves, a line each."""
    document = kept.document
    yield f"  {kept.at - since:+7.1f} s  captured {_aim(document)}:"
    threads = [(process, thread) for process in document["processes"] for thread in process["seen"]]
    for process, thread in threads[:THREADS_SHOWN]:
        yield f"    {process['pid']} {plain(process['name'])}: {_thread(thread)}{_innermost(thread)}"
    if len(threads) > THREADS_SHOWN:
        yield f"    and {len(threads) - THREADS_SHOWN} threads more: `gpuwarden ledger evidence` has them"
    yield from (f"    {line}" for line in _drawn(document, since=since, columns=CURVE_COLUMNS))
    yield from (f"    {plain(each)}" for each in _what_lacks(document))


def in_full(kept: Kept) -> Iterator[str]:
    """All of it."""
    document = kept.document
    on = "" if kept.host is None else f" on {plain(kept.host)}"
    yield f"captured {_aim(document)} at {when(kept.at)}{on}, in {document['took_s']:.1f} s"
    yield from (f"  {plain(each)}" for each in _what_lacks(document))
    if document["facts"] is not None:
        yield f"  the exporter: {', '.join(_figures(document['facts']))}"
    yield from (f"  {line}" for line in _drawn(document, since=None, columns=curves.POINTS_MAX))
    for process in document["processes"]:
        state = STATES.get(process["state"], process["state"])
        yield f"  process {process['pid']} {plain(process['name'])}, {state}, {process['threads']} threads"
        for thread in process["seen"]:
            yield f"    {_thread(thread)}"
            yield from _details(thread)
    for log in document["logs"]:
        cut = f", after {log['cut_bytes']} bytes more" if log["cut_bytes"] else ""
        yield f"  the last lines of {plain(log['source'])}{cut}:"
        yield from (f"    {plain(line)}" for line in log["lines"])


def _aim(document: _Fields) -> str:
    return "before the stop" if document["armed"] else "in dry run, where no stop followed"


def _what_lacks(document: _Fields) -> Iterator[str]:
    if document["cut_short"]:
        yield document["cut_short"]
    yield from document["notes"]
    if document["left_out_bytes"]:
        yield f"{document['left_out_bytes']} bytes more were seen than are kept (--capture-max-bytes)"


def _figures(facts: _Fields) -> Iterator[str]:
    for name, words, unit in _FIGURES:
        if name in facts:
            yield f"{words} {plain(_figure(facts[name], unit))}"


def _figure(value: object, unit: str) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def _drawn(document: _Fields, *, since: float | None, columns: int) -> Iterator[str]:
    """The curves, a line each, after one that tells from when to when: since the episode opened, or as local times."""
    found = document.get("curves", [])  # what an older version kept has none
    if not found:
        return
    at, step_s = found[0]["at"], found[0]["step_s"]
    until = at + (len(found[0]["values"]) - 1) * step_s
    told = [when(each) if since is None else f"{each - since:+.0f} s" for each in (at, until)]
    yield f"{told[0]} to {told[1]}, {step_s} s from point to point:"
    names = [plain(curves.named(each["metric"], each["gpu"])) for each in found]
    for name, curve in zip(names, found, strict=True):
        yield f"  {name:{max(map(len, names))}} |{_bars(curve, columns)}| {_range(curve)}"


def _bars(curve: _Fields, columns: int) -> str:
    """The greatest of the points in each column, from zero up; a blank where none of them is known."""
    values, is_share = curve["values"], curve["metric"].endswith("_ratio")
    top = 1.0 if is_share else max(value for value in values if value is not None)
    columns = min(columns, len(values))
    bars = ""
    for column in range(columns):
        among = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        highest = max((value for value in among if value is not None), default=None)
        share = 0.0 if highest is None or top <= 0.0 else highest / top
        bars += " " if highest is None else _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]
    return bars


def _range(curve: _Fields) -> str:
    metric, known = curve["metric"], [value for value in curve["values"] if value is not None]
    last = curve["values"][-1]
    told = "unknown" if last is None else _amount(metric, last)
    return f"{_amount(metric, min(known))} to {_amount(metric, max(known))}, at last {told}"


def _amount(metric: str, value: float) -> str:
    if metric.endswith("_bytes"):
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.0%}" if metric.endswith("_ratio") else f"{value:.1f} s"


def _thread(thread: _Fields) -> str:
    """One thread in a line: who it is, where it waits, whether it holds Python's lock."""
    stack = thread.get("python") or thread.get("native") or {}
    if thread["tid"] is None:
        return f"a thread whose number is not known, {plain(stack['name'] or 'without a name')}"
    waits = f"in {plain(thread['wchan'])}" if thread["wchan"] else "in no wait (or none that may be read)"
    state = STATES.get(thread["state"], thread["state"])
    told = f"thread {thread['tid']} {plain(stack.get('name') or thread['name'])}, {state}, {waits}"
    holds = ", holds Python's lock" if stack.get("owns_gil") else ""
    return f"{told}, {thread['cpu_ticks']} ticks of CPU{holds}"


def _innermost(thread: _Fields) -> str:
    frames = (thread.get("python") or {}).get("frames", [])[:FRAMES_SHOWN]
    return "".join(f"{' < ' if number else ': '}{_frame(frame)}" for number, frame in enumerate(frames))


def _frame(frame: _Fields) -> str:
    line = f":{frame['line']}" if frame["line"] else ""
    return plain(f"{frame['function']} ({frame['file'].rpartition('/')[2]}{line})")


def _details(thread: _Fields) -> Iterator[str]:
    """Its stacks, innermost first; the Python ones once more with native code among them, where that was had."""
    if thread.get("syscall"):
        yield f"      system call: {plain(thread['syscall'])}"
    if thread.get("stack"):
        yield f"      kernel: {plain(' < '.join(thread['stack']))}"
    for kind in ("python", "native"):
        if kind in thread:
            yield f"      {'Python' if kind == 'python' else 'Python and native code'}:"
            for frame in thread[kind]["frames"]:
                line = f":{frame['line']}" if frame["line"] else ""
                yield f"        {plain(frame['function'])} ({plain(frame['file'])}{line})"
            if thread[kind]["frames_cut"]:
                yield f"        and {thread[kind]['frames_cut']} frames more"
