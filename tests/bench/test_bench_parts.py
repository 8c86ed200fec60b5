"""`python -m bench`: a part that cannot go on ends itself alone, and what the rules are worth is measured first."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import corpus, step
from bench.figures import BenchError, Figure, figure
from deploy.standalone.debian_packages import PartMissing
from gpuwarden import logs


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program sets for its whole process is not set for the tests that come after these."""
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def measured(name: str) -> list[Figure]:
    return [figure(name, f"what {name} measures", "s", [1.0])]


def ends(error: BaseException) -> Iterator[Figure]:
    """A part that measures something, and then cannot go on."""
    yield from measured("half")
    raise error


@pytest.mark.parametrize(
    "error", [BenchError("an evaluation was missed"), PartMissing("no promtool")], ids=["measurement", "program"]
)
def test_a_part_that_cannot_go_on_says_so_and_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: ends(error))
    monkeypatch.setattr(step, "measure", lambda *_: measured("step"))

    status = bench.main(["--only", "corpus,step", "--json", str(tmp_path / "found")])

    told = capsys.readouterr()
    assert status == 1
    assert f"bench: corpus failed: {error}\n" in told.err
    assert told.err.endswith("bench: incomplete: corpus\n")
    assert "what half measures" in told.out
    assert "what step measures" in told.out
    written = json.loads((tmp_path / "found").read_text())
    assert [each["part"] for each in written["figures"]] == ["half", "step"]


def test_all_parts_that_go_on_to_their_end_are_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: measured("corpus"))

    assert bench.main(["--only", "corpus"]) == 0


def test_who_interrupts_it_ends_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: ends(KeyboardInterrupt()))
    monkeypatch.setattr(step, "measure", lambda *_: measured("step"))

    status = bench.main(["--only", "corpus,step"])

    assert status == 130
    assert "what step measures" not in capsys.readouterr().out


def test_rules_come_first_and_long_parts_run_only_by_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])

    asked = "".join(capsys.readouterr().out.partition("--only")[2].split())
    assert "ofcorpus,step," in asked
    assert ";andchaos,soak" in asked
