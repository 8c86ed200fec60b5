"""Limits of files, classes and folders."""

from pathlib import Path

import pytest

from tools import limits


def _class(*, methods: int = 0, attributes: int = 0, fields: int = 0) -> str:
    lines = ["class Thing:", *(f"    field_{number}: int = 0" for number in range(fields))]
    lines += [f"    def method_{number}(self) -> None: ..." for number in range(methods)]
    if attributes:
        lines += ["    def __init__(self) -> None:", *(f"        self.at_{number} = 0" for number in range(attributes))]
    return "\n".join([*lines, "    limit = 1", ""])


def _over(root: Path, **files: str) -> list[str]:
    for name, source in files.items():
        (root / f"{name}.py").write_text(source, encoding="utf-8")
    return [line for _, line in limits.over_limits(root, [f"{name}.py" for name in files])]


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * limits.PRODUCT_LINES_MAX,
        _class(methods=limits.METHODS_MAX),
        _class(attributes=limits.ATTRIBUTES_MAX),
        _class(fields=limits.ATTRIBUTES_MAX + 1),
        f"def test_{'a' * (limits.TEST_NAME_MAX - 5)}() -> None: ...",
    ],
    ids=["lines", "methods", "attributes", "declared fields", "name of a test"],
)
def test_module_within_the_limits_passes(tmp_path: Path, source: str) -> None:
    assert _over(tmp_path, module=source) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n" * (limits.PRODUCT_LINES_MAX + 1), "module.py: 601 lines"),
        (_class(methods=limits.METHODS_MAX + 1), "module.py:1: class Thing has 26 methods"),
        (_class(attributes=limits.ATTRIBUTES_MAX + 1), "module.py:1: class Thing assigns 16 attributes"),
    ],
    ids=["lines", "methods", "attributes"],
)
def test_module_over_a_limit_is_listed(tmp_path: Path, source: str, says: str) -> None:
    (line,) = _over(tmp_path, module=source)

    assert line.startswith(says)


def test_long_name_of_a_test_is_listed(tmp_path: Path) -> None:
    name = f"test_{'a' * limits.TEST_NAME_MAX}"

    assert _over(tmp_path, module=f"def {name}() -> None: ...") == [
        f"module.py: {name}: {len(name)} characters, at most 80"
    ]


def test_test_module_may_be_longer(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_long.py").write_text("x = 1\n" * limits.TEST_LINES_MAX, encoding="utf-8")

    assert list(limits.over_limits(tmp_path, ["tests/test_long.py"])) == []


def test_folder_with_too_many_modules_is_listed(tmp_path: Path) -> None:
    files = {f"module_{number}": "" for number in range(limits.MODULES_MAX + 1)}

    assert [line.split(":")[0] for line in _over(tmp_path, **files)] == ["./"]


def test_state_machine_may_have_more_methods(tmp_path: Path) -> None:
    source = _class(methods=limits.METHODS_MAX + 1).replace("class Thing:", "class Thing(RuleBasedStateMachine):")

    assert _over(tmp_path, module=source) == []


def test_this_checkout_is_within_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert limits.main() == 0, capsys.readouterr().out


def test_stale_entry_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limits, "TOO_LARGE", limits.TOO_LARGE | {"tools/limits.py"})

    assert limits.main() == 1
    assert capsys.readouterr().out == "tools/limits.py is within the limits: remove it from TOO_LARGE\n"
