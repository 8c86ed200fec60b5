"""A check of plain English: `python -m tools.plain` lists rooms over their limits, `FILE...` each sentence to change.

Prose is what people read: comments, docstrings, texts in quotes of four words or more, comments and annotations of
rules, and Markdown outside of code blocks. A room is a folder of the tree, two levels deep. Per 1,000 words a room may
have `HARD_MAX` hard words and `LONG_MAX` long sentences, and per 100 lines of code `WORDS_MAX` words of comments and
docstrings. `REFUSED` words may stand in no name and no sentence.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

LONG: Final = 28
"""A sentence of more words is long."""

HARD_MAX: Final = 2.0
LONG_MAX: Final = 3.0
WORDS_MAX: Final = 120.0

HARD: Final = re.compile(
    r"\b(told|tells?|telling|untold|whoever|whatever|of wh(?:om|ich)|whom"
    r"|who(?= (?:is|are|has|have|was|were|goes|wants|left|looks|holds|cannot))"
    r"|anew|amiss|besides?|likewise|hereby|thereby|thereof|of its own|by itself|for good|no matter of|but for|but of"
    r"|nor|nobody|somebody|anybody|everybody|(?:is|are) no \w+|as ever|(?:as|for as) long as|so that no|none of"
    r"|it is said|what (?:is|was|has|wedges|waits|ended|they|it) |that is what|its like|the like|no more|at hand"
    r"|asked for|(?:is|are|was) to be|in turn|stands? (?:beside|in|for)|comes? of it|what becomes)\b",
    re.IGNORECASE,
)
"""Words and turns that plain technical English does without."""

REFUSED: Final = frozenset({
    "anew", "apart", "brake", "bystander", "crew", "doorkeeper", "mend", "mended", "mending", "mends", "nobody",
    "patience", "pegged", "stories", "story", "testimony", "told", "unmoved", "wedged", "wedging", "whereabouts",
    "whoever",
})  # fmt: skip
"""Words that may stand in no name and in no sentence."""

CHECKOUT: Final = Path(__file__).resolve().parent.parent
OWN: Final = frozenset({"tools/plain.py", "tests/tools/test_plain.py"})
"""What lists the words itself."""

SUFFIXES: Final = (".py", ".md", ".rules.yaml", ".test.yaml")
NOT_PROSE: Final = re.compile(r"^(type: ignore|noqa|fmt: |pragma: |!/)")
MESSAGE_WORDS: Final = 4
"""A text in quotes of fewer words is taken for a name or a value."""

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_WORD: Final = re.compile(r"[A-Za-z]+")
_PART_OF_NAME: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Line(NamedTuple):
    """One line of prose, and where it is."""

    number: int
    text: str


class Finding(NamedTuple):
    """A sentence to change, or a name."""

    number: int
    text: str
    words: int
    hard: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def long(self) -> bool:
        """Whether the sentence is too long."""
        return self.words > LONG


@dataclass
class Measure:
    """What was counted in one file or one room."""

    words: int = 0
    commented: int = 0
    lines: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Measure") -> None:
        """Count another file to this room."""
        self.words += other.words
        self.commented += other.commented
        self.lines += other.lines
        self.findings += other.findings

    @property
    def hard(self) -> float:
        """Hard words per 1,000 words."""
        return 1000 * sum(len(each.hard) for each in self.findings) / max(1, self.words)

    @property
    def long(self) -> float:
        """Long sentences per 1,000 words."""
        return 1000 * sum(each.long for each in self.findings) / max(1, self.words)

    @property
    def density(self) -> float:
        """Words of comments and docstrings per 100 lines of code."""
        return 100 * self.commented / self.lines if self.lines else 0.0

    @property
    def refused(self) -> int:
        """Refused words, in names and in prose."""
        return sum(len(each.refused) for each in self.findings)

    def is_within_limits(self) -> bool:
        """Whether nothing is left to change."""
        return not self.refused and self.hard <= HARD_MAX and self.long <= LONG_MAX and self.density <= WORDS_MAX

    def __str__(self) -> str:
        return (
            f"{self.words:6} words, per 1,000: {self.hard:5.1f} hard (at most {HARD_MAX:g}), "
            f"{self.long:4.1f} long (at most {LONG_MAX:g}); {self.density:5.1f} words per 100 lines "
            f"(at most {WORDS_MAX:g}); {self.refused} refused words"
        )


def main(arguments: list[str]) -> int:
    """Print the rooms over their limits, or each sentence of the given files; 1 if there is one."""
    if arguments == ["--all"] or not arguments:
        rooms = measure_rooms(CHECKOUT, _listed())
        over = {name for name, room in rooms.items() if not room.is_within_limits()}
        shown = rooms.keys() if arguments else over
        for name in sorted(shown):
            print(f"{name or '.':28} {rooms[name]}")
        return int(bool(over))
    found = [(name, each) for name in arguments for each in measure(Path(name)).findings]
    for name, each in found:
        print(
            f"{name}:{each.number}: {each.words} words {', '.join((*each.hard, *each.refused))}\n    {each.text[:400]}"
        )
    return int(bool(found))


def room_of(name: str) -> str:
    """The folder that a file is measured with: `exporter/collectors` of all that lies below it."""
    return "/".join(PurePosixPath(name).parts[:-1][:2])


def measure_rooms(root: Path, names: Iterable[str]) -> dict[str, Measure]:
    """Each room by its name, from files relative to `root`."""
    rooms: defaultdict[str, Measure] = defaultdict(Measure)
    for name in names:
        rooms[room_of(name)].add(measure(root / name))
    return dict(rooms)


def measure(path: Path) -> Measure:
    """Count one file.

    Args:
        path: Python, Markdown or alert rules.
    """
    source = path.read_text(encoding="utf-8")
    found = Measure()
    if path.suffix == ".py":
        found.lines = source.count("\n")
        commented = list(_comments_and_docstrings(source))
        found.commented = sum(len(line.text.split()) for line in commented)
        nodes = list(ast.walk(ast.parse(source)))
        blocks = [commented, *([message] for message in _messages(source, nodes))]
        found.findings += _names(nodes)
    elif path.suffix == ".md":
        blocks = [list(_markdown(source))]
    else:
        blocks = [list(_rules(source))]
    for block in blocks:
        for number, sentence in _sentences(block):
            words = len(sentence.split())
            if words < 3:
                continue
            found.words += words
            hard = tuple(match[0].strip() for match in HARD.finditer(sentence))
            refused = tuple(word for word in _WORD.findall(sentence.lower()) if word in REFUSED)
            if hard or refused or words > LONG:
                found.findings.append(Finding(number, sentence, words, hard, refused))
    return found


def _listed() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    return [
        name for name in listed if name.endswith(SUFFIXES) and name != "tools/plain.py" and (CHECKOUT / name).is_file()
    ]


def _comments_and_docstrings(source: str) -> Iterator[Line]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if not NOT_PROSE.match(text):
                yield Line(token.start[0], text)
        elif token.type == tokenize.STRING and token.string.lstrip("rRbBuU").startswith('"""'):
            body = token.string.lstrip("rRbBuU").strip('"').splitlines()
            yield from (Line(token.start[0] + offset, line.strip()) for offset, line in enumerate(body))


