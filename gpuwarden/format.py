"""Texts of the commands: help, times, durations and names."""

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


def printable(text: str) -> str:
    """Escape unprintable characters in text from labels and jobs."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


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


def storable(text: str, *, length_max: int = 500) -> str:
    """Escape what UTF-8 or PostgreSQL cannot store, and cut the text."""
    return text[:length_max].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
