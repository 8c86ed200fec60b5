"""`gpuwarden COMMAND`: run a command, and turn gpuwarden's errors into one line and an exit code.

`EXIT_CODES` has the codes. The exporter and the remediator register their commands as entry points, so this library
never imports them.
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Final

from gpuwarden import __version__
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, show

Command = Callable[[list[str]], int]
GROUP: Final = "gpuwarden.commands"

_OWN: Final[Mapping[str, str]] = {
    "run": "gpuwarden.supervisor.run:command",
    "worker": "gpuwarden.cli.worker:command",
    "job": "gpuwarden.cli.job:command",
    "runs": "gpuwarden.cli.runs:command",
    "queue": "gpuwarden.cli.queue:command",
    "events": "gpuwarden.cli.events:command",
    "gpu": "gpuwarden.cli.gpu:command",
    "host": "gpuwarden.cli.host:command",
    "init-db": "gpuwarden.cli.init_db:command",
    "completion": "gpuwarden.cli.completion:command",
    "gateway": "gpuwarden.gateway.main:command",
}
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "start": {
        "run": "run a command and guard it: end it when it hangs, start it again",
        "up": "run the whole chain on this host, on loopback",
        "init": "write the files for your Prometheus, Alertmanager and systemd",
        "init-db": "create the PostgreSQL databases and roles of several hosts",
        "completion": "print a shell's script that completes these commands",
    },
    "look": {
        "status": "show health, held actions and what needs an operator",
        "doctor": "check every link of the chain, and say how to repair a broken one",
        "top": "show hosts, GPUs, workers, jobs and episodes, redrawn in place",
        "drill": "send a test alert through the chain, and measure each hop",
        "ledger": "show episodes with facts, decisions and actions",
        "notify": "send a test message to the administrators or to an address",
    },
    "act": {
        "arm": "allow remedies to act, for all or by remedy and host",
        "disarm": "stop remedies from acting, at once",
        "approve": "approve one action",
        "decline": "decline one action",
        "pause": "start no new action for a while",
        "resume": "end a pause",
        "breaker": "close the circuit breaker",
    },
    "jobs": {
        "job": "submit, list, wait for, cancel, block or requeue jobs",
        "runs": "submit, list, show and cancel runs of jobs",
        "wrangle": "find faulty workers and jobs from failed items",
        "queue": "list queues, change settings, migrate tables",
        "events": "print ended jobs and runs, once per consumer",
    },
    "workers, GPUs and hosts": {
        "worker": "run a worker; list, lock, unlock, drain workers",
        "gpu": "quarantine, release and list GPUs",
        "host": "enrol hosts; list, rotate and revoke their tokens; end tasks on them",
    },
    "Kubernetes": {
        "seats": "show, check and remove the GPU memory that Kubernetes nodes advertise",
    },
    "services": {
        "exporter": "publish this host's workers, containers and GPUs to Prometheus, or report them",
        "remediator": "receive alerts (serve) and act on them (execute)",
        "gateway": "give workers the queue without a database, and take reports of hosts",
    },
}
"""Help of each command, in the groups and the order of the list."""

HELP: Final[Mapping[str, str]] = {name: text for group in GROUPS.values() for name, text in group.items()}

EXIT_CODES: Final[Mapping[str, str]] = {
    "0": "success; a service ended by SIGTERM or Ctrl-C; a watched page ended by q",
    "1": "failure, or the answer is no: something needs an operator (`status`), a link is broken (`doctor`), or a job "
    "did not complete (`job wait`)",
    "2": "wrong usage: an argument is unknown, missing or invalid",
    "75": "`run`, `worker run`: gpuwarden ended it over its time budget",
    "76": "`run`, `worker run`: gpuwarden ended it because it stalled",
    "77": "`worker run`: its job has another owner, or another process replaced it",
    "78": "`run`, `worker run`: gpuwarden ended it as unhealthy",
    "79": "`worker run`: the process cannot survive an error; its job is queued again",
    "124": "`job wait`: `--timeout-s` is over",
    "126, 127": "`run`: the command is not executable, or not found",
    "128 + N": "ended by signal N: 130 by Ctrl-C, 143 by SIGTERM",
}
"""Exit codes of all commands. `gpuwarden run` otherwise returns the code of its command."""

_EXTRAS: Final[Mapping[str, str]] = {"gpuwarden": "jobs", "deploy": "exporter,remediator,up"}
"""Extras that install a package's dependencies, if the name differs."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in _OWN:
        return _run(given[0], _OWN[given[0]], given[1:])
    known = commands()
    parser = Parser(
        prog="gpuwarden",
        usage="gpuwarden [--help] [--version] COMMAND ...",
        description="Detects hung GPU workers and restarts them.",
        epilog=f"{_listing(known)}\n\nSee `gpuwarden COMMAND --help`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", choices=list(known), help=argparse.SUPPRESS)
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.command is None:
        parser.print_help(sys.stderr)
        return 2
    arguments = given[given.index(chosen.command) + 1 :]  # with a leading --
    return _run(chosen.command, known[chosen.command], arguments)


def _run(name: str, target: str, arguments: list[str]) -> int:
    try:
        return load(target)(arguments)
    except GpuwardenError as error:
        show(*f"gpuwarden {name}: {error}".split("\n"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone
        return 1


def _listing(known: Collection[str]) -> str:
    """The commands by group."""
    groups = {title: [name for name in group if name in known] for title, group in GROUPS.items()}
    groups["other commands"] = [name for name in known if name not in HELP]
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:12}{HELP.get(name, '')}".rstrip() for name in names)])
        for title, names in groups.items()
        if names
    )


def commands() -> dict[str, str]:
    """Each command, and `module:function` that runs it, in the order of the list."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - it doubles the time of `run`'s start

    found = {entry.name: entry.value for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}
    every = {**_OWN, **found}
    order = list(HELP)
    return dict(sorted(every.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))


def load(target: str) -> Command:
    """Import a command's function."""
    module, _, function = target.partition(":")
    # httpx imports its own command, which takes 50 ms and 6 MiB. Only a worker's handler may need it.
    if ".worker" not in target:
        sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # structlog imports rich, 5 MiB, for tracebacks in colour, which `logs` does not write.
    hides_rich = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
    gc.disable()  # imported objects stay: collections would cost a tenth of the start
    try:
        command: Command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        extra = _EXTRAS.get(package, package)
        raise GpuwardenError(
            f"needs the package {error.name!r}: in a checkout of gpuwarden, pip install '.[{extra}]' (or '.[all]')"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
        if hides_rich:
            del sys.modules["rich"]
    return command
