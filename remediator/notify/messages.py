"""The texts of notifications, from the Jinja2 templates of `templates`: a line for the title, then the text.

Each says what happened, to what, why, and the next command.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gpuwarden.format import count_of, printable
from gpuwarden.notify.sender import Message
from remediator.ledger.notices import Notice

LISTED_MAX: Final = 20
"""Notices that a message lists. It counts the others."""

NAMES: Final[Mapping[str, str]] = {
    "failed": "failed job",
    "blocked": "blocked job",
    "locked": "locked worker",
    "quarantined": "quarantined GPU",
    "breaker": "open circuit breaker",
    "chain": "dead chain",
    "chain_back": "chain that works again",
    "drill": "drill",
    "alert": "alert",
    "alert_over": "resolved alert",
}
"""Kinds of notices, for the counts of a digest."""


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, autoescape=False)  # noqa: S701 - plain text
    found.filters["word"] = quote
    return found


_TEMPLATES: Final = _environment()


def describe(kind: str, **facts: Any) -> tuple[str, str]:
    """The title and the text of an event."""
    its = {name: printable(value) if isinstance(value, str) else value for name, value in facts.items()}
    title, _, text = _TEMPLATES.get_template(f"{kind}.j2").render(its).partition("\n")
    return title, text.strip()


def compose(notices: Sequence[Notice], counts: Mapping[str, int]) -> Message:
    """One message of these notices. `counts` includes notices that are left out."""
    total = sum(counts.values())
    if total == 1:
        title, body = notices[0].title, notices[0].text
    else:
        lines = [count_of(count, NAMES.get(kind, kind)) for kind, count in counts.items()]
        listed = notices[:LISTED_MAX]
        title, body = describe("digest", total=total, counts=lines, notices=listed, more=total - len(listed))
    return Message(title=f"[gpuwarden] {printable(title)}", body=body)
