"""`gpuwarden host`: enrol and forget hosts; list, rotate and revoke their tokens; order them to end tasks."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from gpuwarden.cli import host_tasks
from gpuwarden.cli.acts import add_act, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, format_duration, format_time, nearest, show, show_json, table
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.silence import QUIET_S, SeenHost
from gpuwarden.queue.hosts.task_orders import TaskOrder
from gpuwarden.queue.hosts.tokens import GRACE_MAX_S, HostToken, Scope
from gpuwarden.queue.open import current, existing
from gpuwarden.state_file import TEXT_MAX, StateFileError, check_name, is_text


def command(argv: list[str]) -> int:
    """`gpuwarden host`."""
    arguments = _parser().parse_args(argv)
    asks = arguments.act in (_list, _show)
    with closing((existing if asks else current)(arguments.queue_db)) as store:
        code: int = arguments.act(store, arguments)
    return code


def _enrol(store: JobStore, arguments: argparse.Namespace) -> int:
    host, queues = arguments.host, arguments.queues
    token = store.host_tokens.enrol(host, scopes=arguments.scopes, queues=queues, now=store.now())
    only = f", only for queue {' and '.join(queues)}" if queues else ""
    return _hand_out(token, host, f"{host} is enrolled for {' and '.join(arguments.scopes)}{only}")


def _rotate(store: JobStore, arguments: argparse.Namespace) -> int:
    grace_s, limits = arguments.grace_s, {"scopes": arguments.scopes, "queues": arguments.queues}
    token = store.host_tokens.rotate(arguments.host, **limits, grace_s=grace_s, now=store.now())
    ends = f"ends in {format_duration(grace_s)}" if grace_s else "has ended"
    return _hand_out(token, arguments.host, f"{arguments.host} has a new token, and the old one {ends}")


def _hand_out(token: str, host: str, what: str) -> int:
    """Print a token alone on stdout, so that a file can take it."""
    try:
        show(token, flush=True)
    except OSError as error:
        again = f"make another with `gpuwarden host rotate {host}`"
        raise GpuwardenError(f"{what}, but the token cannot be printed ({error.strerror}): {again}") from None
    show(f"gpuwarden host: {what}; the token is shown only now", file=sys.stderr)
    return 0


def _revoke(store: JobStore, arguments: argparse.Namespace) -> int:
    if store.host_tokens.revoke(arguments.host, now=store.now()):
        show(f"{arguments.host} is revoked: the gateway refuses its token")
        return 0
    show(f"gpuwarden host: {arguments.host} has no valid token: see `gpuwarden host list`", file=sys.stderr)
    return 1


def _forget(store: JobStore, arguments: argparse.Namespace) -> int:
    if store.seen_hosts.forget(arguments.host, now=store.now()):
        show(f"{arguments.host} is forgotten until it is heard again")
        return 0
    why = f"no gateway knows it, or it was heard in the last {QUIET_S:.0f} s: stop its workers first"
    show(f"gpuwarden host: {arguments.host} is not forgotten: {why}", file=sys.stderr)
    return 1


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    found, now = store.host_tokens.rows(), store.now()
    seen = {each.host: each for each in store.seen_hosts.rows()}
    others = [each for host, each in seen.items() if host not in {token.host for token in found}]
    if arguments.json:
        for token in found:
            show_json(_json_of(token, now) | _times(seen.get(token.host)))
        for host in others:
            show_json({"host": host.host} | _times(host))
    elif found or others:
        rows = [
            (each.host, _state(each, now), *_figures(each, now), _heard(seen.get(each.host), now)) for each in found
        ]
        rows += [(each.host, "no token", "-", "-", "-", _heard(each, now)) for each in others]
        show(*table(("HOST", "STATE", "SCOPES", "CREATED", "SEEN", "HEARD"), rows))
    else:
        show("no host is enrolled: `gpuwarden host enrol NAME` makes its token", file=sys.stderr)
    return 0


def _heard(seen: SeenHost | None, now: float) -> str:
    if seen is None:
        return "-"
    return f"{'lost, ' if seen.lost_at is not None else ''}{format_duration(seen.silent_s(now))} ago"


def _times(seen: SeenHost | None) -> dict[str, float | None]:
    its = (None, None) if seen is None else (seen.heard_at, seen.lost_at)
    return dict(zip(("heard_at", "lost_at"), its, strict=True))


def _show(store: JobStore, arguments: argparse.Namespace) -> int:
    host, now = arguments.host, store.now()
    found, orders = store.host_tokens.rows(host), store.task_orders.of_host(host, now=now)
    if not found and not orders:
        raise GpuwardenError(f"{host} is not enrolled: see `gpuwarden host list`")
    reports = {each.kind.value: each.age_s for each in store.host_reports.ages(host, now=now)}
    if arguments.json:
        tokens = [_json_of(each, now) for each in found]
        ordered = [host_tasks.to_json(each) for each in orders]
        show_json({"host": host, "tokens": tokens, "report_ages_s": reports, "task_orders": ordered})
    else:
        show(*_page(host, found, reports, now), *_orders(store, host, orders))
    return 0


def _orders(store: JobStore, host: str, orders: list[TaskOrder]) -> Iterator[str]:
    heard = host_tasks.heard_at(store, host) if orders else None
    for each in orders:
        yield f"{'order':9}{host_tasks.describe(each, heard)}"


def _page(host: str, tokens: list[HostToken], reports: dict[str, float], now: float) -> Iterator[str]:
    yield f"{'host':9}{host}"
    for kind, age_s in reports.items():
        yield f"{'report':9}{kind}, {format_duration(age_s)} ago"
    for each in tokens:
        scopes, created, seen = _figures(each, now)
        yield f"{'token':9}{each.token_id}, {_state(each, now)}"
        queues = "all" if each.queues is None else ", ".join(each.queues)
        for name, value in (("scopes", scopes), ("queues", queues), ("created", created), ("seen", seen)):
            yield f"{name:9}{value}"


def _figures(token: HostToken, now: float) -> tuple[str, str, str]:
    seen = "never" if token.last_seen_at is None else f"{format_duration(now - token.last_seen_at)} ago"
    return ", ".join(token.scopes), format_time(token.created_at), seen


def _state(token: HostToken, now: float) -> str:
    if token.revoked_at is None:
        return "valid"
    return f"{'replaced, valid until' if token.is_valid(now) else 'revoked'} {format_time(token.revoked_at)}"


def _json_of(token: HostToken, now: float) -> dict[str, Any]:
    return {**asdict(token), "valid": token.is_valid(now)}


def _host(text: str) -> str:
    try:
        return check_name(text, what="host")
    except StateFileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _scopes(text: str) -> tuple[Scope, ...]:
    named = [each.strip() for each in text.split(",")]
    for each in named:
        if each not in set(Scope):
            problem = f"scope {each[:80]!a} is unknown{nearest(each, set(Scope)) or ': use ' + ','.join(Scope)}"
            raise argparse.ArgumentTypeError(problem)
    return tuple(each for each in Scope if each in named)


def _queue(text: str) -> str:
    if not is_text(text):
        raise argparse.ArgumentTypeError(f"queue {text[:80]!a} is invalid: use 1 to {TEXT_MAX} printable characters")
    return text


def _grace_s(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= GRACE_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!a} is invalid: use seconds from 0 to {GRACE_MAX_S:.0f}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden host",
        description="Hosts that use the gateway, each with its own token. The queue keeps a hash of each token.",
    )
    acts = parser.add_subparsers(required=True)
    scopes = f"what the token allows, with commas: {', '.join(Scope)}"

    enrolling = add_act(acts, "enrol", _enrol, "make the token of a host, and print it once")
    enrolling.add_argument("--scopes", type=_scopes, default=tuple(Scope), help=f"{scopes}; default: all")
    queue = "queue that the workers of the host may use; repeatable"
    queues: dict[str, Any] = {"dest": "queues", "action": "append", "type": _queue, "metavar": "QUEUE"}
    enrolling.add_argument("--queue", **queues, help=f"{queue}; default: all")

    listing = add_act(acts, "list", _list, "list hosts with the last use of their tokens, and when they were heard")
    add_json(listing, "print one JSON object per line; times are Unix seconds")

    showing = add_act(
        acts, "show", _show, "show the reports of a host, its tokens without their secrets, and its newest orders"
    )
    add_json(showing, "print one JSON object; times are Unix seconds")

    rotating = add_act(acts, "rotate", _rotate, "make a new token of a host, print it once, and end the old one")
    rotating.add_argument("--scopes", type=_scopes, help=f"{scopes}; default: those of the old token")
    rotating.add_argument("--queue", **queues, help=f"{queue}; default: those of the old token")
    rotating.add_argument(
        "--grace-s", type=_grace_s, default=0.0, metavar="SECONDS", help="how long the old token stays valid, seconds"
    )

    forgetting = add_act(
        acts, "forget", _forget, "forget a removed host, so that it is not lost; exit code 1 if it was heard lately"
    )
    revoking = add_act(acts, "revoke", _revoke, "end all tokens of a host at once; exit code 1 if it has none")
    ending = host_tasks.add_end_task(acts)
    for act in (enrolling, showing, rotating, revoking, forgetting, ending):
        act.add_argument("host", metavar="NAME", type=_host, help="host key of the host, as in its file `host`")
    host_tasks.add_task(ending)
    return parser
