"""`python -m bench`: a failed part does not stop the others, and the corpus comes first."""

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
def _no_process_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def measured(name: str) -> list[Figure]:
    return [figure(name, f"what {name} measures", "s", [1.0])]


def measure_then_fail(error: BaseException) -> Iterator[Figure]:
    """A part that fails after its first figure."""
    yield from measured("half")
    raise error


@pytest.mark.parametrize(
    "error", [BenchError("an evaluation was missed"), PartMissing("no promtool")], ids=["measurement", "program"]
)
def test_failed_part_is_reported_and_the_others_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: measure_then_fail(error))
    monkeypatch.setattr(step, "measure", lambda *_: measured("step"))

    status = bench.main(["--only", "corpus,step", "--json", str(tmp_path / "found")])

    output = capsys.readouterr()
    assert status == 1
    assert f"bench: corpus failed: {error}\n" in output.err
    assert output.err.endswith("bench: incomplete: corpus\n")
    assert "what half measures" in output.out
    assert "what step measures" in output.out
    written = json.loads((tmp_path / "found").read_text())
    assert [each["part"] for each in written["figures"]] == ["half", "step"]


def test_exit_code_is_0_if_all_parts_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: measured("corpus"))

    assert bench.main(["--only", "corpus"]) == 0


def test_interrupt_ends_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(corpus, "measure", lambda: measure_then_fail(KeyboardInterrupt()))
    monkeypatch.setattr(step, "measure", lambda *_: measured("step"))

    status = bench.main(["--only", "corpus,step"])

    assert status == 130
    assert "what step measures" not in capsys.readouterr().out


def test_corpus_comes_first_and_long_parts_are_optional(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])

    options = "".join(capsys.readouterr().out.partition("--only")[2].split())
    assert "ofcorpus,step," in options
    assert ";andchaos,soak" in options
