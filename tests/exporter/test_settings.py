"""The exporter's settings: figures that no rule could work with are refused at the start."""

import re
from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from exporter.main import command
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import PhaseTimeouts
from exporter.settings import Settings, unknown_variables
from gpuwarden.settings import complaints, read_settings


@pytest.mark.parametrize("figure", [float("inf"), float("nan")])
@pytest.mark.parametrize("option", ["stuck_factor", "stuck_min_s", "gpu_saturated_ratio", "io_idle_kib_per_s"])
def test_no_setting_is_infinite_or_no_number(option: str, figure: float) -> None:
    with pytest.raises(ValidationError, match=option):
        Settings(**{option: figure})  # type: ignore[arg-type]


def test_stuck_after_less_than_a_step_is_refused_with_what_to_give() -> None:
    refused = "--stuck-factor 0.5 is less than a step: use 1 or more, or 0 to disable it"

    with pytest.raises(ValidationError, match=re.escape(refused)):
        Settings(stuck_factor=0.5)


@pytest.mark.parametrize("steps", [0.0, 1.0, 1000.0])
def test_stuck_after_so_many_steps_will_do(steps: float) -> None:
    assert Settings(stuck_factor=steps).stuck_factor == steps


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
    with pytest.raises(ValidationError, match=f"--gpu-saturated-ratio {ratio} is not above --gpu-idle-ratio 0.05"):
        Settings(gpu_saturated_ratio=ratio)


def test_a_kubernetes_service_variable_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "tcp://10.96.7.1:29835")

    assert read_settings(Settings, []).port == Settings.model_fields["port"].default
    assert read_settings(Settings, ["--port", "1"]).port == 1


def test_a_port_that_is_none_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "http://10.96.7.1:29835")

    with pytest.raises(ValidationError) as refused:
        read_settings(Settings, [])

    assert "is invalid for --port (or GPUWARDEN_EXPORTER_PORT)" in "".join(complaints(refused.value, Settings))


@pytest.mark.parametrize(
    ("said", "found"),
    [("", ()), ("79", (79,)), ("79, 154,79", (79, 154))],
    ids=["none", "one", "each once, for a series that is there twice fails the scrape"],
)
def test_of_which_xids_people_are_told_is_a_list(said: str, found: tuple[int, ...]) -> None:
    assert read_settings(Settings, ["--xids-fatal", said]).xids_fatal == found


@pytest.mark.parametrize("said", ["fallen off the bus", "0", "79;154", "-1"])
def test_what_is_no_list_of_xids_is_refused(said: str) -> None:
    with pytest.raises(ValidationError, match="xids_fatal"):
        read_settings(Settings, [f"--xids-fatal={said}"])


@pytest.mark.parametrize(
    ("name", "value", "unknown"),
    [
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOR_MIB", "2048", True, id="misspelt"),
        pytest.param("gpuwarden_exporter_prot", "29835", True, id="misspelt in small letters"),
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOOR_MIB", "2048", False, id="a setting"),
        pytest.param("gpuwarden_exporter_port", "29835", False, id="a setting in small letters"),
        pytest.param("GPUWARDEN_REMEDIATOR_PROT", "29836", False, id="another program's"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_HOST", "10.96.7.1", False, id="Kubernetes': where a Service is"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_PORT_WEB", "29835", False, id="Kubernetes': its port by name"),
        pytest.param("GPUWARDEN_EXPORTER_PORT_29835_TCP_ADDR", "10.96.7.1", False, id="Kubernetes': each port"),
        pytest.param("GPUWARDEN_EXPORTER_ALL_PORT", "tcp://10.96.7.1:29835", False, id="Kubernetes': another Service"),
    ],
)
def test_a_variable_with_our_prefix_that_names_no_setting_is_unknown(name: str, value: str, unknown: bool) -> None:
    assert unknown_variables({name: value, "PATH": "/bin"}) == ([name] if unknown else [])


def test_no_setting_changes_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings(), "port", 1)  # noqa: B010 - mypy refuses the plain assignment


@pytest.mark.parametrize(
    ("options", "variable", "option"),
    [
        (["--port=x"], None, "--port"),
        ([], "70000", "--port"),
        (["--pods=api"], None, "--node-name"),
    ],
    ids=["an option", "a variable", "two together"],
)
def test_a_bad_setting_ends_the_exporter_with_2_and_one_line_that_names_it(
    options: list[str],
    variable: str | None,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", variable)

    assert command(options) == 2

    told = capsys.readouterr()
    assert told.out == ""
    [line] = told.err.splitlines()
    assert line.startswith("gpuwarden exporter: error: ")
    assert option in line


def test_help_prints_every_option_and_starts_no_exporter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command(["--help"])

    told = capsys.readouterr()
    assert told.out.startswith("usage: gpuwarden exporter [-h]")
    assert "port to listen on; 0 selects a free one" in told.out
    assert told.err == ""


def test_without_options_every_threshold_has_its_default() -> None:
    assert Settings().thresholds() == Thresholds()


def test_every_threshold_but_the_gap_between_samples_follows_a_setting() -> None:
    numbers = {name: its for name, its in Settings.model_fields.items() if its.annotation in (int, float)}
    other: dict[str, Any] = {name: its.default + 1 for name, its in numbers.items()}
    other |= {"gpu_idle_ratio": 0.2, "gpu_saturated_ratio": 0.9, "xids_fatal": (1,)}
    found = Settings(**other).thresholds()

    same = [f.name for f in fields(Thresholds) if getattr(found, f.name) == getattr(Thresholds(), f.name)]
    same_patience = [
        f.name for f in fields(PhaseTimeouts) if getattr(found.timeouts, f.name) == getattr(PhaseTimeouts(), f.name)
    ]

    assert (same, same_patience) == (["gap_max_s"], [])
