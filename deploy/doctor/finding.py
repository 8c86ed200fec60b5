"""The result of one check. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict, a message, and the command or file that repairs the link."""

    verdict: Verdict
    says: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A part that could not be read, and why.

    Args:
        why: the reason.
        denied: this user may not read it, so nothing is known about the part.
        skipped: the user chose not to check it.
    """

    why: str
    denied: bool = False
    skipped: bool = False


def ok(says: str) -> Finding:
    """The link works."""
    return Finding(verdict=Verdict.OK, says=says)


def warning(says: str, fix: str) -> Finding:
    """The link works, but with less than an operator expects."""
    return Finding(verdict=Verdict.WARNING, says=says, fix=fix)


def failed(says: str, fix: str) -> Finding:
    """The link is broken."""
    return Finding(verdict=Verdict.FAILED, says=says, fix=fix)


def unknown(why: str, fix: str = "") -> Finding:
    """Nothing is known about the link."""
    return Finding(verdict=Verdict.UNKNOWN, says=f"could not look: {why}", fix=fix)


def unread(part: Unread, fix: str) -> Finding:
    """A part that does not answer is broken; one that this user may not read is unknown."""
    if part.denied:
        return unknown(part.why, "run the command as root, or as the user of `gpuwarden up`")
    return failed(part.why, fix)
