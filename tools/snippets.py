"""The code blocks of the docs, and what a test does with each.

In docs/tutorials and docs/how-to a bash block is run as it stands. HTML comments before a block say otherwise:

- `<!-- file: NAME -->`: the block is the file NAME of the page's folder.
- `<!-- background -->`: the block runs until the page ends.
- `<!-- not run: REASON -->`: the block is not run. `make docs` lists it.
- `<!-- run: COMMAND -->`: a command that readers do not see, such as a check of a file.
"""

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

FOLDERS: Final = ("tutorials", "how-to")
"""Folders of docs/ with tested blocks."""

SHOWN: Final = frozenset({"text", "promql"})
"""Languages of blocks that are output or queries, not commands."""


class Kind(Enum):
    """What a test does with a block."""

    RUN = "run"
    BACKGROUND = "background"
    FILE = "file"
    NOT_RUN = "not run"
    SHOWN = "shown"


class Snippet(NamedTuple):
    """One block or hidden command. `argument` is the file's name or the reason."""

    line: int
    kind: Kind
    text: str
    argument: str = ""


class SnippetError(ValueError):
    """A block has no language or no marker. The message names the line."""


_COMMENT: Final = re.compile(r"<!-- (file|background|not run|run)(?:: (.+?))? -->\s*")
_FENCE: Final = re.compile(r"( *)(```+)(\S*)\s*")


def snippets(text: str) -> Iterator[Snippet]:
    """Yield the blocks and hidden commands of a page, in order.

    Raises:
        SnippetError: a block has no language, or needs a marker.
    """
    lines = iter(enumerate(text.splitlines(), start=1))
    marker: tuple[str, str] | None = None
    for number, line in lines:
        if comment := _COMMENT.fullmatch(line.strip()):
            kind, argument = comment[1], comment[2] or ""
            if kind == "run":
                yield Snippet(number, Kind.RUN, argument)
            else:
                marker = kind, argument
        elif fence := _FENCE.fullmatch(line):
            body = []
            for _, inner in lines:
                if inner.strip() == fence[2]:
                    break
                body.append(inner.removeprefix(fence[1]))
            yield _snippet(number, fence[3], "\n".join(body) + "\n", marker)
            marker = None
        elif line.strip() and marker:
            raise SnippetError(f"line {number}: a block must follow the comment `{marker[0]}`")


def _snippet(line: int, language: str, text: str, marker: tuple[str, str] | None) -> Snippet:
    if not language:
        raise SnippetError(f"line {line}: the block has no language")
    if marker:
        return Snippet(line, Kind(marker[0]), text, marker[1])
    if language == "bash":
        return Snippet(line, Kind.RUN, text)
    if language in SHOWN or language.startswith("{"):
        return Snippet(line, Kind.SHOWN, text)
    raise SnippetError(f"line {line}: a block of {language} needs a comment before it: `file` or `not run`")


def pages_with_tests(docs: Path) -> list[Path]:
    """The pages whose blocks are run."""
    return sorted(page for folder in FOLDERS for page in (docs / folder).glob("*.md"))


def script(page: Path) -> str:
    """A bash script that does what the page says, and names each line that it begins.

    Raises:
        SnippetError: a block has no language, or needs a marker.
    """
    parts = ["set -euo pipefail"]
    for snippet in snippets(page.read_text(encoding="utf-8")):
        parts.append(f"echo '## {page.name}:{snippet.line}' >&2")
        match snippet.kind:
            case Kind.RUN:
                parts.append(snippet.text)
            case Kind.BACKGROUND:
                parts.append(f"(\n{snippet.text}) &")
            case Kind.FILE:
                name = shlex.quote(snippet.argument)
                parts.append(f"mkdir -p \"$(dirname {name})\"\ncat > {name} <<'END_OF_FILE'\n{snippet.text}END_OF_FILE")
            case Kind.NOT_RUN | Kind.SHOWN:
                parts.pop()
    return "\n".join(parts) + "\n"
