"""Render a capture as text: short inside an episode's history, or in full.

Names, frames and log lines come from the target: only printable characters reach the terminal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpuwarden.format import format_time
from remediator.clients.prometheus_range import POINTS_MAX, named
from remediator.ledger.captures import SavedCapture

THREADS_SHOWN: Final = 16
FRAMES_SHOWN: Final = 3
CURVE_COLUMNS: Final = 60
"""Limits of the short form: threads, innermost frames per thread, columns of a curve."""

STATES: Final = {
    "R": "running", "S": "sleeping", "D": "uninterruptible wait", "T": "stopped", "t": "traced",
    "Z": "zombie", "X": "dead", "I": "idle",
}  # fmt: skip
"""proc_pid_stat(5)."""

_BARS: Final = "▁▂▃▄▅▆▇█"

_Fields = Mapping[str, Any]


def in_short(saved: SavedCapture, *, since: float) -> Iterator[str]:
    """One line for each thread and each curve."""
    document = saved.document
    yield f"  {saved.at - since:+7.1f} s  captured {_aim(document)}:"
    threads = [(process, thread) for process in document["processes"] for thread in process["seen"]]
    for process, thread in threads[:THREADS_SHOWN]:
        frames = thread.get("python", {}).get("frames", [])[:FRAMES_SHOWN]
        within = " < ".join(_frame(frame | {"file": frame["file"].rpartition("/")[2]}) for frame in frames)
        yield f"    {process['pid']} {process['name']}: {_thread(thread)}" + (within and f": {within}")
    if len(threads) > THREADS_SHOWN:
        yield f"    {len(threads) - THREADS_SHOWN} more threads: see `gpuwarden ledger capture`"
    yield from (f"    {line}" for line in _curves(document["curves"], since=since, columns=CURVE_COLUMNS))
    yield from (f"    {line}" for line in _missing(document))


def in_full(saved: SavedCapture) -> Iterator[str]:
    """The whole capture."""
    document = saved.document
    on = "" if saved.host is None else f" on {saved.host}"
    yield f"captured {_aim(document)} at {format_time(saved.at)}{on}, in {document['took_s']:.1f} s"
    yield from (f"  {line}" for line in _missing(document))
    facts = [f"{name} {value}" for name, value in (document["facts"] or {}).items() if value is not None]
    yield f"  exporter: {', '.join(facts) or 'nothing'}"
    yield from (f"  {line}" for line in _curves(document["curves"], since=None, columns=POINTS_MAX))
    for process in document["processes"]:
        state = STATES.get(process["state"], process["state"])
        yield f"  process {process['pid']} {process['name']}, {state}, {process['threads']} threads"
        for thread in process["seen"]:
            yield f"    {_thread(thread)}"
            if thread["stack"]:
                yield f"      kernel: {' < '.join(thread['stack'])}"
            python = thread.get("python", {"frames": [], "frames_cut": 0})
            yield from (f"      {_frame(frame)}" for frame in python["frames"])
            if python["frames_cut"]:
                yield f"      {python['frames_cut']} more frames"
    for log in document["logs"]:
        yield f"  last lines of {log['source']}:"
        yield from (f"    {line}" for line in log["lines"])


def _aim(document: _Fields) -> str:
    return "before the stop" if document["armed"] else "in dry run, without a stop"


def _missing(document: _Fields) -> Iterator[str]:
    yield from (each for each in (document["cut_short"], *document["notes"]) if each)
    if document["left_out_bytes"]:
        yield f"{document['left_out_bytes']} bytes left out (--capture-max-bytes)"


def _thread(thread: _Fields) -> str:
    """One thread in a line: its name, its wait, and whether it holds the GIL."""
    python = thread.get("python", {})
    state = STATES.get(thread["state"], thread["state"] or "unknown")
    waits = f"in {thread['wchan']}" if thread["wchan"] else "no wait known"
    holds = ", holds the GIL" if python.get("owns_gil") else ""
    name = python.get("name") or thread["name"]
    return f"thread {thread['tid']} {name}, {state}, {waits}, {thread['cpu_ticks']} ticks of CPU{holds}"


def _frame(frame: _Fields) -> str:
    line = f":{frame['line']}" if frame["line"] else ""
    return f"{frame['function']} ({frame['file']}{line})"


def _curves(curves: Sequence[_Fields], *, since: float | None, columns: int) -> Iterator[str]:
    """A line with the time range, then one line per curve. Times are seconds after `since`, or local times."""
    if not curves:
        return
    at, step_s = curves[0]["at"], curves[0]["step_s"]
    until = at + (len(curves[0]["values"]) - 1) * step_s
    first, last = (format_time(each) if since is None else f"{each - since:+.0f} s" for each in (at, until))
    yield f"{first} to {last}, step {step_s} s:"
    names = [named(each["metric"], each["gpu"]) for each in curves]
    for name, curve in zip(names, curves, strict=True):
        metric, values = curve["metric"], curve["values"]
        known = [value for value in values if value is not None]
        least, most, last = (_amount(metric, each) for each in (min(known), max(known), values[-1]))
        bars = _bars(values, 1.0 if metric.endswith("_ratio") else max(known), min(columns, len(values)))
        yield f"  {name:{max(map(len, names))}} |{bars}| {least} to {most}, last {last}"


def _bars(values: Sequence[float | None], top: float, columns: int) -> str:
    """Draw the maximum of each column, from zero up; a blank if no point is known."""
    bars = ""
    for column in range(columns):
        among = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        known = [value for value in among if value is not None]
        share = max(known) / top if known and top > 0.0 else 0.0
        bars += _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))] if known else " "
    return bars


def _amount(metric: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if metric.endswith("_bytes"):
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.0%}" if metric.endswith("_ratio") else f"{value:.1f} s"
