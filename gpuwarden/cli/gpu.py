"""`gpuwarden gpu`: put GPUs into quarantine, release and list them.

A worker with a GPU in quarantine claims nothing and finishes its current job.
"""

import argparse
import sys
from contextlib import closing
from dataclasses import asdict

from gpuwarden.cli.acts import add_act, add_json, add_reason, runtime_dir
from gpuwarden.format import Parser, format_time, show, show_json, table
from gpuwarden.queue import JobStore, is_gpu
from gpuwarden.queue.open import current, existing
from gpuwarden.reporter import host_key


def command(argv: list[str]) -> int:
    """`gpuwarden gpu`."""
    arguments = _parser().parse_args(argv)
    with closing((existing if arguments.act is _list else current)(arguments.queue_db)) as store:
        code: int = arguments.act(store, arguments)
    return code


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    found = store.gpu_quarantine.quarantined()
    if arguments.json:
        for each in found:
            show_json(asdict(each))
    elif found:
        rows = [(each.gpu, each.host, each.worker or "-", format_time(each.since), each.reason) for each in found]
        show(*table(("GPU", "HOST", "WORKER", "SINCE", "REASON"), rows))
    else:
        show("no GPU is in quarantine", file=sys.stderr)
    return 0


def _quarantine(store: JobStore, arguments: argparse.Namespace) -> int:
    host = arguments.host or host_key(runtime_dir())
    store.gpu_quarantine.quarantine(
        [arguments.gpu], host=host, worker=arguments.worker, reason=arguments.reason, now=store.now()
    )
    if store.gpu_quarantine.keeps_anyone_from(arguments.gpu, host=host, worker=arguments.worker):
        show(f"{arguments.gpu} is in quarantine: its workers on {host} finish their job and claim no other")
    else:
        show(
            f"gpuwarden gpu: {arguments.gpu} is in quarantine, but no worker has registered it:"
            " check it against `nvidia-smi -L` and the --gpus of its workers",
            file=sys.stderr,
        )
    return 0


def _release(store: JobStore, arguments: argparse.Namespace) -> int:
    if store.gpu_quarantine.release_gpu(arguments.gpu):
        show(f"{arguments.gpu} is released: its workers claim jobs again")
        return 0
    show(f"gpuwarden gpu: {arguments.gpu} is not in quarantine: see `gpuwarden gpu list`", file=sys.stderr)
    return 1


def _gpu(text: str) -> str:
    if not is_gpu(text):
        raise argparse.ArgumentTypeError(f"invalid GPU UUID {text!a}: give GPU-... or MIG-..., as in `nvidia-smi -L`")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden gpu",
        description="GPUs in quarantine. Their workers claim nothing and finish their current jobs.",
    )
    acts = parser.add_subparsers(required=True)

    listing = add_act(acts, "list", _list, "list the GPUs in quarantine, oldest first")
    add_json(listing, "print one JSON object per line; times are Unix seconds")

    taking = add_act(
        acts,
        "quarantine",
        _quarantine,
        "put a GPU in quarantine: its workers claim no jobs. Keeps an existing quarantine",
    )
    taking.add_argument("gpu", metavar="UUID", type=_gpu, help="the GPU, as in `nvidia-smi -L`")
    taking.add_argument("--host", help="host key of the GPU's host; default: this host")
    taking.add_argument(
        "--worker",
        help="worker that uses the GPU without --gpus: also stop this worker from claiming jobs; default: none",
    )
    add_reason(taking, default="taken out of use by an operator")

    releasing = add_act(acts, "release", _release, "end the quarantine of a GPU; exit code 1 if it has none")
    releasing.add_argument("gpu", metavar="UUID", help="the GPU, as in `gpuwarden gpu list`")
    return parser
