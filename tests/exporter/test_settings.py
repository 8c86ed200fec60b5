"""The exporter's settings: values without meaning for the rules are rejected at the start."""

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
def test_infinite_or_nan_setting_is_rejected(option: str, figure: float) -> None:
    with pytest.raises(ValidationError, match=option):
        Settings(**{option: figure})  # type: ignore[arg-type]


def test_stuck_factor_below_1_is_rejected_with_the_allowed_values() -> None:
    refused = "--stuck-factor 0.5 is less than a step: use 1 or more, or 0 to disable it"

    with pytest.raises(ValidationError, match=re.escape(refused)):
        Settings(stuck_factor=0.5)


@pytest.mark.parametrize("steps", [0.0, 1.0, 1000.0])
def test_stuck_factor_of_0_or_at_least_1_is_accepted(steps: float) -> None:
    assert Settings(stuck_factor=steps).stuck_factor == steps


WANTED = "wanted is unix:///PATH of its socket, tcp://HOST:PORT"


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        pytest.param("docker", "/var/run/docker.sock",
                     "wanted is unix:///var/run/docker.sock, or 'none', or 'auto'", id="docker path"),
        pytest.param("podman", "/run/podman/podman.sock",
                     "wanted is unix:///run/podman/podman.sock, or 'none'", id="podman path"),
        pytest.param("podman", "auto", WANTED, id="podman auto"),
        *(
            pytest.param("docker", given, WANTED, id=f"docker {given}")
            for given in ("", "unix://", "unix:///", "unix://run/d.sock", "run/d.sock", "tcp://x", "tcp://:x", "x:1",
                          "http://[::1", "ssh://x:22", "npipe:////./pipe/docker")
        ),
    ],
)  # fmt: skip
def test_invalid_engine_address_is_rejected_with_the_expected_form(option: str, given: str, says: str) -> None:
    with pytest.raises(ValidationError, match=f"{re.escape(says)}"):
        Settings(**{option: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["none", "unix:///run/d.sock", "tcp://127.0.0.1:2375", "https://[::1]:2376"])
@pytest.mark.parametrize("option", ["docker", "podman"])
def test_engine_address_is_accepted(option: str, given: str) -> None:
    assert getattr(Settings(**{option: given}), option) == given  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [0.05, 0.01])
def test_saturated_ratio_must_be_above_the_idle_ratio(ratio: float) -> None:
    with pytest.raises(ValidationError, match=f"--gpu-saturated-ratio {ratio} is not above --gpu-idle-ratio 0.05"):
        Settings(gpu_saturated_ratio=ratio)


def test_kubernetes_service_variable_is_not_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "tcp://10.96.7.1:29835")

    assert read_settings(Settings, []).port == Settings.model_fields["port"].default
    assert read_settings(Settings, ["--port", "1"]).port == 1


def test_other_invalid_port_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", "http://10.96.7.1:29835")

    with pytest.raises(ValidationError) as refused:
        read_settings(Settings, [])

    assert "is invalid for --port (or GPUWARDEN_EXPORTER_PORT)" in "".join(complaints(refused.value, Settings))


@pytest.mark.parametrize(
    ("said", "found"),
    [("", ()), ("79", (79,)), ("79, 154,79", (79, 154))],
    ids=["empty", "one", "duplicates are removed"],
)
def test_fatal_xids_are_a_list(said: str, found: tuple[int, ...]) -> None:
    assert read_settings(Settings, ["--xids-fatal", said]).xids_fatal == found


@pytest.mark.parametrize("said", ["fallen off the bus", "0", "79;154", "-1"])
def test_invalid_list_of_xids_is_rejected(said: str) -> None:
    with pytest.raises(ValidationError, match="xids_fatal"):
        read_settings(Settings, [f"--xids-fatal={said}"])


@pytest.mark.parametrize(
    ("name", "value", "unknown"),
    [
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOR_MIB", "2048", True, id="misspelt"),
        pytest.param("gpuwarden_exporter_prot", "29835", True, id="misspelt in lower case"),
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOOR_MIB", "2048", False, id="a setting"),
        pytest.param("gpuwarden_exporter_port", "29835", False, id="a setting in lower case"),
        pytest.param("GPUWARDEN_REMEDIATOR_PROT", "29836", False, id="other program"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_HOST", "10.96.7.1", False, id="Kubernetes: host of a Service"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_PORT_WEB", "29835", False, id="Kubernetes: named port"),
        pytest.param("GPUWARDEN_EXPORTER_PORT_29835_TCP_ADDR", "10.96.7.1", False, id="Kubernetes: each port"),
        pytest.param("GPUWARDEN_EXPORTER_ALL_PORT", "tcp://10.96.7.1:29835", False, id="Kubernetes: other Service"),
    ],
)
def test_variable_with_our_prefix_and_no_setting_is_unknown(name: str, value: str, unknown: bool) -> None:
    assert unknown_variables({name: value, "PATH": "/bin"}) == ([name] if unknown else [])


def test_settings_are_immutable() -> None:
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
def test_invalid_setting_ends_the_exporter_with_2_and_one_line(
    options: list[str],
    variable: str | None,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", variable)

    assert command(options) == 2

    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith("gpuwarden exporter: error: ")
    assert option in line


def test_help_prints_every_option_and_starts_no_exporter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command(["--help"])

    output = capsys.readouterr()
    assert output.out.startswith("usage: gpuwarden exporter [-h]")
    assert "port to listen on; 0 selects a free one" in output.out
    assert output.err == ""


def test_every_threshold_has_its_default_without_options() -> None:
    assert Settings().thresholds() == Thresholds()


def test_every_threshold_except_the_gap_has_a_setting() -> None:
    numbers = {name: its for name, its in Settings.model_fields.items() if its.annotation in (int, float)}
    other: dict[str, Any] = {name: its.default + 1 for name, its in numbers.items()}
    other |= {"gpu_idle_ratio": 0.2, "gpu_saturated_ratio": 0.9, "xids_fatal": (1,)}
    found = Settings(**other).thresholds()

    same = [f.name for f in fields(Thresholds) if getattr(found, f.name) == getattr(Thresholds(), f.name)]
    same_timeouts = [
        f.name for f in fields(PhaseTimeouts) if getattr(found.timeouts, f.name) == getattr(PhaseTimeouts(), f.name)
    ]

    assert (same, same_timeouts) == (["gap_max_s"], [])
