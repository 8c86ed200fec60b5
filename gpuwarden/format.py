"""Texts of the commands: arguments and their errors, help, times, durations, tables and names."""

import argparse
import difflib
import getpass
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Final, NoReturn, TextIO

from gpuwarden.errors import WorkerStopping

_PACKAGE: Final = __file__.removesuffix("format.py")
_NO_DEFAULT: Final = re.compile(r" \(default: (None|\(\)|)\)$")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _expand_help(self, action: argparse.Action) -> str:
        return _NO_DEFAULT.sub("", super()._expand_help(action))


COMMAND: Final = "COMMAND"
"""How help names a subcommand."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with errors of one line."""

    before: ClassVar[Callable[["Parser"], None] | None] = None
    """Called before a parser parses; see `gpuwarden.cli.parsers`."""

    subcommands: Any = None
    """The action of the subcommands, with their parsers in `choices`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; a subcommand refuses unknown arguments itself."""
        if Parser.before is not None:
            Parser.before(self)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            near = nearest(names[0], self._option_string_actions) if names else ""
            self.error(f"unknown argument {' '.join(unknown)}{near}")
        return found, unknown

    def add_subparsers(self, **options: Any) -> Any:
        """Add subcommands."""
        self.subcommands = super().add_subparsers(title="commands", metavar=COMMAND, **options)
        return self.subcommands

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        message = message.replace("the following arguments are required:", "missing")
        if message == f"missing {COMMAND}":
            message = f"{message}: use {', '.join(self._commands())}"
        self.exit(2, printable(f"{self.prog}: {message} (see `{self.prog} --help`)") + "\n")

    def _commands(self) -> list[str]:
        return list(self.subcommands.choices)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Sequence[str] = [str(each) for each in action.choices or ()]
        if not choices or str(value) in choices:
            return
        problem = f"{str(value)!r} is unknown{nearest(str(value), choices) or ': use ' + ', '.join(choices)}"
        if action.metavar == COMMAND:
            self.error(problem)
        raise argparse.ArgumentError(action, problem)


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean X?`, or nothing if no known name is near."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


TRACE_MAX_BYTES: Final = 8192
"""Most bytes of a stored traceback."""

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def printable(text: str) -> str:
    """Escape unprintable characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(*lines: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print lines, escaped. Commands print in no other way."""
    for line in lines:
        print(printable(str(line)), file=file, end=end, flush=flush)


def show_json(value: object) -> None:
    """Print one line of JSON."""
    print(json_line(value))  # noqa: T201


def json_line(value: object) -> str:
    """JSON without control characters."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def format_time(at: float) -> str:
    """Local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_utc_time(at: float) -> str:
    """UTC time, to the second, for records."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def format_duration(seconds: float) -> str:
    """A duration in its two largest units."""
    left, parts = max(0, round(seconds)), list[str]()
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= unit_s or (name == "s" and not parts):
            parts.append(f"{left // unit_s} {name}")
            left %= unit_s
    return " ".join(parts[:2])


def format_age(seconds: float) -> str:
    """A duration in one unit, for a column: `150s`, `5m`, `3h`, `9d`."""
    for name, unit_s, up_to_s in (("s", 1, 300), ("m", 60, 7200), ("h", 3600, 172800)):
        if seconds < up_to_s:
            return f"{max(0, int(seconds / unit_s))}{name}"
    return f"{int(seconds / 86400)}d"


def count_of(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def command_name(argv: Sequence[str]) -> str:
    """File name of a command's script, else of its program: `train.py`."""
    script = next((each for each in argv if each.endswith((".py", ".sh"))), argv[0])
    return script.rpartition("/")[2]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; each column is as wide as its widest cell."""
    lines = [head, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def parse_duration_s(text: str) -> float:
    """Parse a duration into seconds, as an argparse type."""
    parts = re.findall(r"(\d{1,9})([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r}: write 90s, 30m, 2h, 1d or 1h30m")
    return float(sum(int(number) * _UNITS_S[unit] for number, unit in parts))


def operator_name() -> str:
    """The operator: account (also behind sudo) and host."""
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # an account without a name, as in a container
            user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def text_of(value: object) -> str:
    """`str(value)` of foreign code, which may raise anything."""
    try:
        return str(value)
    except WorkerStopping:
        raise
    except BaseException as error:  # noqa: BLE001 - foreign code
        return f"the text of this {type(value).__name__} cannot be read: {type(error).__name__}"


def error_text(error: BaseException) -> str:
    """Type and text of an exception, to store."""
    return storable(f"{type(error).__name__}: {text_of(error)}")


def trace_of(error: BaseException) -> str:
    """The traceback, from the first frame outside gpuwarden."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            frames = frames.tb_next
        shown = traceback.format_exception(type(error), error, frames or error.__traceback__)
        return "".join(shown).rstrip("\n")
    except WorkerStopping:
        raise
    except BaseException:  # noqa: BLE001 - foreign code
        return error_text(error)


def trace_end(error: BaseException) -> str:
    """The last `TRACE_MAX_BYTES` of the traceback, to store."""
    text = trace_of(error).encode("utf-8", "backslashreplace").replace(b"\0", b"\\x00")
    return text[-TRACE_MAX_BYTES:].decode("utf-8", "ignore")


def trace_lines(text: str) -> list[str]:
    """Lines of a stored traceback, escaped."""
    return [printable(line) for line in text.split("\n")]


def storable(text: str, *, length_max: int = 500) -> str:
    """Escape what UTF-8 or PostgreSQL cannot store, and cut the text."""
    kept = text[:length_max].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return kept[:length_max]  # escapes are longer