def _messages(source: str, nodes: Sequence[ast.AST]) -> Iterator[Line]:
    """Texts in quotes which a person may read: help, errors, log lines."""
    lines = source.splitlines()
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        is_docstring = isinstance(node, ast.Constant) and lines[node.lineno - 1].lstrip().startswith('"""')
        if len(text.split()) >= MESSAGE_WORDS and "\n" not in text and not is_docstring:
            yield Line(node.lineno, text)  # type: ignore[attr-defined]


def _names(nodes: Iterable[ast.AST]) -> Iterator[Finding]:
    """Each definition whose name holds a refused word."""
    for node in nodes:
        number = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        refused = tuple(word for word in map(str.lower, _PART_OF_NAME.findall(name)) if word in REFUSED)
        if refused:
            yield Finding(number, name, 0, (), refused)


def _markdown(source: str) -> Iterator[Line]:
    in_code = False
    for number, line in enumerate(_COMMENT.sub(_blank, source).splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("    "):
            yield Line(number, line)


def _blank(comment: re.Match[str]) -> str:
    return "\n" * comment[0].count("\n")


def _rules(source: str) -> Iterator[Line]:
    """Comments, titles of tests and annotations, each on its own. A template counts as one word."""
    folded = ""
    for number, line in enumerate(source.splitlines(), 1):
        text = re.sub(r"\{\{.*?\}\}", "X", line.lstrip())
        if folded and line.startswith(folded):
            yield Line(number, text)
        elif text.startswith("#"):
            folded = ""
            yield Line(number, text.lstrip("# ").strip())
        elif annotation := re.match(r"(?:summary|description|why|- name): (.*)", text):
            folded = line[: len(line) - len(line.lstrip())] + "  " if annotation[1].startswith(">") else ""
            yield Line(number, "")
            yield Line(number, annotation[1].removeprefix(">-").strip('"'))
        else:
            folded = ""
            yield Line(number, "")


def _sentences(lines: Iterable[Line]) -> Iterator[tuple[int, str]]:
    buffer, start = "", 0
    for number, line in lines:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", line))
        cells = text.split("|") if text.lstrip().startswith("|") else [text]
        if not text.strip() or len(cells) > 1 or re.match(r"\s*([-*#]|\d+\.)", text):
            if buffer.strip():
                yield start, buffer.strip()
            buffer = ""
        for cell in cells:
            start = start if buffer else number
            buffer += " " + cell.strip()
            while buffer and (end := re.search(r"(?<=[.!?:;])\s+(?=[A-Z*`\[(])|(?<=[.!?])$", buffer)):
                if sentence := buffer[: end.start()].strip():
                    yield start, sentence
                buffer, start = buffer[end.end() :], number
            if len(cells) > 1:
                if buffer.strip():
                    yield start, buffer.strip()
                buffer = ""
    if buffer.strip():
        yield start, buffer.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
