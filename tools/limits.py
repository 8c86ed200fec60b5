"""`python -m tools.limits` lists files, classes, folders and names of tests over a limit.

A file is counted in lines, a class in methods and assigned attributes, a folder in modules. Fields of dataclasses,
pydantic models and settings and rules of hypothesis state machines do not count. `TOO_LARGE` lists accepted exceptions.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PRODUCT_LINES_MAX: Final = 600
TEST_LINES_MAX: Final = 1000
METHODS_MAX: Final = 25
ATTRIBUTES_MAX: Final = 15
TEST_NAME_MAX: Final = 80
"""Characters."""

MODULES_MAX: Final = 20
"""Modules in one folder, with `__init__.py`."""

TOO_LARGE: Final = frozenset[str]()
"""Files and classes over a limit. One that is within its limit must leave this list."""

CHECKOUT: Final = Path(__file__).resolve().parent.parent

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print the findings. Returns 1 if there are any."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=CHECKOUT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    over = dict(over_limits(CHECKOUT, [name for name in listed if (CHECKOUT / name).is_file()]))
    lines = [line for what, line in over.items() if what not in TOO_LARGE]
    lines += [f"{what} is within the limits: remove it from TOO_LARGE" for what in sorted(TOO_LARGE - over.keys())]
    for line in lines:
        print(line)
    return int(bool(lines))


def over_limits(root: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each file, class and folder over a limit, with a message. `names` are relative to `root`."""
    modules: Counter[str] = Counter()
    for name in sorted(names):
        source = (root / name).read_text(encoding="utf-8")
        modules[str(PurePosixPath(name).parent)] += 1
        lines, most = source.count("\n"), TEST_LINES_MAX if name.startswith("tests/") else PRODUCT_LINES_MAX
        if lines > most:
            yield name, f"{name}: {lines} lines, at most {most}: split it by topic"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, _Function) and len(node.name) > TEST_NAME_MAX and node.name.startswith("test_"):
                yield (
                    f"{name} {node.name}",
                    f"{name}: {node.name}: {len(node.name)} characters, at most {TEST_NAME_MAX}",
                )
            if isinstance(node, ast.ClassDef):
                yield from _over_class_limits(name, node)
    for folder, count in sorted(modules.items()):
        if count > MODULES_MAX:
            yield f"{folder}/", f"{folder}/: {count} modules, at most {MODULES_MAX}: make a subfolder"


def _over_class_limits(name: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    methods = [each for each in node.body if isinstance(each, _Function)]
    assigned = {attribute for method in methods for attribute in _assigned(method)}
    found = []
    if len(methods) > METHODS_MAX and not any(ast.unparse(base).endswith("StateMachine") for base in node.bases):
        found.append(f"has {len(methods)} methods, at most {METHODS_MAX}")
    if len(assigned) > ATTRIBUTES_MAX:
        found.append(f"assigns {len(assigned)} attributes, at most {ATTRIBUTES_MAX}")
    if found:
        what = f"class {node.name} {' and '.join(found)}: move a part into another class"
        yield f"{name} {node.name}", f"{name}:{node.lineno}: {what}"


def _assigned(method: _Function) -> Iterator[str]:
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


if __name__ == "__main__":
    sys.exit(main())
