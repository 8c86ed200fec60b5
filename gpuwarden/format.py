"""How the commands word their help and what they found, and read what people write, at a terminal."""

import argparse
import getpass
import os
import re
import socket
import time
from typing import Final

_NO_DEFAULT: Final = re.compile(r" \(default: (None|\(\)|)\)$")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option that has one."""

    def _expand_help(self, action: argparse.Action) -> str:
        return _NO_DEFAULT.sub("", super()._expand_help(action))


_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def plain(text: str) -> str:
    """Names and sentences hold what labels and jobs said: nothing reaches a terminal but what can be printed."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def when(at: float) -> str:
    """A time, local, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def stamp(at: float) -> str:
    """A time, UTC, to the second: in what is kept, for people on other hosts."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def ago(seconds: float) -> str:
    """A duration as people say it, in its two largest units."""
    left, told = max(0, round(seconds)), list[str]()
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= unit_s or (name == "s" and not told):
            told.append(f"{left // unit_s} {name}")
            left %= unit_s
    return " ".join(told[:2])


def duration_s(text: str) -> float:
    """A duration as a person writes it, in seconds; what argparse calls for the options that take one."""
    parts = re.findall(r"(\d{1,9})([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: 90s, 30m, 2h, 1d and 1h30m are")
    return float(sum(int(number) * _UNITS_S[unit] for number, unit in parts))


def who() -> str:
    """Who gives an order: the account, also behind sudo, and the machine it was given on."""
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # an account without a name, as in a container
            user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def kept(text: str, *, length_max: int = 500) -> str:
    """A text as both databases take it: what no UTF-8 can hold is spelt out, and NUL, which PostgreSQL refuses."""
    return text[:length_max].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
