"""`gpuwarden arm|disarm|approve|decline|pause|resume|breaker`: orders of operators to the executors.

Orders are stored in the ledger with operator and reason. Every executor of the ledger applies them within a second.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, format_duration, format_time, operator_name, parse_duration_s, show
from remediator.commands.open_ledger import add_ledger, existing
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import HeldEpisode
from remediator.plan import Episode
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, begins_s

APPROVED_S: Final = 3600.0
"""Default duration of an approval, seconds."""

APPROVED_MAX_S: Final = 86400.0
"""Maximum duration of an approval, seconds."""

PAUSE_MAX_S: Final = 31 * 86400.0
"""Maximum duration of a pause, seconds: a forgotten one ends."""

AHEAD_MAX_S: Final = 366 * 86400.0
"""Maximum time ahead of a planned pause, seconds."""

PAUSES_MAX: Final = 100
"""Maximum pauses at a time: every tick reads them all."""

_HOST_HELP: Final = "only this host; default: every host of the ledger"


def arm(argv: list[str]) -> int:
    """`gpuwarden arm`."""
    parser = _parser("arm", "Allow remedies to act. Open episodes that are still valid are handled within one second.")
    parser.add_argument("--remedy", choices=sorted(REMEDIES), help="only this remedy; default: all")
    asking = "ask an operator before each action: `gpuwarden approve` or `decline`"
    parser.add_argument("--approval", action="store_true", help=asking)
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        _check_host(ledger, wanted.host)
        order = _order(Act.ASK if wanted.approval else Act.ARM, ledger, wanted, remedy=wanted.remedy)
        for line in preview(ledger, order):
            show(line)
        mode = " with approval" if wanted.approval else ""
        if not wanted.yes and not _confirm(f"arm {order.scope}{mode}?"):
            show("gpuwarden arm: not confirmed, nothing armed", file=sys.stderr)
            return 1
        ledger.orders.give(order)
    show(f"armed{mode}: {order.scope}, by {order.who}; undo with `gpuwarden disarm`")
    return 0


def approve(argv: list[str]) -> int:
    """`gpuwarden approve`."""
    parser = _answer_parser("approve", "Approve one action. The evidence is checked again before it begins.")
    help_text = "how long the approval holds: 15m, 2h (default: 1h, at most 1d)"
    parser.add_argument("--for", dest="for_s", type=parse_duration_s, default=APPROVED_S, metavar="1h", help=help_text)
    wanted = parser.parse_args(argv)
    if not 0 < wanted.for_s <= APPROVED_MAX_S:
        parser.error(f"--for must be above 0 and at most {APPROVED_MAX_S / 86400:.0f} day")
    order, asked = _answer(wanted, Act.APPROVE, for_s=wanted.for_s)
    show(
        f"approved: episode {order.episode_id} on {order.host}, by {order.who}, until {format_time(order.until or 0.0)}"
    )
    show(f"  action: {asked}")
    return 0


def decline(argv: list[str]) -> int:
    """`gpuwarden decline`."""
    parser = _answer_parser("decline", "Decline one action. That incarnation is not touched.")
    order, asked = _answer(parser.parse_args(argv), Act.DECLINE)
    show(f"declined: episode {order.episode_id} on {order.host}, by {order.who}; undo with `gpuwarden approve`")
    show(f"  action: {asked}")
    return 0


def _answer(wanted: argparse.Namespace, act: Act, *, for_s: float | None = None) -> tuple[Order, str]:
    with closing(existing(wanted.ledger)) as ledger:
        now = ledger.now()
        until = None if for_s is None else now + for_s
        return ledger.orders.answer(
            wanted.episode, act, who=operator_name(), reason=wanted.reason, until=until, now=now
        )


def disarm(argv: list[str]) -> int:
    """`gpuwarden disarm`."""
    parser = _parser("disarm", "Return remedies to dry run: they only record their steps.")
    parser.add_argument("--remedy", choices=sorted(REMEDIES), help="only this remedy; default: all")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        _check_host(ledger, wanted.host)
        order = _order(Act.DISARM, ledger, wanted, remedy=wanted.remedy)
        ledger.orders.give(order)
        begun = [each for each in _list_open(ledger, order) if each.free is not None]
    show(f"disarmed: {order.scope}, by {order.who}; dry run within a second")
    for each in begun:
        show(f"  episode {each.episode_id} of {each.worker} on {each.host} had begun and stays as it is")
    return 0


def pause(argv: list[str]) -> int:
    """`gpuwarden pause`."""
    description = "Start no new actions for a time, such as a driver upgrade. Running ones finish."
    parser = _parser("pause", description)
    time_help = "local time: 22:00 or 2026-01-31T22:00; default: now"
    parser.add_argument("--from", dest="since", metavar="TIME", help=time_help)
    _add_end(parser)
    if argv and re.fullmatch(r"(\d+[smhd])+", argv[0]):
        parser.error(f"write --for {argv[0]}")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        now = ledger.now()
        since = now if wanted.since is None else _time(parser, wanted.since, now)
        until = since + wanted.for_s if wanted.for_s is not None else _time(parser, wanted.until, since)
        if not now <= since <= now + AHEAD_MAX_S:
            parser.error(f"a pause must begin now or within {AHEAD_MAX_S / 86400:.0f} days")
        if not since < until <= since + PAUSE_MAX_S:
            parser.error(f"a pause must end within {PAUSE_MAX_S / 86400:.0f} days and after its start")
        _check_host(ledger, wanted.host)
        if len(ledger.orders.current().pauses(host=None, now=now)) >= PAUSES_MAX:
            raise GpuwardenError(f"{PAUSES_MAX} pauses run or are planned already: see `gpuwarden status`")
        order = _order(Act.PAUSE, ledger, wanted, until=until, since=None if wanted.since is None else since)
        order = replace(order, order_id=ledger.orders.give(order))
        begun = [each for each in _list_open(ledger, order) if each.free is not None and since <= now]
    show(f"{span(order)}; end it with `gpuwarden resume {order.order_id}`")
    for each in begun:
        show(f"  episode {each.episode_id} of {each.worker} on {each.host} has begun and will finish")
    return 0


def resume(argv: list[str]) -> int:
    """`gpuwarden resume`."""
    parser = _parser("resume", "End pauses, or cancel a planned one.")
    help_text = "number of a pause, from `gpuwarden status`; default: all that run"
    parser.add_argument("number", type=int, nargs="?", help=help_text)
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        _check_host(ledger, wanted.host)
        now = ledger.now()
        pauses = ledger.orders.current().pauses(host=wanted.host, now=now)
        if wanted.number is None:
            ending = [each for each in pauses if wanted.host in (None, each.host) and begins_s(each, now) <= 0]
        else:
            ending = [each for each in pauses if each.order_id == wanted.number]
        if not ending:
            show(f"gpuwarden resume: {_not_paused(wanted, pauses)}", file=sys.stderr)
            return 1
        if wanted.number is not None:
            wanted.host = ending[0].host
        until = max(each.until or 0.0 for each in ending)
        ledger.orders.give(_order(Act.RESUME, ledger, wanted, until=until, ends=wanted.number))
    for each in ending:
        show(f"ended: {span(each)}; waiting episodes are handled now")
    return 0


def _not_paused(wanted: argparse.Namespace, pauses: Sequence[Order]) -> str:
    if wanted.number is not None:
        return f"no pause {wanted.number}: see `gpuwarden status`"
    everywhere = "; every host is paused: run resume without --host" if pauses else ""
    found = f"{wanted.host} is not paused" if wanted.host else "nothing is paused"
    return f"{found}{everywhere}"


def span(window: Order) -> str:
    """Describe a pause in one line."""
    until = "" if window.until is None else f" until {format_time(window.until)}"
    why = f": {window.reason}" if window.reason else ""
    return f"{window.scope} from {format_time(window.since or window.at)}{until}, by {window.who}{why}"


def breaker(argv: list[str]) -> int:
    """`gpuwarden breaker`."""
    parser = Parser(prog="gpuwarden breaker", description="The circuit breaker, which opens after too many restarts.")
    acts = parser.add_subparsers(dest="act", required=True)
    help_text = "close the circuit breaker on every host"
    reset = acts.add_parser("reset", help=help_text, description=help_text)
    add_ledger(reset)
    reset.add_argument("--reason", default="", metavar="TEXT", help="reason, kept in the record")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        latched = ledger.orders.current().breaker()
        if latched is None:
            show("gpuwarden breaker: the circuit breaker is not open", file=sys.stderr)
            return 1
        order = Order(act=Act.RELEASE, at=ledger.now(), who=operator_name(), reason=wanted.reason)
        ledger.orders.give(order)
        waiting = [each for each in ledger.reports.list_held() if each.reason == Reason.CIRCUIT_BREAKER]
    show(f"reset by {order.who}; it opened {format_duration(order.at - latched.at)} ago: {latched.reason}")
    for each in waiting:
        show(f"  {_line(each, 'waited for this, handled now')}")
    return 0


def preview(ledger: Ledger, order: Order) -> list[str]:
    """List what an arming order will act on at once, and what still holds it."""
    orders = ledger.orders.current()
    its = {each.episode_id: each for each in _list_open(ledger, order)}
    held = [each for each in ledger.reports.list_held(host=order.host) if each.episode_id in its]
    # Without --approval, episodes that wait for approval are handled too.
    waits = (Reason.DRY_RUN,) if order.act is Act.ASK else (Reason.DRY_RUN, Reason.APPROVAL)
    ready = [each for each in held if each.reason in waits]
    will = f"{count_of(len(ready), 'open episode')} will be handled when {order.scope} is armed:"
    lines = [will if ready else f"arming {order.scope} would do nothing now: no open episode waits for it"]
    lines += [f"  {_line(each, _dry_run_action(ledger, each))}" for each in ready]
    if len(held) > len(ready):
        lines.append(f"waiting for other reasons: {len(held) - len(ready)}; see `gpuwarden status`")
    if (latched := orders.breaker()) is not None:
        lines.append(f"the circuit breaker is open and holds all of them: {latched.reason}")
    lines += [span(each) for each in orders.pauses(host=order.host, now=order.at)]
    return lines


def _order(act: Act, ledger: Ledger, wanted: argparse.Namespace, **more: Any) -> Order:
    return Order(act=act, at=ledger.now(), who=operator_name(), reason=wanted.reason, host=wanted.host, **more)


def _list_open(ledger: Ledger, order: Order) -> list[Episode]:
    return [each for each in ledger.episodes.list_open(order.host) if order.remedy in (None, each.remedy)]


def _line(held: HeldEpisode, message: str) -> str:
    return f"episode {held.episode_id}: {held.worker} on {held.host}: {message}"


def _dry_run_action(ledger: Ledger, held: HeldEpisode) -> str:
    """The last dry-run action of an episode, or its wait."""
    history = ledger.reports.get(held.episode_id)
    would = [entry.message for entry in history.entries if entry.act == "would"] if history else []
    return would[-1] if would else held.message


def _check_host(ledger: Ledger, host: str | None) -> None:
    """Refuse a mistyped host."""
    known = ledger.executors.last_beats()
    if host is not None and host not in known:
        raise GpuwardenError(
            f"no executor of host {host!r} in this ledger; known hosts: {', '.join(sorted(known)) or 'none'}"
        )


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        show("gpuwarden: no terminal to confirm on: use --yes", file=sys.stderr)
        return False
    show(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _time(parser: argparse.ArgumentParser, text: str, now: float) -> float:
    """Parse a time of day (the next one) or a date and time. Local unless it has a zone."""
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            here = datetime.fromtimestamp(now)  # noqa: DTZ006 - local wall clock
            hour, minute = map(int, text.split(":"))
            then = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (then if then > here else then + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        parser.error(f"invalid time {text!r}: use 18:30 or 2026-01-31T08:00")


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _add_reason(Parser(prog=f"gpuwarden {name}", description=description))
    parser.add_argument("--host", help=_HOST_HELP)
    return parser


def _add_end(parser: argparse.ArgumentParser) -> None:
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument(
        "--for", dest="for_s", type=parse_duration_s, metavar="2h", help="duration: 90s, 30m, 2h, 1d, 1h30m"
    )
    end.add_argument("--until", metavar="TIME", help="end, local time: 18:30 or 2026-01-31T08:00")


def _answer_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _add_reason(Parser(prog=f"gpuwarden {name}", description=description))
    parser.add_argument("episode", type=int, help="number from `gpuwarden status`")
    return parser


def _add_reason(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_ledger(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="reason, kept in the record")
    return parser
