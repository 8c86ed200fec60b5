"""The check of plain English: what counts as prose, which sentences it finds, and which rooms fail."""

from pathlib import Path

import pytest

from tools import plain

LONG = "One sentence of " + "many " * plain.LONG + "words."
SHORT = "The exporter publishes the budget of each container. "


def _file(root: Path, source: str, name: str = "module.py") -> plain.Measure:
    path = root / name
    path.write_text(source, encoding="utf-8")
    return plain.measure(path)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("module.py", '"""The budget is told by the exporter."""\n'),
        ("module.py", "x = 1  # the budget is told by the exporter\n"),
        ("module.py", 'raise ValueError("the budget is told by the exporter")\n'),
        ("module.py", 'log(f"the budget {of} is told by the exporter")\n'),
        ("page.md", "The budget is told by the exporter.\n"),
        ("page.md", "| alert | the budget is told by the exporter |\n"),
        ("all.rules.yaml", "# the budget is told by the exporter\n"),
        ("all.rules.yaml", "        summary: the budget is told by the exporter\n"),
        ("all.test.yaml", "  - name: the budget is told by the exporter\n    interval: 5s\n"),
        ("all.rules.yaml", "        summary: {{ with $labels.host }}it{{ end }} is told by the exporter\n"),
    ],
    ids=[
        "docstring",
        "comment",
        "error",
        "f-string",
        "Markdown",
        "table",
        "comment of a rule",
        "annotation",
        "title of a rule's test",
        "template",
    ],
)
def test_hard_word_is_found_in_all_prose(tmp_path: Path, name: str, source: str) -> None:
    (found,) = _file(tmp_path, source, name).findings

    assert (found.number, found.hard, found.refused) == (1, ("told",), ("told",))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("module.py", "x = 1  # noqa: told apart\n"),
        ("module.py", 'x = "told apart"\n'),
        ("page.md", "```\nthe budget is told by it\n```\n"),
        ("page.md", "Run `what is told anew` here.\n"),
        ("all.rules.yaml", "        expr: what is told anew\n"),
    ],
    ids=["directive", "short text", "code block", "code in a line", "expression"],
)
def test_code_and_values_are_no_prose(tmp_path: Path, name: str, source: str) -> None:
    assert _file(tmp_path, source, name).findings == []


@pytest.mark.parametrize(
    "source",
    ["def is_told(): ...\n", "class ToldApart: ...\n", "nobody = 1\n", "self.mended = 1\n", "def f(story): ...\n"],
)
def test_refused_word_is_found_in_each_kind_of_name(tmp_path: Path, source: str) -> None:
    found = _file(tmp_path, source)

    assert found.refused
    assert not found.is_within_limits()


def test_refused_word_inside_another_word_is_allowed(tmp_path: Path) -> None:
    assert _file(tmp_path, "recommend_history = 1\n").findings == []


def test_long_sentence_is_counted_and_ends_at_a_full_stop(tmp_path: Path) -> None:
    one = _file(tmp_path, f'"""{LONG}"""\n')
    many = _file(tmp_path, f'"""{SHORT * 10}"""\n')

    assert [each.long for each in one.findings] == [True]
    assert many.findings == []
    assert many.words == 10 * len(SHORT.split())


def test_annotation_ends_before_the_next_line(tmp_path: Path) -> None:
    folded = f"  annotations:\n    description: >-\n      {LONG[:40]}\n      {LONG[40:]}\n    runbook_url: told\n"
    separate = f'    summary: "{LONG[:60]}"\n  # {LONG[:60]}\n'

    assert [each.long for each in _file(tmp_path, folded, "a.rules.yaml").findings] == [True]
    assert _file(tmp_path, separate, "b.rules.yaml").findings == []


def test_words_of_comments_are_counted_per_100_lines_of_code(tmp_path: Path) -> None:
    found = _file(tmp_path, "# two words\n" * 10 + "x = 1\n" * 10)

    assert found.density == pytest.approx(100.0)
    assert found.is_within_limits()
    assert not _file(tmp_path, "# two words\n" * 13 + "x = 1\n" * 7).is_within_limits()


def test_room_has_all_files_below_two_folders(tmp_path: Path) -> None:
    names = ["a.py", "b/c.py", "b/d/e.py", "b/d/f/g.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""{SHORT}"""\n', encoding="utf-8")

    rooms = plain.measure_rooms(tmp_path, names)

    assert {name: room.lines for name, room in rooms.items()} == {"": 1, "b": 1, "b/d": 2}


def test_room_over_its_limits_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(plain, "CHECKOUT", tmp_path)
    monkeypatch.setattr(plain, "_listed", lambda: ["b/c.py"])
    found = []
    for sentence in (SHORT, LONG):
        (tmp_path / "b" / "c.py").write_text(f'"""{sentence}"""\n' + "\n" * 100, encoding="utf-8")
        found.append((plain.main([]), capsys.readouterr().out.split(" ")[0]))

    assert found == [(0, ""), (1, "b")]


def test_comment_of_a_page_is_no_sentence(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(f"<!-- {LONG}\n-->\n{SHORT}\n", encoding="utf-8")

    assert plain.measure(page).findings == []
