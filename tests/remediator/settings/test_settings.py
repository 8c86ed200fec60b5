"""Settings: descriptions with units, options, environment variables, and the generated page."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

from remediator import reference
from remediator.executor.main import _loop_settings
from remediator.main import command
from remediator.plan import Outcome
from remediator.reasons import Reason
from remediator.settings.settings import ExecuteSettings, ServeSettings

BOTH: list[type[BaseSettings]] = [ServeSettings, ExecuteSettings]
FIELDS = [(settings, name) for settings in BOTH for name in settings.model_fields]
UNITS = {"_s": "seconds", "_bytes": "bytes"}
REQUIRED = ["--ledger", "sqlite:////l.db", "--queue-db", "sqlite:////q.db"]


@pytest.mark.parametrize(("settings", "name"), FIELDS, ids=[f"{each.__name__}.{name}" for each, name in FIELDS])
def test_setting_is_described_with_its_unit(settings: type[BaseSettings], name: str) -> None:
    description = settings.model_fields[name].description or ""

    assert len(description) > 15
    for ending, unit in UNITS.items():
        assert not name.endswith(ending) or unit in description


@pytest.mark.parametrize("settings", BOTH)
def test_number_has_limits(settings: type[BaseSettings]) -> None:
    for name, schema in settings.model_json_schema()["properties"].items():
        if schema.get("type") in ("number", "integer"):
            assert {"minimum", "exclusiveMinimum"} & schema.keys(), name
            assert schema["type"] == "integer" or "maximum" in schema, name


def test_executor_is_not_armed_by_default() -> None:
    assert CliApp.run(ExecuteSettings, cli_args=REQUIRED).armed is False
    assert CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, "--armed"]).armed is True


@pytest.mark.parametrize(
    ("options", "seats_on"),
    [
        ([], False),
        (["--seats", "on"], False),
        (["--node-name", "n"], False),
        (["--node-name", "n", "--seats", "off"], False),
        (["--node-name", "n", "--seats", "on"], True),
    ],
)
def test_seats_are_on_by_an_option_on_a_kubernetes_node(options: list[str], *, seats_on: bool) -> None:
    settings = CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, *options])

    assert _loop_settings(settings).seats_on is seats_on


def test_option_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_RETRIES_MAX", "5")
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_SWEEP_INTERVAL_S", "7")

    found = CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, "--retries-max", "1"])

    assert (found.retries_max, found.sweep_interval_s) == (1, 7.0)


def test_runtime_dir_comes_from_the_shared_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUWARDEN_RUNTIME_DIR", raising=False)
    assert CliApp.run(ExecuteSettings, cli_args=REQUIRED).runtime_dir == Path("/run/gpuwarden")

    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", "/srv/gpuwarden")
    assert CliApp.run(ExecuteSettings, cli_args=REQUIRED).runtime_dir == Path("/srv/gpuwarden")

    assert CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, "--runtime-dir", "/opt"]).runtime_dir == Path("/opt")


SERVE = ["--ledger", "sqlite:////l.db", "--web-config-file", "w"]
TWO = ("http://a:9093", "https://b/alertmanager")


@pytest.mark.parametrize(
    "options",
    [["--alertmanager", ",".join(TWO)], ["--alertmanager", TWO[0], "--alertmanager", TWO[1]]],
    ids=["separated by commas", "separate options"],
)
def test_several_alertmanagers_are_accepted_in_both_forms(options: list[str]) -> None:
    assert CliApp.run(ServeSettings, cli_args=[*SERVE, *options]).alertmanager == TWO


@pytest.mark.parametrize("pattern", ["*", "*.service", "w@*"])
def test_pattern_that_matches_any_service_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="names no services"):
        CliApp.run(ExecuteSettings, cli_args=["--ledger=x", "--queue-db=y", "--systemd-unit", pattern])


def test_several_alertmanagers_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliApp.run(ServeSettings, cli_args=SERVE).alertmanager == ()

    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_ALERTMANAGER", ", ".join(TWO))

    assert CliApp.run(ServeSettings, cli_args=SERVE).alertmanager == TWO


@pytest.mark.parametrize("option", ["docker", "podman"])
def test_engine_address_without_a_scheme_is_refused(option: str) -> None:
    with pytest.raises(ValidationError, match=r"wanted is unix:///run/d\.sock, or 'none'"):
        ExecuteSettings(**{option: "/run/d.sock"})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["127.0.0.1:9093", "ftp://a", "http://", "http://a:port", "http://[::1"])
def test_invalid_alertmanager_url_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="URL 2 is invalid"):
        CliApp.run(ServeSettings, cli_args=[*SERVE, "--alertmanager", f"{TWO[0]},{wrong}"])


def test_password_in_a_url_is_not_printed_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = command(["serve", *SERVE, "--alertmanager", "http://ann:secret@a:9093,nowhere"])

    said = capsys.readouterr().err
    assert (code, "URL 2 is invalid" in said, "secret" in said) == (2, True, False)


def test_prometheus_url_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["execute", *REQUIRED, "--prometheus", "http://ann:secret@a:9090,nowhere"]) == 2
    said = capsys.readouterr().err
    assert ("--prometheus: URL" in said, "URL 2 is invalid" in said, "secret" in said) == (True, True, False)


@pytest.mark.parametrize(
    "wrong",
    [["--interval-s", "0"], ["--settle-timeout-s", "inf"], ["--restart-timeout-s", "nan"], ["--retries-max", "-1"]],
)
def test_limit_without_effect_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ValidationError):
        CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, *wrong])


def test_page_of_settings_is_current() -> None:
    assert reference.main(["--check"]) == 0


def test_page_names_every_setting_with_its_default() -> None:
    page = reference.settings_page()

    for settings, name in FIELDS:
        assert f"| `--{name.replace('_', '-')}` | `GPUWARDEN_REMEDIATOR_{name.upper()}` |" in page, settings
    assert "| `--interval-s` | `GPUWARDEN_REMEDIATOR_INTERVAL_S` | `1.0` | " in page
    assert "| `--policy` | `GPUWARDEN_REMEDIATOR_POLICY` | none | " in page
    assert "| `--queue-db` | `GPUWARDEN_REMEDIATOR_QUEUE_DB` | " in page


def test_texts_of_settings_are_short() -> None:
    texts = {name: str(settings.model_fields[name].description) for settings, name in FIELDS}

    assert [name for name, text in texts.items() if len(text.split()) > 20] == []


def test_page_of_reasons_has_every_reason_and_outcome() -> None:
    found = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", reference.reasons_page(), re.MULTILINE)

    assert [word for word, _, _ in found] == [*Outcome, *Reason]
    assert [word for word, text, advice in found if len(f"{text} {advice}".split()) > 25] == []
    assert {word for word, _, advice in found if not advice.endswith(".")} == set()


def test_outdated_page_is_detected_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check", "--docs", str(tmp_path)]) == 1
    assert "is outdated: run python -m remediator.reference" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

    assert reference.main(["--docs", str(tmp_path)]) == 0
    assert reference.main(["--check", "--docs", str(tmp_path)]) == 0
    assert (tmp_path / "settings-remediator.md").read_text() == reference.settings_page()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gateway", "https://g", "--task-dir", "/t"], "--gateway and --token-file go together"),
        (["--token-file", "/t", "--task-dir", "/t"], "--gateway and --token-file go together"),
        (["--gateway", "https://g", "--token-file", "/t"], "--gateway needs --task-dir"),
    ],
)
def test_gateway_of_orders_needs_a_token_and_folders(options: list[str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, *options])
    found = CliApp.run(ExecuteSettings, cli_args=[*REQUIRED, "--task-dir", "/a,/b"])
    assert found.task_dir == (Path("/a"), Path("/b"))
