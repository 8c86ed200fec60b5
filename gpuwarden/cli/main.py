"""`gpuwarden COMMAND`: finds the command, runs it, and turns our own errors into one line and an exit code.

Exit codes: 0 done; 1 it failed, and said why; 2 it was called wrongly; 75 to 78 a worker lost its job. The exporter and
the remediator register their commands as entry points, so that this library never imports what is built on it.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final

from gpuwarden import __version__
from gpuwarden.errors import GpuwardenError

Command = Callable[[list[str]], int]
GROUP: Final = "gpuwarden.commands"

_OWN: Final[Mapping[str, str]] = {
    "worker": "gpuwarden.cli.worker:command",
    "job": "gpuwarden.cli.job:command",
    "runs": "gpuwarden.cli.runs:command",
    "queue": "gpuwarden.cli.queue:command",
    "events": "gpuwarden.cli.events:command",
    "gpu": "gpuwarden.cli.gpu:command",
}
_HELP: Final[Mapping[str, str]] = {
    "up": "run the whole chain on this host, on loopback",
    "init": "write the files for a Prometheus, Alertmanager and systemd of your own",
    "status": "is the chain alive, what waits, what needs a person",
    "ledger": "show what was seen, decided and done; what a dry run would have done",
    "arm": "let it act, in all or by remedy and host; until then it only records",
    "disarm": "stop it from acting, at once",
    "approve": "say yes to what one episode asks, where it was armed with approval",
    "decline": "say no to it",
    "pause": "let nothing new begin for a while",
    "resume": "end a pause",
    "breaker": "close the circuit breaker",
    "gpu": "take a GPU out of use, put it back, list those out of use",
    "job": "put jobs in the queue, see what becomes of them, wait for, end, hold or repeat them",
    "runs": "submit jobs that wait for one another, from a file; list, show, end runs",
    "wrangle": "is it the worker that is faulty, or the job? what failed items tell of both",
    "queue": "what there is in each queue, and what is set for it",
    "events": "print what has ended, once for each consumer",
    "worker": "run a worker; list, lock, unlock, drain workers",
    "exporter": "publish this host's workers, containers and GPUs to Prometheus",
    "remediator": "receive alerts (serve) and act on them (execute)",
}
"""What each command does, in the order in which they are listed; others come after them."""

_EXTRAS: Final[Mapping[str, str]] = {"gpuwarden": "jobs", "deploy": "exporter,remediator,up"}
"""The extra that brings what a package needs, where it is not called like the package."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    commands = _commands()
    listing = "\n".join(f"  {name:12}{_HELP.get(name, '')}" for name in commands)
    parser = argparse.ArgumentParser(
        prog="gpuwarden",
        description="Sees a wedged GPU worker and mends it.",
        epilog=f"commands:\n{listing}\n\n`gpuwarden COMMAND --help` says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", nargs="?", choices=list(commands), help="one of the commands below"
    )
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the command's own arguments")
    chosen = parser.parse_args(argv)
    if chosen.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        command = _load(commands[chosen.command])
        return command(chosen.arguments)
    except GpuwardenError as error:
        print(f"gpuwarden {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; there is nobody to tell
        return 1


def _commands() -> dict[str, str]:
    found = {entry.name: entry.value for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}
    known = {**_OWN, **found}
    order = list(_HELP)
    return dict(sorted(known.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))


def _load(target: str) -> Command:
    module, _, function = target.partition(":")
    try:
        command: Command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        extra = _EXTRAS.get(package, package)
        raise GpuwardenError(
            f"needs the package {error.name!r}, which is not installed: pip install 'gpuwarden[{extra}]'"
        ) from error
    return command
