"""The exporter's settings, read by a process of its own that ends with what checks them: that would be held for ever.

What that process does, and the form of its answer: exporter/settings_child.py.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import make_dataclass
from types import FrameType
from typing import TYPE_CHECKING, Final, cast

from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:  # it brings pydantic, which is not to be held here
    from exporter.settings import Settings

CHILD: Final = ("-m", "exporter.settings_child")
"""What Python runs; the number of an open file follows, and the options."""

READ_S: Final = 60.0
"""How long it may take, seconds: it is over in one, and a host that has just booted or is short of memory is slow."""

PREFIX: Final = "GPUWARDEN_EXPORTER_"
"""What the variables begin with that hold settings."""

ENDS: Final = (signal.SIGTERM, signal.SIGINT)
"""What ends us meanwhile, and it with us."""


class SettingsProcessError(GpuwardenError):
    """The settings could not be read; of themselves nothing is known."""


def read(argv: Sequence[str]) -> "Settings":
    """The settings that options and the environment give, with their values and without what checked them.

    Raises:
        SystemExit: nobody is to go on, after `--help` (0) or where a setting will not do (2); it has been told why.
        SettingsProcessError: the process could not be started, was killed, or took longer than `READ_S`.
    """
    with os.fdopen(os.memfd_create("settings"), "rb") as answer:
        code = _run(argv, answer.fileno())
        answer.seek(0)
        values = answer.read()
    if code < 0:
        raise SettingsProcessError(
            f"the process that reads the settings was ended by {signal.Signals(-code).name}: start the exporter anew; "
            f"the kernel's log tells whether memory was short"
        )
    if code or not values:
        raise SystemExit(code)
    found = pickle.loads(values)  # noqa: S301 - our own program wrote it, to a file that nobody else can open
    return cast("Settings", make_dataclass("Settings", found, frozen=True)(**found))


def passed_over(settings: Collection[str], environment: Mapping[str, str]) -> list[str]:
    """The variables that are called as settings are, by whoever misspelt one, and are none of these.

    Kubernetes sets some that are called so, in a pod beside a Service that is named after us.
    """
    known = {f"{PREFIX}{name.upper()}" for name in settings}
    return sorted(
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX) and name.upper() not in known
        if not _OF_A_SERVICE.search(name) and not value.startswith("tcp://")
    )


_OF_A_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def _run(argv: Sequence[str], answer: int) -> int:
    """How the process ended, as `subprocess` tells it. A signal that ends us ends it first, and is then ours again.

    It has both signals blocked, as it has from us as it starts: a Ctrl-C or a stop that all of a group are sent is for
    us to follow, and neither can come while there is a process that we do not know of.
    """
    ended_by: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        child = _started(argv, answer)

        def end(number: int, _frame: FrameType | None) -> None:
            ended_by.append(number)
            child.kill()

        # One that is ignored stays so, as a Ctrl-C does by what a shell has put in the background.
        theirs = {each: signal.signal(each, end) for each in ENDS if signal.getsignal(each) != signal.SIG_IGN}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        code = child.wait(READ_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(READ_S)
        raise SettingsProcessError(
            f"the settings were not read within {READ_S:g} s: this host is too slow to start"
        ) from None
    finally:
        for each, handler in theirs.items():
            signal.signal(each, handler)
    if ended_by:
        signal.raise_signal(ended_by[0])
        return 128 + ended_by[0]  # the first process of a container does not end by itself, by the kernel's rule
    return code


def _started(argv: Sequence[str], answer: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen([sys.executable, "-P", *CHILD, str(answer), *argv], pass_fds=(answer,))
    except OSError as error:
        raise SettingsProcessError(f"no process can be started to read the settings: {error}") from None
