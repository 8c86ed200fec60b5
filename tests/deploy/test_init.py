"""`gpuwarden init`: written files, kept options, and protected files."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.standalone import docker_socket, init, package_data
from deploy.standalone.init import InitError, Site, files
from exporter.settings import Settings as WatchSettings
from gpuwarden.errors import GpuwardenError
from remediator.commands import status
from remediator.settings.settings import ExecuteSettings
from testbed.check_release import run_part

SITE = Site(
    host="box1", command="/usr/bin/gpuwarden", config_dir="/etc/gpuwarden",
    data_dir="/var/lib/gpuwarden", runtime_dir="/run/gpuwarden",
    docker="none", podman="none", systemd_unit="",
    exporter_port=1, remediator_port=2, prometheus_port=3, alertmanager_port=4, evaluation_interval_s=1,
)  # fmt: skip


def written(folder: Path, *options: str) -> dict[str, str]:
    assert init.command([str(folder), *options]) == 0
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_readme_names_every_file_or_its_folder(tmp_path: Path) -> None:
    found = written(tmp_path, "--host", "box1")

    readme = found.pop("README.md")
    found.pop(".written.json")
    for name in found:
        folder, _, file = name.rpartition("/")
        if name.startswith("gpuwarden/docs/"):
            assert "(cd gpuwarden/docs && find . -name '*.md' -exec install -D" in readme
            assert file.endswith(".md")
            continue
        assert f"{folder}/*{Path(file).suffix}" in readme or name in readme or f"{folder}/*.rules.yaml" in readme, name


def test_no_placeholder_is_left() -> None:
    for name, text in files(SITE).items():
        if not name.startswith(("gpuwarden/rules/", "gpuwarden/dashboards/", "gpuwarden/docs/")):
            assert not re.search(r"\$\w", text), name


def test_second_run_keeps_token_and_host_and_changes_nothing(tmp_path: Path) -> None:
    first = written(tmp_path, "--host", "box1")

    assert written(tmp_path) == first
    assert (tmp_path / "gpuwarden" / "token").stat().st_mode & 0o777 == 0o600


def test_status_asks_the_addresses_of_the_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ports = {"remediator": 1, "exporter": 2, "prometheus": 3, "alertmanager": 4}
    options = [word for part, port in ports.items() for word in (f"--{part}-port", str(port))]
    for line in written(tmp_path, *options)["gpuwarden/gpuwarden.env"].splitlines():
        if "=" in line and not line.startswith("#"):
            monkeypatch.setenv(*line.split("=", 1))

    asked = status._parser().parse_args([])

    assert {part: getattr(asked, part) for part in ports} == {
        part: f"http://127.0.0.1:{port}" for part, port in ports.items()
    }


def test_second_run_keeps_the_watchdog_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path, "--host", "box1", "--watchdog-url", "https://example.com/ping/1")

    assert written(tmp_path) == first
    assert "https://example.com/ping/1" in first["alertmanager.yml"]
    assert f"goes to the URL in {tmp_path / '.watchdog-url'}" in capsys.readouterr().out
    for name in (".watchdog-url", "alertmanager.yml"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name

    assert "https://example.com/2" in written(tmp_path, "--watchdog-url", "https://example.com/2")["alertmanager.yml"]
    (tmp_path / ".watchdog-url").unlink()
    assert "outside" not in written(tmp_path)["alertmanager.yml"]


def test_alerts_link_to_the_given_runbooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, page = "gpuwarden/rules/stall.rules.yaml", "GpuwardenJobStalled.md"

    here = written(tmp_path, "--host", "box1", "--remediator-port", "77")
    assert f'runbook_url: "http://127.0.0.1:77/docs/runbooks/{page}"\n' in here[name]
    assert "only on this host" in capsys.readouterr().out

    for slash in ("", "/"):
        linked = written(tmp_path, "--runbooks-url", f"https://wiki.example.com/gpu{slash}")
        assert f'runbook_url: "https://wiki.example.com/gpu/{page}"\n' in linked[name]
        assert f"https://wiki.example.com/gpu/{page}\n" in linked["README.md"]
        assert "127.0.0.1" not in "".join(text for file, text in linked.items() if file.startswith("gpuwarden/rules/"))
        assert written(tmp_path) == linked
    assert "only on this host" not in capsys.readouterr().out


@pytest.mark.needs_parts
@pytest.mark.parametrize(("options", "interval"), [([], "1s"), (["--evaluation-interval-s", "5"], "5s")])
def test_groups_with_a_remedy_have_an_interval(tmp_path: Path, options: list[str], interval: str) -> None:
    shipped = groups(package_data.rules())
    written(tmp_path, "--host", "box1", *options)
    written(tmp_path)  # keeps the option
    rules = sorted((tmp_path / "gpuwarden" / "rules").iterdir())

    acting = {
        name for name, group in shipped.items() if any("remedy" in each.get("labels", {}) for each in group["rules"])
    }
    assert len(acting) > 10
    assert all("interval" not in shipped[name] for name in acting)
    for name, group in groups(rules).items():
        assert group.get("interval") == (interval if name in acting else shipped[name].get("interval")), name
    assert run_part("promtool", "check", "rules", *map(str, rules)) == []


def groups(rules: list[Path]) -> dict[str, Any]:
    return {group["name"]: group for file in rules for group in yaml.safe_load(file.read_text())["groups"]}


@pytest.mark.parametrize("given", ["0", "61", "1.5", "-1", "\u0661", "x"])
def test_invalid_evaluation_interval_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), f"--evaluation-interval-s={given}"])

    assert "expected 1 to 60 seconds" in capsys.readouterr().err


def test_runbooks_are_written_with_every_linked_page(tmp_path: Path) -> None:
    found = written(tmp_path)

    runbooks = [name for name in found if name.startswith("gpuwarden/docs/runbooks/")]
    alerts = "".join(found[name] for name in found if "/rules/" in name).count("- alert: ")
    assert len(runbooks) == alerts + 1  # the index
    for name in runbooks:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", found[name]):
            assert os.path.normpath(f"gpuwarden/docs/runbooks/{link}") in found, (name, link)


def test_second_run_keeps_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    podman = "--podman=unix:///run/podman/podman.sock"
    options = [
        "--command=/opt/gpuwarden/bin/gpuwarden", "--config-dir=/etc/warden",
        "--data-dir=/srv/warden", "--runtime-dir=/run/warden",
        podman, "--docker=unix:///srv/docker.sock", "--systemd-unit=gpu-worker@*.service,b.service",
        "--exporter-port=71", "--remediator-port=72", "--alertmanager-port=73", "--prometheus-port=74",
        "--gateway=both", "--gateway-host-port=75", "--gateway-central-port=76",
    ]  # fmt: skip
    first = written(tmp_path, "--host", "box1", *options)
    assert "earlier run" not in capsys.readouterr().out

    assert written(tmp_path) == first
    output = capsys.readouterr().out
    for option in options:
        assert f"init: {option} kept from the last run" in output

    later = written(tmp_path, "--runbooks-url", "https://wiki.example.com/gpu", "--systemd-unit", "c.service")
    output = capsys.readouterr().out
    assert "init: --systemd-unit=c.service, before: gpu-worker@*.service,b.service\n" in output
    assert f"init: {podman} kept from the last run" in output
    assert set(later) - set(first) == {".runbooks-url"}
    assert later["gpuwarden/gpuwarden.env"] == first["gpuwarden/gpuwarden.env"].replace(
        "gpu-worker@*.service,b.service", "c.service"
    )

    (tmp_path / ".options").unlink()
    assert "GPUWARDEN_REMEDIATOR_PORT=9836\n" in written(tmp_path)["gpuwarden/gpuwarden.env"]


@pytest.mark.parametrize("kept", [b"--remediator-port=x", b"--colour=red", b"--systemd-unit=*", b"\xff", b"box1"])
def test_invalid_kept_options_are_reported(kept: bytes, tmp_path: Path) -> None:
    (tmp_path / ".options").write_bytes(kept + b"\n")

    with pytest.raises(InitError, match=r"\.options.+correct the file, or remove it"):
        init.command([str(tmp_path)])


def test_installation_without_docs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.docs_pages.FOLDER", tmp_path / "docs")

    with pytest.raises(InitError, match=r"^nothing was written: no [^\n]*install[^\n]*$"):
        init.command([str(tmp_path / "here")])
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("url", ['https://a/"x', "https://a/{{b}}", "https://a/b\\", "wiki/gpu", "ftp://a/b",
                                 "http://[", "https://[::1", "https://:9", "https://a:99999999", "https://a:0",
                                 "https://a:b/c", "https://@", "https://a@/b",
                                 "https://a/b?x=1", "https://a/b?", "https://a/b#c"])  # fmt: skip
def test_invalid_runbooks_url_is_rejected(url: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--runbooks-url", url])

    (tmp_path / ".runbooks-url").write_text(f"{url}\n")
    with pytest.raises(InitError, match=r"\.runbooks-url: .*invalid URL"):
        init.command([str(tmp_path)])


@pytest.mark.parametrize(
    "url", ["https://a", "http://a.example:8080/b/", "https://[::1]:9/b", "https://me@a:65535/~b/%20c"]
)
def test_valid_runbooks_url_is_used(url: str, tmp_path: Path) -> None:
    assert f"{url.rstrip('/')}/GpuwardenJobStalled.md" in written(tmp_path, "--runbooks-url", url)["README.md"]


@pytest.mark.parametrize("name", [".runbooks-url", ".watchdog-url", "gpuwarden/host"])
def test_kept_file_with_invalid_text_is_reported(name: str, tmp_path: Path) -> None:
    (tmp_path / "gpuwarden").mkdir()
    (tmp_path / name).write_bytes(b"https://\xff\n")

    with pytest.raises(InitError, match=rf"{re.escape(name)} is not UTF-8: correct the file, or remove it"):
        init.command([str(tmp_path)])


def test_removing_the_url_restores_the_runbook_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path, "--host", "box1")
    written(tmp_path, "--runbooks-url", "https://wiki.example.com/gpu")
    file = tmp_path / ".runbooks-url"
    hint = f"begin with https://wiki.example.com/gpu, kept in {file}; remove that file to link the remediator"
    assert hint in capsys.readouterr().out

    file.unlink()

    assert written(tmp_path) == before


def test_invalid_kept_watchdog_url_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".watchdog-url").write_text("example.com\n")

    with pytest.raises(
        InitError, match=r"\.watchdog-url: invalid URL 'example\.com'.*; correct the file, or remove it"
    ):
        init.command([str(tmp_path)])


@pytest.mark.parametrize("there", [True, False], ids=["present", "missing"])
def test_docker_is_configured_if_its_socket_exists(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setattr(docker_socket, "SYSTEM_SOCKET", path)
    with socket.socket(socket.AF_UNIX) as engine:
        if there:
            engine.bind(str(path))
        found = written(tmp_path / "by-default")["gpuwarden/gpuwarden.env"]
        said = capsys.readouterr().out
        given = written(tmp_path / "given", "--docker", "unix:///run/d.sock")["gpuwarden/gpuwarden.env"]

    watched, acted_on = (f"unix://{path}",) * 2 if there else ("auto", "none")
    assert f"GPUWARDEN_EXPORTER_DOCKER={watched}\n" in found
    assert f"GPUWARDEN_REMEDIATOR_DOCKER={acted_on}\n" in found
    assert ("remediator will not" in said) is not there
    assert "GPUWARDEN_EXPORTER_DOCKER=unix:///run/d.sock\n" in given


def test_docker_can_be_disabled(tmp_path: Path) -> None:
    found = written(tmp_path, "--docker", "none")["gpuwarden/gpuwarden.env"]

    assert "GPUWARDEN_EXPORTER_DOCKER=none\n" in found
    assert "GPUWARDEN_REMEDIATOR_DOCKER=none\n" in found


@pytest.mark.parametrize(
    ("gateway", "units", "jobs"),
    [
        ("none", [], []),
        ("host", ["gpuwarden-gateway-host"], ["gpuwarden-gateway-host"]),
        ("central", ["gpuwarden-gateway-central"], ["gpuwarden-gateway-central", "gpuwarden-reports"]),
    ],
)
def test_gateways_get_units_and_scrape_jobs_if_wanted(
    gateway: str, units: list[str], jobs: list[str], tmp_path: Path
) -> None:
    found = written(tmp_path, "--gateway", gateway)

    assert sorted(name for name in found if "gateway-" in name) == [f"systemd/{unit}.service" for unit in units]
    assert f"enable --now {' '.join([*init.UNITS, *units])}\n" in found["README.md"]
    scraped = yaml.safe_load(found["prometheus.yml"])["scrape_configs"]
    assert [job["job_name"] for job in scraped[3:]] == jobs


def test_new_options_change_unchanged_files(tmp_path: Path) -> None:
    written(tmp_path, "--host", "box1")

    assert "127.0.0.1:7777" in written(tmp_path, "--exporter-port", "7777")["prometheus.yml"]


def test_changed_file_is_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path, "--host", "box1")
    (tmp_path / "prometheus.yml").write_text("mine\n")

    with pytest.raises(InitError, match=r"nothing was written(.|\n)*\n  prometheus\.yml\n(.|\n)*--force"):
        init.command([str(tmp_path), "--exporter-port", "7777"])
    assert "7777" not in (tmp_path / "gpuwarden" / "gpuwarden.env").read_text()
    assert (tmp_path / "prometheus.yml").read_text() == "mine\n"

    assert written(tmp_path, "--force") == before
    assert "overwritten: prometheus.yml" in capsys.readouterr().out


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "alertmanager.yml").write_text("theirs\n")

    with pytest.raises(InitError, match=r"alertmanager\.yml"):
        init.command([str(tmp_path)])


@pytest.mark.parametrize("path", ["etc/gpuwarden", "/etc/gpu warden", "/etc/%h", "/etc/$x", "/a\n/b"])
def test_invalid_path_for_systemd_is_rejected(tmp_path: Path, path: str) -> None:
    with pytest.raises(InitError, match="invalid "):
        init.command([str(tmp_path), "--config-dir", path])


def test_host_key_must_be_a_valid_label(tmp_path: Path) -> None:
    with pytest.raises(GpuwardenError, match="host"):
        init.command([str(tmp_path), "--host", "a b"])


@pytest.mark.parametrize(
    ("options", "podman", "units"),
    [
        ([], "none", ()),
        (
            [
                "--podman",
                "unix:///run/p.sock",
                "--systemd-unit",
                "a@*.service,b.service",
                "--systemd-unit=c[0-9].service",
            ],
            "unix:///run/p.sock",
            ("a@*.service", "b.service", "c[0-9].service"),
        ),
    ],
    ids=["default", "Podman and services"],
)
def test_exporter_and_executor_read_the_written_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], podman: str, units: tuple[str, ...]
) -> None:
    env = written(tmp_path, "--prometheus-port", "7777", *options)["gpuwarden/gpuwarden.env"]
    for line in env.splitlines():
        if line and not line.startswith("#"):
            monkeypatch.setenv(*line.split("=", 1))

    watches, acts = WatchSettings(), ExecuteSettings()

    assert (watches.podman, watches.systemd_unit) == (podman, units)
    assert (acts.podman, acts.systemd_unit) == (podman, units)
    assert acts.prometheus == ("http://127.0.0.1:7777",)


@pytest.mark.parametrize(
    ("unit", "says"), [("*", "names no services"), ("gpu", "names no services"), ("a.service,*.service", "no services")]
)
def test_pattern_for_all_units_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--systemd-unit", unit])

    assert says in capsys.readouterr().err


def test_pattern_with_an_escape_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InitError, match=r"invalid systemd-unit"):
        init.command([str(tmp_path), "--systemd-unit", r"a\x2d*.service"])


@pytest.mark.needs_parts
def test_promtool_and_amtool_accept_the_written_files(tmp_path: Path) -> None:
    options = [
        word for name in ("config-dir", "data-dir", "runtime-dir") for word in (f"--{name}", str(tmp_path / name))
    ]
    written(tmp_path / "config-dir", *options)
    (tmp_path / "config-dir" / "gpuwarden").rename(tmp_path / "gpuwarden")
    written(tmp_path / "out", "--config-dir", str(tmp_path / "gpuwarden"), "--gateway", "both")

    assert run_part("promtool", "check", "config", str(tmp_path / "out" / "prometheus.yml")) == []
    assert run_part("amtool", "check-config", str(tmp_path / "out" / "alertmanager.yml")) == []


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on PATH")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    written(tmp_path, "--command", "/bin/true", "--gateway", "both")

    checked = subprocess.run(
        ["systemd-analyze", "verify", *sorted((tmp_path / "systemd").iterdir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "gpuwarden" in line]) == (0, [])
