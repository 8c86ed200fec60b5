"""`gpuwarden host end-task`: order a host to end a task of another runner (D7)."""

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any, Final

from gpuwarden.cli.acts import add_act, add_json, add_reason
from gpuwarden.format import format_duration, format_time, operator_name, parse_duration_s, printable, show, show_json
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.task_orders import LIFE_MAX_S, LIFE_S, Ending, TaskOrder, TaskOutcome

LOOK_S: Final = 0.5
"""Interval between checks of an order while waiting, seconds."""

_TEXTS: Final = {
    TaskOutcome.ENDED: "ended by {host}",
    TaskOutcome.GONE: "did not run on {host}",
    TaskOutcome.REFUSED: "not ended, {host} refuses",
    TaskOutcome.FAILED: "not ended, {host} failed",
    Ending.WITHDRAWN: "the order is withdrawn",
}


def add_end_task(acts: Any) -> argparse.ArgumentParser:
    """Add `end-task`; the caller adds the host."""
    ending = add_act(
        acts,
        "end-task",
        _end_task,
        "order a host to end the process group of a task of another runner; the host takes the order with its next "
        "report",
    )
    other = ending.add_mutually_exclusive_group()
    other.add_argument(
        "--wait", action="store_true", help="wait for the answer; exit code 0 if the task has ended, else 1"
    )
    other.add_argument("--withdraw", action="store_true", help="withdraw the order; exit code 1 if there is none")
    life = f"how long the host may take the order: 2h, 7d; default: {format_duration(LIFE_S)}"
    ending.add_argument("--for", dest="life_s", type=_life_s, default=LIFE_S, metavar="1d", help=life)
    add_reason(ending)
    add_json(ending, "print the order as one JSON object; times are Unix seconds")
    return ending


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the task's id."""
    parser.add_argument("task", metavar="ID", type=_task_id, help="running_log_id of the task, as in its file's name")


def _end_task(store: JobStore, arguments: argparse.Namespace) -> int:
    host, task_id, who = arguments.host, arguments.task, operator_name()
    if arguments.withdraw:
        order = store.task_orders.withdraw(host, task_id, who=who, now=store.now())
        if order is None:
            show(f"gpuwarden host: no open order to end task {task_id} on {host}", file=sys.stderr)
            return 1
        _print(store, order, as_json=arguments.json)
        return 0
    order = store.task_orders.give(
        host, task_id, who=who, reason=arguments.reason, life_s=arguments.life_s, now=store.now()
    )
    if not arguments.wait:
        _print(store, order, as_json=arguments.json)
        return 0
    said = ""
    while order.outcome is None:
        if (says := _state(order, heard_at(store, host))) != said and not arguments.json:
            said = says
            show(f"task {task_id}: {says}", file=sys.stderr)
        time.sleep(LOOK_S)
        order = store.task_orders.order(order.order_id, now=store.now()) or order
    _print(store, order, as_json=arguments.json)
    return 0 if order.is_done else 1


def heard_at(store: JobStore, host: str) -> float | None:
    """When a host was last heard, Unix seconds."""
    now = store.now()
    times = [each.heard_at for each in store.seen_hosts.rows() if each.host == host]
    times += [now - each.age_s for each in store.host_reports.ages(host, now=now)]
    times += [each.last_seen_at for each in store.host_tokens.rows(host) if each.last_seen_at is not None]
    return max(times, default=None)


def describe(order: TaskOrder, heard: float | None) -> str:
    """One line about an order. `heard` is when its host was last heard, Unix seconds."""
    why = f": {printable(order.reason)}" if order.reason else ""
    return (
        f"task {order.task_id}: {_state(order, heard)} "
        f"(ordered {format_time(order.ordered_at)} by {printable(order.ordered_by)}{why})"
    )


def to_json(order: TaskOrder) -> dict[str, Any]:
    """An order for `--json`."""
    return asdict(order)


def _print(store: JobStore, order: TaskOrder, *, as_json: bool) -> None:
    if as_json:
        show_json(to_json(order))
    else:
        show(describe(order, heard_at(store, order.host)))


def _state(order: TaskOrder, heard: float | None) -> str:
    host = order.host
    if order.outcome is None:
        if order.taken_at is not None:
            return f"{host} took the order at {format_time(order.taken_at)} and has not answered yet"
        last = "which was never heard" if heard is None else f"last heard {format_time(heard)}"
        return f"the order waits for {host}, {last}; it ends {format_time(order.expires_at)}"
    if order.outcome is Ending.EXPIRED:
        why = "did not take it" if order.taken_at is None else "took it and did not answer: the task may have ended"
        return f"the order expired {format_time(order.expires_at)}, {host} {why}"
    text = _TEXTS[order.outcome].format(host=host)
    if order.outcome is Ending.WITHDRAWN and order.taken_at is not None:
        text += f"; {host} took it before and may still end the task"
    text += f" at {format_time(order.settled_at or 0.0)}"
    return f"{text}: {printable(order.message)}" if order.message else text


def _task_id(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:80]!a} is not a task id: use the running_log_id, a whole number")
    return int(text)


def _life_s(text: str) -> float:
    life_s = parse_duration_s(text)
    if not 0 < life_s <= LIFE_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!a} is invalid: use at most {format_duration(LIFE_MAX_S)}")
    return life_s
