"""`gpuwarden seats`: what each Kubernetes node advertises of its GPU memory, what is wrong, and how to remove it (C1).

Exit codes: 0 success; 1 a problem found by `check`, or a failure; 2 wrong usage.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.cli.acts import add_json
from gpuwarden.db.running_up import environment
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, show, show_json, table
from gpuwarden.kube import api as kube_api
from remediator.seats import (
    NODE_LABELS,
    RESOURCE,
    GpuSeats,
    Node,
    PodBudget,
    Rules,
    Seats,
    policy_problem,
    problems,
    rebuild_warning,
)

if TYPE_CHECKING:
    from remediator.clients.nodes import Nodes

TIMEOUT_S: Final = 5.0
"""Timeout of a query, seconds."""

COMES_BACK_S: Final = 5.0
"""How long `remove` watches for an executor that advertises the seats again, seconds."""

_QUERIES: Final = {
    "size": "max by (host, gpu) (gpuwarden_gpu_memory_size_bytes)",
    "used": "max by (host, gpu) (gpuwarden_gpu_memory_used_bytes)",
    "declared": "sum by (host, gpu) (group by (host, container, gpu) (gpuwarden_container_gpu_memory_bytes) "
    "* on (host, container) group_left max by (host, container) (gpuwarden_container_gpu_memory_budget_bytes))",
    "peak": "sum by (host, gpu) (max by (host, container, gpu) (gpuwarden_container_gpu_memory_peak_bytes))",
}
"""Queries of bytes by host and GPU. The host is the node."""

_Usage = Mapping[str, Mapping[tuple[str, str], float]]


def command(argv: list[str]) -> int:
    """`gpuwarden seats`."""
    wanted = _parser().parse_args(argv)
    api = kube_api.connect(wanted.kubeconfig)
    from remediator.clients.nodes import Nodes  # noqa: PLC0415 - slow to import

    code: int = wanted.act(Nodes(api, wanted.budget_resource), wanted)
    return code


def _show(nodes: "Nodes", wanted: argparse.Namespace) -> int:
    found = _read(nodes, wanted)
    if wanted.json:
        for each in found:
            show_json(_json_of(each))
    elif found:
        rows = [
            (
                each.node,
                *map(_mib, (each.advertised_mib, each.declared_mib, each.free_mib, each.used_mib, each.peak_mib)),
            )
            for each in found
        ]
        show(*table(("NODE", "ADVERTISED", "DECLARED", "FREE", "USED", "PEAK"), rows))
        show(*(line for each in found if len(each.gpus) > 1 for line in _gpu_lines(each)))
    else:
        show(_no_node(wanted), file=sys.stderr)
    return 0


def _check(nodes: "Nodes", wanted: argparse.Namespace) -> int:
    found = _read(nodes, wanted)
    wrong = [problem for each in found for problem in problems(each)]
    if not found:
        wrong.append(_no_node(wanted))
    notes = [note for each in found if (note := rebuild_warning(each))]
    policies = nodes.bound_policies()
    missing = policy_problem(policies)
    if missing:
        (notes if policies is None else wrong).append(missing)
    if wanted.json:
        show_json({"ok": not wrong, "problems": wrong, "notes": notes, "nodes": [_json_of(each) for each in found]})
    else:
        show(*(f"problem: {each}" for each in wrong), *(f"note: {each}" for each in notes))
        show("no problem found" if not wrong else f"{len(wrong)} to solve")
    return 1 if wrong else 0


def _remove(nodes: "Nodes", wanted: argparse.Namespace) -> int:
    if bool(wanted.nodes) == wanted.all:
        raise GpuwardenError("give the names of nodes, or --all")
    holders = [each for each in nodes.list_all() if _is_selected(each, wanted) and _has_seats(each)]
    for each in holders:
        nodes.advertise(each.name, None)
    back = _advertised_again(nodes, holders)
    for each in holders:
        if each.name not in back:
            show(f"{each.name} advertises no seats any more, and its pods run on")
    for name in sorted(set(wanted.nodes) - {each.name for each in holders}):
        show(f"{name} advertised no seats")
    if back:
        raise GpuwardenError(
            f"an executor advertises the seats of {', '.join(back)} again: stop it, or set --seats off"
        )
    if not holders and wanted.all:
        show("no node advertises seats")
    return 0


def _untaint(nodes: "Nodes", wanted: argparse.Namespace) -> int:
    if bool(wanted.nodes) == wanted.all:
        raise GpuwardenError("give the names of nodes, or --all")
    for name in wanted.nodes or nodes.list_tainted():
        had = nodes.set_taint(name, tainted=False)
        show(f"{name} may get new pods: its taint is removed" if had else f"{name} had no taint of a faulty GPU")
    return 0


def _advertised_again(nodes: "Nodes", removed: Sequence[Node]) -> list[str]:
    until_s = time.monotonic() + COMES_BACK_S
    back: list[str] = []
    while removed and not back and time.monotonic() < until_s:
        time.sleep(0.5)
        names = {each.name for each in removed}
        back = [each.name for each in nodes.list_all() if each.name in names and each.capacity_mib is not None]
    return back


def _read(nodes: "Nodes", wanted: argparse.Namespace) -> list[Seats]:
    """The selected nodes that have a GPU or seats."""
    rules = Rules(resource=wanted.budget_resource, node_labels=tuple(wanted.node_labels.split(",")))
    listed = [each for each in nodes.list_all() if _is_selected(each, wanted)]
    budgets = nodes.list_budgets()
    usage = {} if wanted.prometheus == "none" else _read_usage(wanted.prometheus)
    return [
        _seats(node, rules, budgets.get(node.name, []), usage)
        for node in sorted(listed, key=lambda each: each.name)
        if rules.is_gpu_node(node) or _has_seats(node)
    ]


def _seats(node: Node, rules: Rules, budgets: Sequence[PodBudget], usage: _Usage) -> Seats:
    gpus = sorted({gpu for values in usage.values() for host, gpu in values if host == node.name})
    return Seats(
        node=node.name,
        is_gpu_node=rules.is_gpu_node(node),
        capacity_mib=node.capacity_mib,
        advertised_mib=node.allocatable_mib,
        declared_mib=sum(each.mib for each in budgets),
        pods=sum(not each.invalid for each in budgets),
        invalid=tuple(f"{each.pod} on {node.name}: {each.invalid}" for each in budgets if each.invalid),
        used_mib=_sum(_value(usage, "used", node.name, gpu) for gpu in gpus),
        peak_mib=_sum(_value(usage, "peak", node.name, gpu) for gpu in gpus),
        gpus=tuple(
            GpuSeats(
                gpu=gpu,
                size_mib=_value(usage, "size", node.name, gpu),
                declared_mib=_value(usage, "declared", node.name, gpu),
                used_mib=_value(usage, "used", node.name, gpu),
                peak_mib=_value(usage, "peak", node.name, gpu),
            )
            for gpu in gpus
        ),
    )


def _read_usage(url: str) -> _Usage:
    """The use of each GPU; empty if Prometheus does not answer, which is shown."""
    import httpx  # noqa: PLC0415 - slow to import

    found: dict[str, dict[tuple[str, str], float]] = {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            for name, query in _QUERIES.items():
                answer = client.get(f"{url.rstrip('/')}/api/v1/query", params={"query": query}).raise_for_status()
                series: list[dict[str, Any]] = answer.json()["data"]["result"]
                found[name] = {
                    (each["metric"].get("host", ""), each["metric"].get("gpu", "")): float(each["value"][1])
                    for each in series
                }
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        show(f"gpuwarden seats: used and peak are unknown, {url} does not answer: {error}", file=sys.stderr)
        return {}
    return found


def _value(usage: _Usage, name: str, host: str, gpu: str) -> int | None:
    value = usage.get(name, {}).get((host, gpu))
    return None if value is None or value != value else round(value / 2**20)  # noqa: PLR0124 - NaN is unknown


def _sum(values: Iterable[int | None]) -> int | None:
    every = list(values)
    return sum(each for each in every if each is not None) if every and None not in every else None


def _gpu_lines(seats: Seats) -> Iterator[str]:
    for each in seats.gpus:
        figures = f"{_mib(each.size_mib)} MiB, declared {_mib(each.declared_mib)}, used {_mib(each.used_mib)}"
        yield f"{seats.node} {each.gpu}: {figures}, peak {_mib(each.peak_mib)}"


def _is_selected(node: Node, wanted: argparse.Namespace) -> bool:
    return not wanted.nodes or node.name in wanted.nodes


def _has_seats(node: Node) -> bool:
    return node.capacity_mib is not None or node.allocatable_mib is not None


def _mib(value: int | None) -> str:
    return "-" if value is None else str(value)


def _json_of(seats: Seats) -> dict[str, Any]:
    return {**asdict(seats), "free_mib": seats.free_mib}


def _no_node(wanted: argparse.Namespace) -> str:
    return f"no node has one of the labels {wanted.node_labels}, or seats: see --node-labels"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden seats",
        description="Seats: the GPU memory that Kubernetes nodes advertise to the scheduler, in whole MiB.",
    )
    acts = parser.add_subparsers(required=True)
    showing = _add_act(acts, "show", _show, "show what each node advertises, and what its pods declare and use")
    add_json(showing, "print one JSON object per node")
    checking = _add_act(acts, "check", _check, "find problems of seats; exit code 1 if there are any")
    add_json(checking, "print one JSON object")
    for act in (showing, checking):
        act.add_argument(
            "--prometheus",
            metavar="URL",
            default=_prometheus(),
            help="Prometheus, for used and peak memory; 'none' to skip (default: %(default)s)",
        )
        act.add_argument(
            "--node-labels",
            metavar="LABELS",
            default=environment().get("GPUWARDEN_REMEDIATOR_SEATS_NODE_LABELS", ",".join(NODE_LABELS)),
            help="labels of nodes with a GPU, with commas; one suffices (default: %(default)s)",
        )
    removing = _add_act(acts, "remove", _remove, "remove the seats of nodes; pods that hold some run on")
    untainting = _add_act(acts, "untaint", _untaint, "remove the taint that a faulty GPU gave to nodes")
    for act in (removing, untainting):
        act.add_argument("--all", action="store_true", help="all nodes")
    return parser


def _add_act(acts: Any, name: str, act: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(act=act)
    parser.add_argument("nodes", metavar="NODE", nargs="*", help="only these nodes")
    parser.add_argument("--kubeconfig", type=Path, help="kubeconfig file; default as for kubectl")
    parser.add_argument(
        "--budget-resource",
        metavar="NAME",
        default=environment().get("GPUWARDEN_REMEDIATOR_BUDGET_RESOURCE", RESOURCE),
        help="extended resource of the seats (default: %(default)s)",
    )
    return parser


def _prometheus() -> str:
    named = environment().get("GPUWARDEN_REMEDIATOR_PROMETHEUS", "").split(",")[0].strip()
    return named or "http://127.0.0.1:9090"
