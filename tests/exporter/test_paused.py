"""What is kept of containers that were paused: written, read back by the next exporter, or not believed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

import exporter.state.pauses
from exporter.evidence.container_history import PAUSES_MAX
from exporter.model.readings import ContainerEvidence
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.state import pauses as paused
from exporter.state.file import KeptError
from exporter.state.pauses import INCARNATIONS_MAX, WRITTEN_APART_S, PausedFile, Pauses, Spans, parse, render
from gpuwarden import clock
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.sources.servers.test_monitor import Docker

NOW = Stamp(boottime_s=100.0, boot_id="this boot", unix_s=1.8e9)
LATER = replace(NOW, boottime_s=5000.0)
SEEN: Spans = ((10.0, 20.0), (30.0, 90.5))


@pytest.fixture
def kept(tmp_path: Path) -> PausedFile:
    return PausedFile(tmp_path / "exporter")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    capture = LogCapture()
    monkeypatch.setattr(exporter.state.pauses, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


def of(incarnation: str = "c@1", *, pauses: Spans = SEEN, now_paused: bool = False) -> ContainerEvidence:
    return build.evidence(container=build.container(incarnation=incarnation, paused=now_paused), pauses=pauses)


def content(**changes: Any) -> bytes:
    """A whole file that tells of one incarnation, but for what is changed."""
    return json.dumps({**json.loads(render({"c@1": SEEN}, now=NOW)), **changes}).encode()


@pytest.mark.parametrize("told", [{}, {"c@1": SEEN}, {"c@1": SEEN, 'é\n"d"@1': ((0.0, 0.5),)}], ids=len)
def test_what_is_written_is_read_back(told: Mapping[str, Spans]) -> None:
    assert parse(render(told, now=NOW), now=LATER) == told


def test_of_more_than_fit_the_newest_are_written_and_they_can_be_read() -> None:
    late = replace(NOW, boottime_s=1e7)
    spans = tuple((1e6 + number + 0.123456, 1e6 + number + 0.987654) for number in range(PAUSES_MAX + 2))
    many = {f"{number:0256}": spans for number in range(INCARNATIONS_MAX + 2)}

    assert parse(render(many, now=late), now=late) == dict.fromkeys(list(many)[2:], spans[2:])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(content()[:-9], "not whole JSON", id="torn"),
        pytest.param(content(format=2), "not of format 1", id="of another format"),
        pytest.param(content(written={"boottime_s": 99.0, "boot_id": "x"}), "of another boot", id="of another boot"),
        pytest.param(content(paused=["c@1"]), "does not tell", id="no mapping"),
        pytest.param(content(paused={"": []}), "does not tell", id="an empty incarnation"),
        pytest.param(
            content(paused={str(each): [] for each in range(INCARNATIONS_MAX + 1)}), "does not", id="too many"
        ),
        pytest.param(content(paused={"c@1": {}}), "no list", id="no list of pauses"),
        pytest.param(content(paused={"c@1": [[1, 2]] * (PAUSES_MAX + 1)}), "no list", id="too many pauses"),
        pytest.param(content(paused={"c@1": [[1]]}), "something else", id="half a pause"),
        pytest.param(content(paused={"c@1": [[1, "2"]]}), "something else", id="no time"),
        pytest.param(content(paused={"c@1": [[2, 2]]}), "cannot have been", id="that took no time"),
        pytest.param(content(paused={"c@1": [[5, 9], [8, 12]]}), "cannot have been", id="one within another"),
        pytest.param(content(paused={"c@1": [[5, 100.5]]}), "cannot have been", id="that ended after it was written"),
    ],
)
def test_what_cannot_be_believed_tells_nothing(found: bytes, says: str) -> None:
    assert parse(content(), now=LATER) == {"c@1": SEEN}
    with pytest.raises(KeptError, match=says):
        parse(found, now=LATER)


def writable_by_others(file: Path) -> None:
    file.chmod(0o622)


def a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [writable_by_others, a_link])
def test_a_file_that_somebody_else_may_have_written_is_not_believed(
    kept: PausedFile, spoil: Callable[[Path], None]
) -> None:
    kept.write({"c@1": SEEN})
    assert kept.read() == {"c@1": SEEN}

    spoil(kept.path)

    with pytest.raises((KeptError, OSError)):
        kept.read()


def test_the_next_exporter_knows_of_pauses_and_of_another_incarnation_none(kept: PausedFile) -> None:
    Pauses(kept).keep([of()], now_s=100.0)

    assert Pauses(kept).of("c@1") == SEEN
    assert Pauses(kept).of("c@2") == ()


def test_they_are_known_through_a_start_at_which_the_container_is_not_seen(kept: PausedFile) -> None:
    Pauses(kept).keep([of()], now_s=100.0)
    Pauses(kept).keep([of("other")], now_s=110.0)

    assert kept.read() == {"c@1": SEEN, "other": SEEN}


def test_incarnations_that_ended_make_room_and_those_that_are_there_do_not(kept: PausedFile) -> None:
    kept.write(dict.fromkeys(("c@1", *(f"over@{number}" for number in range(INCARNATIONS_MAX - 1))), ((1.0, 2.0),)))

    Pauses(kept).keep([of(), of("other")], now_s=100.0)

    assert list(kept.read()) == [*(f"over@{number}" for number in range(1, INCARNATIONS_MAX - 1)), "c@1", "other"]


def test_a_pause_that_goes_on_is_written_now_and_then_and_as_it_ends(kept: PausedFile) -> None:
    pauses, told = Pauses(kept), []
    for age_s in range(int(WRITTEN_APART_S) + 3):
        seen = ((10.0, 20.0 + age_s),)
        pauses.keep([of(pauses=seen, now_paused=age_s <= WRITTEN_APART_S + 1)], now_s=100.0 + age_s)
        told.append(kept.read()["c@1"][0][1])

    assert told == [20.0] * int(WRITTEN_APART_S) + [30.0, 30.0, 32.0]


def test_nothing_is_written_while_nothing_changes_nor_where_nobody_was_paused(kept: PausedFile) -> None:
    pauses = Pauses(kept)
    pauses.keep([of(pauses=())], now_s=99.0)
    assert not kept.path.exists()

    pauses.keep([of()], now_s=100.0)
    kept.path.unlink()
    pauses.keep([of()], now_s=200.0)

    assert not kept.path.exists()


def test_a_file_that_tells_nothing_is_told_and_written_anew(kept: PausedFile, logged: LogCapture) -> None:
    kept.write({})
    kept.path.write_bytes(b"{")

    pauses = Pauses(kept)

    assert pauses.of("c@1") == ()
    assert [each["event"] for each in logged.entries] == ["which containers were paused before is not known"]
    pauses.keep([of()], now_s=100.0)
    assert kept.read() == {"c@1": SEEN}


def test_what_the_exporter_before_saw_of_a_container_counts_at_the_first_look(house: Path, kept: PausedFile) -> None:
    now_s = clock.stamp().boottime_s
    seen = ((now_s - 2.0, now_s - 1.0),)
    kept.write({build.container().incarnation: seen})

    def pauses(before: Pauses | None) -> Spans:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": Docker(build.container())}, gpus=None,
            thresholds=Thresholds(), pauses=before,
        )  # fmt: skip
        return sampler.sample().containers[0].pauses

    assert pauses(Pauses(kept)) == seen
    assert pauses(None) == ()


def test_a_folder_that_cannot_be_written_costs_nothing_else_is_told_and_is_tried_again(
    house: Path, kept: PausedFile
) -> None:
    now_s = clock.stamp().boottime_s
    kept.write({build.container().incarnation: ((now_s - 2.0, now_s - 1.0),)})
    pauses = Pauses(kept)
    kept.path.unlink()
    kept.path.parent.rmdir()
    kept.path.parent.write_bytes(b"a file in the place of the folder")
    pauses.keep([], now_s=now_s)
    sampler = Sampler(
        host="box-1", directory=house, containers={"docker": Docker(build.container())}, gpus=None,
        thresholds=Thresholds(), pauses=pauses,
    )  # fmt: skip

    before = sampler.sample()
    with pytest.raises(OSError, match=paused.NAME.removesuffix(".json") + "|exists|directory"):
        pauses.keep([of("another")], now_s=now_s)
    failed = sampler.sample()
    kept.path.parent.unlink()
    mended = sampler.sample()

    success = [{each.source: each.success for each in snapshot.sources} for snapshot in (before, failed, mended)]
    assert [each["paused"] for each in success] == [True, False, True]
    assert "another" in kept.read()
