"""`python -m tools.site` builds the site of docs/ into .work/site and checks it.

It fails on a broken link, a page that no menu has, a missing image, and a page over its budget of words. It lists the
blocks of the tutorials and how-tos that no test runs.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tools.snippets import Kind, SnippetError, pages_with_tests, snippets

CHECKOUT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = CHECKOUT / "docs"
SITE: Final = CHECKOUT / ".work" / "site"

WORDS_MAX: Final[Mapping[str, int]] = {
    "README.md": 600,
    "CONTRIBUTING.md": 500,
    "bench/README.md": 400,
    "docs/index.md": 250,
    "docs/tutorials": 700,
    "docs/how-to": 1100,
    "docs/reference": 1200,
    "docs/explanation": 1200,
    "docs/decisions": 140,
    "docs/contributing": 800,
    "docs/runbooks": 300,
}
"""Most words of a page, by page or folder. Generated pages have no limit."""

HAND_WRITTEN_MAX: Final = 30_000
GENERATED: Final = re.compile(r"^<!-- Written by ", re.MULTILINE)

_FENCED: Final = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_WORD: Final = re.compile(r"\S*\w\S*")


def main() -> int:
    """Build and check; 1 if something is wrong."""
    problems = [*over_budget(CHECKOUT), *_build()]
    for problem in problems:
        print(problem)
    _list_untested()
    print(f"{'FAILED' if problems else 'ok'}: {SITE / 'index.html'}")
    return 1 if problems else 0


def word_count(text: str) -> int:
    """Words of a page without code blocks and comments."""
    return len(_WORD.findall(_COMMENT.sub("", _FENCED.sub("", text))))


def over_budget(checkout: Path) -> Iterator[str]:
    """Yield the hand-written pages with too many words, and their sum if that is too much."""
    total = 0
    for page in sorted([*(checkout / "docs").rglob("*.md"), *(checkout / name for name in WORDS_MAX if "." in name)]):
        if not page.is_file():
            yield f"{page.relative_to(checkout)} is missing"
            continue
        text = page.read_text(encoding="utf-8")
        if GENERATED.search(text):
            continue
        words = word_count(text)
        total += words
        name = page.relative_to(checkout)
        limit = WORDS_MAX.get(str(name)) or WORDS_MAX.get(str(name.parent))
        if limit is None:
            yield f"{name}: no budget of words; add its folder to tools/site.py"
        elif words > limit:
            yield f"{name}: {words} words, at most {limit}"
    if total > HAND_WRITTEN_MAX:
        yield f"hand-written docs have {total} words, at most {HAND_WRITTEN_MAX}"


def _build() -> Iterator[str]:
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--keep-going", "--quiet",
               "--fresh-env", "--doctree-dir", str(SITE.with_name("site.doctrees")), str(DOCS), str(SITE)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield done.stderr.strip() or f"sphinx-build exited with {done.returncode}"


def _list_untested() -> None:
    for page in pages_with_tests(DOCS):
        try:
            for snippet in snippets(page.read_text(encoding="utf-8")):
                if snippet.kind is Kind.NOT_RUN:
                    print(f"not run  {page.relative_to(CHECKOUT)}:{snippet.line}: {snippet.argument}")
        except SnippetError as error:
            print(f"not run  {page.relative_to(CHECKOUT)}: {error}")


if __name__ == "__main__":
    sys.exit(main())
