"""The exporter's settings: figures that no rule could work with are refused at the start."""

import re

import pytest
from pydantic import ValidationError

from exporter.settings import Settings
from gpuwarden.settings import complaints, given


@pytest.mark.parametrize("figure", [float("inf"), float("nan")])
@pytest.mark.parametrize("option", ["stuck_steps", "stuck_floor_s", "pegged_ratio", "io_still_kib_per_s"])
def test_no_setting_is_infinite_or_no_number(option: str, figure: float) -> None:
    with pytest.raises(ValidationError, match=option):
        Settings(**{option: figure})  # type: ignore[arg-type]


def test_stuck_after_less_than_a_step_is_refused_with_what_to_give() -> None:
    refused = "--stuck-steps 0.5 is less than a step: give 1 or more, or 0 for never"

    with pytest.raises(ValidationError, match=re.escape(refused)):
        Settings(stuck_steps=0.5)


@pytest.mark.parametrize("steps", [0.0, 1.0, 1000.0])
def test_stuck_after_so_many_steps_will_do(steps: float) -> None:
    assert Settings(stuck_steps=steps).stuck_steps == steps


WANTED = "wanted is unix:///PATH of its socket, tcp://HOST:PORT"


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("docker", "/var/run/docker.sock", "wanted is unix:///var/run/docker.sock, or 'none', or 'auto'"),
        ("podman", "/run/podman/podman.sock", "wanted is unix:///run/podman/podman.sock, or 'none'"),
        ("podman", "auto", WANTED),
        *(
            ("docker", given, WANTED)
            for given in ("", "unix://", "unix:///", "unix://run/d.sock", "run/d.sock", "tcp://x", "tcp://:x", "x:1",
                          "http://[::1", "ssh://x:22", "npipe:////./pipe/docker")
        ),
    ],
)  # fmt: skip
def test_where_no_engine_can_listen_is_refused_with_what_to_give(option: str, given: str, says: str) -> None:
    with pytest.raises(ValidationError, match=f"{re.escape(says)}"):
        Settings(**{option: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["none", "unix:///run/d.sock", "tcp://127.0.0.1:2375", "https://[::1]:2376"])
@pytest.mark.parametrize("option", ["docker", "podman"])
def test_where_an_engine_may_listen_will_do(option: str, given: str) -> None:
    assert getattr(Settings(**{option: given}), option) == given  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [0.05, 0.01])
def test_what_is_pegged_cannot_be_idle(ratio: float) -> None:
    with pytest.raises(ValidationError, match=f"--pegged-ratio {ratio} is not above --idle-ratio 0.05"):
        Settings(pegged_ratio=ratio)


def test_where_a_kubernetes_service_of_our_name_is_to_be_asked_is_no_port_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "tcp://10.96.7.1:29835")

    assert given(Settings, []).port == Settings.model_fields["port"].default
    assert given(Settings, ["--port", "1"]).port == 1


def test_a_port_that_is_none_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "http://10.96.7.1:29835")

    with pytest.raises(ValidationError) as refused:
        given(Settings, [])

    assert "will not do for --port (or GPUWARDEN_EXPORTER_PORT)" in "".join(complaints(refused.value, Settings))


@pytest.mark.parametrize(
    ("said", "found"),
    [("", ()), ("79", (79,)), ("79, 154,79", (79, 154))],
    ids=["none", "one", "each once, for a series that is there twice fails the scrape"],
)
def test_of_which_xids_people_are_told_is_a_list(said: str, found: tuple[int, ...]) -> None:
    assert given(Settings, ["--xids-fatal", said]).xids_fatal == found


@pytest.mark.parametrize("said", ["fallen off the bus", "0", "79;154", "-1"])
def test_what_is_no_list_of_xids_is_refused(said: str) -> None:
    with pytest.raises(ValidationError, match="xids_fatal"):
        given(Settings, [f"--xids-fatal={said}"])
