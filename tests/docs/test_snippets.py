"""Every block of the tutorials and how-tos is run, page by page, as a reader would."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.standalone.debian_packages import env_for_parts
from tools.snippets import Kind, SnippetError, pages_with_tests, script, snippets

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = pages_with_tests(CHECKOUT / "docs")
PAGE_MAX_S = 180


@pytest.mark.slow
@pytest.mark.needs_parts
@pytest.mark.xdist_group("docs")  # pages use the default ports
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_the_page_work(page: Path, tmp_path: Path) -> None:
    env = env_for_parts() | {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": "", "PYTHONUNBUFFERED": "1"}
    env["PATH"] = f"{CHECKOUT / '.venv/bin'}{os.pathsep}{env['PATH']}"
    folder, said = tmp_path / "work", tmp_path / "said"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    with said.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script(page)],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = shell.wait(PAGE_MAX_S)
        except subprocess.TimeoutExpired:
            code = f"not done in {PAGE_MAX_S} s"
        finally:
            _end(shell)

    assert code == 0, said.read_text()[-4000:]


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End the processes that the page left in the background."""
    with suppress(ProcessLookupError):
        for kill in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(shell.pid, kill)
            for _ in range(200):
                shell.poll()
                os.killpg(shell.pid, 0)
                time.sleep(0.1)


def test_every_page_has_a_block_that_runs() -> None:
    idle = [page.name for page in PAGES if not any(its.kind is Kind.RUN for its in snippets(page.read_text()))]

    assert idle == []


PAGE = """\
# Page

```bash
echo one
```

<!-- file: a/b.yaml -->
<!-- run: test -f a/b.yaml -->
```yaml
key: $HOME
```

<!-- not run: needs a GPU -->
```bash
false
```

1. An item:

   <!-- background -->
   ```bash
   sleep 100
   ```

```text
output
```
"""


def test_language_and_comment_decide_what_is_done_with_a_block() -> None:
    found = [(its.kind.name, its.text.strip(), its.argument) for its in snippets(PAGE)]

    assert found == [
        ("RUN", "echo one", ""),
        ("RUN", "test -f a/b.yaml", ""),
        ("FILE", "key: $HOME", "a/b.yaml"),
        ("NOT_RUN", "false", "needs a GPU"),
        ("BACKGROUND", "sleep 100", ""),
        ("SHOWN", "output", ""),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("```\nls\n```\n", "line 1: the block has no language", id="no language"),
        pytest.param("\n```yaml\na: 1\n```\n", "line 2: a block of yaml needs a comment", id="a file without a name"),
        pytest.param("<!-- background -->\ntext\n", "line 2: a block must follow", id="a comment without a block"),
    ],
)
def test_block_without_language_or_comment_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SnippetError, match=re.escape(problem)):
        list(snippets(text))


def test_script_stops_at_the_first_command_that_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- file: a.txt -->\n```text\n$HOME\n```\n\n```bash\ncat a.txt\nfalse\necho not reached\n```\n")

    done = subprocess.run(["bash", "-c", script(page)], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stdout == "$HOME\n"
    assert done.stderr.splitlines() == ["## page.md:2", "## page.md:6"]
