"""`gpuwarden arm|disarm|approve|decline|pause|resume|brake`: a person's hand on the executors.

Kept in the ledger with who and why. Every executor that works the ledger obeys at its next look, within a second:
nothing is started again for it.
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
from gpuwarden.format import ago, duration_s, plain, when, who
from remediator.commands.open_ledger import add_ledger, existing
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import HeldEpisode
from remediator.plan import Episode
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, begins_s

APPROVED_S: Final = 3600.0
"""How long an approval holds where nothing else is said, seconds."""

APPROVED_MAX_S: Final = 86400.0
"""The longest approval, seconds: what was true a day ago is to be looked at again."""

PAUSE_MAX_S: Final = 31 * 86400.0
"""The longest pause, seconds: one that is forgotten ends by itself."""

AHEAD_MAX_S: Final = 366 * 86400.0
"""How far ahead a pause is planned at most, seconds."""

PAUSES_MAX: Final = 100
"""So many may stand at a time: every look reads them all."""

_HOST_HELP: Final = "this host's key only; every host of the ledger when not given"


def arm(argv: list[str]) -> int:
    """`gpuwarden arm`."""
    parser = _parser("arm", "Let remedies act. What a dry run waits on and is still true is acted on within a second.")
    parser.add_argument("--remedy", choices=sorted(REMEDIES), help="this remedy only; every one when not given")
    asking = "do nothing before a person has said yes to it: `gpuwarden approve` or `decline`, episode by episode"
    parser.add_argument("--approval", action="store_true", help=asking)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        _check_host(ledger, wanted.host)
        order = _order(Act.ASK if wanted.approval else Act.ARM, ledger, wanted, remedy=wanted.remedy)
        for line in preview(ledger, order):
            print(line)
        mode = " with approval" if wanted.approval else ""
        if not wanted.yes and not _agreed(f"arm {order.scope}{mode}?"):
            print("gpuwarden arm: nothing was armed", file=sys.stderr)
            return 1
        ledger.orders.give(order)
    print(f"armed{mode}: {order.scope}, by {order.who}; `gpuwarden disarm` takes it back")
    return 0


def approve(argv: list[str]) -> int:
    """`gpuwarden approve`."""
    parser = _answer_parser(
        "approve", "Say yes to what one episode asks. It is confirmed anew right before it is done."
    )
    help_text = "the yes holds for so long, if something else holds the episode: 15m, 2h (default: 1h, at most 1d)"
    parser.add_argument("--for", dest="for_s", type=duration_s, default=APPROVED_S, metavar="1h", help=help_text)
    wanted = parser.parse_args(argv)
    if not 0 < wanted.for_s <= APPROVED_MAX_S:
        parser.error(f"an approval holds for more than nothing, and for {APPROVED_MAX_S / 86400:.0f} day at most")
    order, asked = _answer(wanted, Act.APPROVE, for_s=wanted.for_s)
    print(f"approved: episode {order.episode_id} on {order.host}, by {order.who}, until {when(order.until or 0.0)}")
    print(f"  it said: {plain(asked)}")
    return 0


def decline(argv: list[str]) -> int:
    """`gpuwarden decline`."""
    parser = _answer_parser("decline", "Say no to what one episode asks: nothing is done to that incarnation.")
    order, asked = _answer(parser.parse_args(argv), Act.DECLINE)
    print(f"declined: episode {order.episode_id} on {order.host}, by {order.who}; `gpuwarden approve` takes it back")
    print(f"  it said: {plain(asked)}")
    return 0


def _answer(wanted: argparse.Namespace, act: Act, *, for_s: float | None = None) -> tuple[Order, str]:
    with closing(existing(wanted.ledger)) as ledger:
        now = ledger.now()
        until = None if for_s is None else now + for_s
        return ledger.orders.answer(wanted.episode, act, who=who(), because=wanted.because, until=until, now=now)


def disarm(argv: list[str]) -> int:
    """`gpuwarden disarm`."""
    parser = _parser("disarm", "Let remedies only record what they would do: no fence, no stop from the next look on.")
    parser.add_argument("--remedy", choices=sorted(REMEDIES), help="this remedy only; every one when not given")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        _check_host(ledger, wanted.host)
        order = _order(Act.DISARM, ledger, wanted, remedy=wanted.remedy)
        ledger.orders.give(order)
        begun = [each for each in _open(ledger, order) if each.free is not None]
    print(f"disarmed: {order.scope}, by {order.who}; it is a dry run within a second")
    for each in begun:
        print(f"  episode {each.episode_id} of {plain(each.worker)} on {each.host} was begun and stays as it is")
    return 0


def pause(argv: list[str]) -> int:
    """`gpuwarden pause`."""
    description = "Begin nothing new for a while: a driver's upgrade, a reboot. What was begun is finished."
    parser = _parser("pause", f"{description} The pause ends by itself.")
    time_help = "local time: 22:00, or 2026-01-31T22:00; now when not given"
    parser.add_argument("--from", dest="since", metavar="TIME", help=time_help)
    _add_end(parser)
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        now = ledger.now()
        since = now if wanted.since is None else _time(parser, wanted.since, now)
        until = since + wanted.for_s if wanted.for_s is not None else _time(parser, wanted.until, since)
        if not now <= since <= now + AHEAD_MAX_S:
            parser.error(f"a pause begins now or later, within {AHEAD_MAX_S / 86400:.0f} days")
        if not since < until <= since + PAUSE_MAX_S:
            parser.error(f"a pause ends within {PAUSE_MAX_S / 86400:.0f} days, and not before it began")
        _check_host(ledger, wanted.host)
        if len(ledger.orders.current().pauses(host=None, now=now)) >= PAUSES_MAX:
            raise GpuwardenError(f"{PAUSES_MAX} run or are planned already: `gpuwarden status` names them")
        order = _order(Act.PAUSE, ledger, wanted, until=until, since=None if wanted.since is None else since)
        order = replace(order, order_id=ledger.orders.give(order))
        begun = [each for each in _open(ledger, order) if each.free is not None and since <= now]
    print(f"{span(order)}; `gpuwarden resume {order.order_id}` ends it or calls it off")
    for each in begun:
        print(f"  episode {each.episode_id} of {plain(each.worker)} on {each.host} was begun and is finished")
    return 0


def resume(argv: list[str]) -> int:
    """`gpuwarden resume`."""
    parser = _parser("resume", "End pauses before their time, or call off one that is planned.")
    help_text = "the pause of this number, from `gpuwarden status`; every one that runs when not given"
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
            print(f"gpuwarden resume: {_not_paused(wanted, pauses)}", file=sys.stderr)
            return 1
        if wanted.number is not None:
            wanted.host = ending[0].host
        until = max(each.until or 0.0 for each in ending)
        ledger.orders.give(_order(Act.RESUME, ledger, wanted, until=until, ends=wanted.number))
    for each in ending:
        print(f"ended: {span(each)}; what waited for it and is still true is taken up now")
    return 0


def _not_paused(wanted: argparse.Namespace, pauses: Sequence[Order]) -> str:
    if wanted.number is not None:
        return f"no pause {wanted.number} runs or is planned: `gpuwarden status` names those there are"
    everywhere = "; every host is paused: resume without --host" if pauses else ""
    return f"{wanted.host or 'no host'} is not paused by itself{everywhere}"


def span(window: Order) -> str:
    """One pause: its number, whose, from when until when, by whom and why."""
    until = "" if window.until is None else f" until {when(window.until)}"
    why = f": {plain(window.because)}" if window.because else ""
    return f"{window.scope} from {when(window.since or window.at)}{until}, by {plain(window.who)}{why}"


def brake(argv: list[str]) -> int:
    """`gpuwarden brake`."""
    parser = argparse.ArgumentParser(
        prog="gpuwarden brake", description="The storm brake, which latches when too much wedges at once."
    )
    acts = parser.add_subparsers(dest="act", required=True, metavar="release")
    help_text = "let it act again, on every host, once a person has looked"
    release = acts.add_parser("release", help=help_text, description=help_text)
    add_ledger(release)
    release.add_argument("--because", default="", metavar="TEXT", help="why, for whoever looks later")
    wanted = parser.parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        latched = ledger.orders.current().brake()
        if latched is None:
            print("gpuwarden brake: it is not latched", file=sys.stderr)
            return 1
        order = Order(act=Act.RELEASE, at=ledger.now(), who=who(), because=wanted.because)
        ledger.orders.give(order)
        waiting = [each for each in ledger.reports.held() if each.reason == Reason.CIRCUIT_BREAKER]
    print(f"released, by {order.who}; it was latched {ago(order.at - latched.at)} ago: {plain(latched.because)}")
    for each in waiting:
        print(f"  {_line(each, 'waited for this, and is looked at again now')}")
    return 0


def preview(ledger: Ledger, order: Order) -> list[str]:
    """What an arming will act on at once, for whoever is about to agree, and what still holds it."""
    orders = ledger.orders.current()
    its = {each.episode_id: each for each in _open(ledger, order)}
    held = [each for each in ledger.reports.held(host=order.host) if each.episode_id in its]
    # Armed without approval, what waits for one is done without it.
    waits = (Reason.DRY_RUN,) if order.act is Act.ASK else (Reason.DRY_RUN, Reason.APPROVAL)
    ready = [each for each in held if each.reason in waits]
    lines = [f"{len(ready)} open episodes wait for {order.scope} to be armed" + (":" if ready else "")]
    lines += [f"  {_line(each, _would(ledger, each))}" for each in ready]
    if len(held) > len(ready):
        lines.append(f"{len(held) - len(ready)} more are open and wait for something else: `gpuwarden status`")
    if (latched := orders.brake()) is not None:
        lines.append(f"the brake is latched and holds all of it: {plain(latched.because)}")
    lines += [span(each) for each in orders.pauses(host=order.host, now=order.at)]
    return lines


def _order(act: Act, ledger: Ledger, wanted: argparse.Namespace, **more: Any) -> Order:
    return Order(act=act, at=ledger.now(), who=who(), because=wanted.because, host=wanted.host, **more)


def _open(ledger: Ledger, order: Order) -> list[Episode]:
    return [each for each in ledger.episodes.list_open(order.host) if order.remedy in (None, each.remedy)]


def _line(held: HeldEpisode, message: str) -> str:
    return f"episode {held.episode_id}: {plain(held.worker)} on {held.host}: {plain(message)}"


def _would(ledger: Ledger, held: HeldEpisode) -> str:
    """What a dry run said it would do; one that was begun before a disarming says how far it came."""
    story = ledger.reports.get(held.episode_id)
    would = [entry.message for entry in story.entries if entry.act == "would"] if story else []
    return would[-1] if would else held.message


def _check_host(ledger: Ledger, host: str | None) -> None:
    """A mistyped host would be armed for nobody, and disarmed for nobody."""
    known = ledger.executors.last_beats()
    if host is not None and host not in known:
        raise GpuwardenError(
            f"no executor of a host {host!r} has ever worked this ledger; known: {', '.join(sorted(known)) or 'none'}"
        )


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        print("gpuwarden: there is nobody to ask: say --yes", file=sys.stderr)
        return False
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _time(parser: argparse.ArgumentParser, text: str, now: float) -> float:
    """A time of day is the next one; anything else a date and time. Local, unless it says its zone."""
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            here = datetime.fromtimestamp(now)  # noqa: DTZ006 - the clock on the wall, which may change in between
            hour, minute = map(int, text.split(":"))
            then = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (then if then > here else then + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        parser.error(f"{text!r} is no time: 18:30 and 2026-01-31T08:00 are")


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _reasoned(argparse.ArgumentParser(prog=f"gpuwarden {name}", description=description))
    parser.add_argument("--host", help=_HOST_HELP)
    return parser


def _add_end(parser: argparse.ArgumentParser) -> None:
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--for", dest="for_s", type=duration_s, metavar="2h", help="for so long: 90s, 30m, 2h, 1d, 1h30m")
    end.add_argument("--until", metavar="TIME", help="until then, local time: 18:30, or 2026-01-31T08:00")


def _answer_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _reasoned(argparse.ArgumentParser(prog=f"gpuwarden {name}", description=description))
    parser.add_argument("episode", type=int, help="its number, from `gpuwarden status`")
    return parser


def _reasoned(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_ledger(parser)
    parser.add_argument("--because", default="", metavar="TEXT", help="why, for whoever looks later")
    return parser
