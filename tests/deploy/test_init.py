"""`gpuwarden init`: what it writes, what it keeps, and what it will not overwrite."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from deploy.standalone import docker_socket, init
from deploy.standalone.init import InitError, Site, files
from exporter.settings import Settings as WatchSettings
from gpuwarden.errors import GpuwardenError
from remediator.settings.settings import ExecuteSettings
from testbed.check_release import run_part

SITE = Site(
    host="box1", command="/usr/bin/gpuwarden", config_dir="/etc/gpuwarden",
    data_dir="/var/lib/gpuwarden", runtime_dir="/run/gpuwarden",
    docker="none", podman="none", systemd_unit="",
    exporter_port=1, remediator_port=2, prometheus_port=3, alertmanager_port=4,
)  # fmt: skip


def written(folder: Path, *options: str) -> dict[str, str]:
    assert init.command([str(folder), *options]) == 0
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_named_in_the_readme_or_lies_in_a_folder_that_is(tmp_path: Path) -> None:
    found = written(tmp_path, "--host", "box1")

    readme = found.pop("README.md")
    found.pop(".written.json")
    for name in found:
        folder, _, file = name.rpartition("/")
        assert f"{folder}/*{Path(file).suffix}" in readme or name in readme or f"{folder}/*.rules.yaml" in readme, name


def test_nothing_is_left_to_fill_in() -> None:
    for name, text in files(SITE).items():
        if not name.startswith(("gpuwarden/rules/", "gpuwarden/dashboards/", "gpuwarden/docs/")):
            assert not re.search(r"\$\w", text), name


def test_a_second_run_keeps_token_and_host_and_changes_nothing(tmp_path: Path) -> None:
    first = written(tmp_path, "--host", "box1")

    assert written(tmp_path) == first
    assert (tmp_path / "gpuwarden" / "token").stat().st_mode & 0o777 == 0o600


def test_a_second_run_keeps_the_watchdogs_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path, "--host", "box1", "--watchdog-url", "https://example.com/ping/1")

    assert written(tmp_path) == first
    assert "https://example.com/ping/1" in first["alertmanager.yml"]
    assert f"goes to the URL in {tmp_path / '.watchdog-url'}" in capsys.readouterr().out
    for name in (".watchdog-url", "alertmanager.yml"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name

    assert "https://example.com/2" in written(tmp_path, "--watchdog-url", "https://example.com/2")["alertmanager.yml"]
    (tmp_path / ".watchdog-url").unlink()
    assert "outside" not in written(tmp_path)["alertmanager.yml"]


def test_the_alerts_link_to_the_given_runbooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, page = "gpuwarden/rules/stall.rules.yaml", "GpuwardenJobStalled.md"

    here = written(tmp_path, "--host", "box1", "--remediator-port", "77")
    assert f'runbook_url: "http://127.0.0.1:77/docs/runbooks/{page}"\n' in here[name]
    assert "only on this host" in capsys.readouterr().out

    for slash in ("", "/"):
        told = written(tmp_path, "--runbooks-url", f"https://wiki.example.com/gpu{slash}")
        assert f'runbook_url: "https://wiki.example.com/gpu/{page}"\n' in told[name]
        assert f"https://wiki.example.com/gpu/{page}\n" in told["README.md"]
        assert "127.0.0.1" not in "".join(text for file, text in told.items() if file.startswith("gpuwarden/rules/"))
        assert written(tmp_path) == told
    assert "only on this host" not in capsys.readouterr().out


def test_the_runbooks_are_written_and_each_page_that_they_link(tmp_path: Path) -> None:
    found = written(tmp_path)

    runbooks = [name for name in found if name.startswith("gpuwarden/docs/runbooks/")]
    assert len(runbooks) == "".join(found[name] for name in found if "/rules/" in name).count("- alert: ")
    for name in runbooks:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", found[name]):
            assert os.path.normpath(f"gpuwarden/docs/runbooks/{link}") in found, (name, link)


def test_a_second_run_keeps_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    podman = "--podman=unix:///run/podman/podman.sock"
    options = [
        "--command=/opt/gpuwarden/bin/gpuwarden", "--config-dir=/etc/warden",
        "--data-dir=/srv/warden", "--runtime-dir=/run/warden",
        podman, "--docker=unix:///srv/docker.sock", "--systemd-unit=gpu-worker@*.service,b.service",
        "--exporter-port=71", "--remediator-port=72", "--alertmanager-port=73", "--prometheus-port=74",
    ]  # fmt: skip
    first = written(tmp_path, "--host", "box1", *options)
    assert "earlier run" not in capsys.readouterr().out

    assert written(tmp_path) == first
    told = capsys.readouterr().out
    for option in options:
        assert f"init: {option} kept from the last run" in told

    later = written(tmp_path, "--runbooks-url", "https://wiki.example.com/gpu", "--systemd-unit", "c.service")
    told = capsys.readouterr().out
    assert "init: --systemd-unit=c.service, before: gpu-worker@*.service,b.service\n" in told
    assert f"init: {podman} kept from the last run" in told
    assert set(later) - set(first) == {".runbooks-url"}
    assert later["gpuwarden/gpuwarden.env"] == first["gpuwarden/gpuwarden.env"].replace(
        "gpu-worker@*.service,b.service", "c.service"
    )

    (tmp_path / ".options").unlink()
    assert "GPUWARDEN_REMEDIATOR_PORT=9836\n" in written(tmp_path)["gpuwarden/gpuwarden.env"]


@pytest.mark.parametrize("kept", [b"--remediator-port=x", b"--colour=red", b"--systemd-unit=*", b"\xff", b"box1"])
def test_kept_options_that_are_none_are_told_in_a_sentence(kept: bytes, tmp_path: Path) -> None:
    (tmp_path / ".options").write_bytes(kept + b"\n")

    with pytest.raises(InitError, match=r"\.options.+correct the file, or remove it"):
        init.command([str(tmp_path)])


def test_an_installation_without_pages_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.docs_pages.FOLDER", tmp_path / "docs")

    with pytest.raises(InitError, match=r"^nothing was written: no [^\n]*install[^\n]*$"):
        init.command([str(tmp_path / "here")])
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("url", ['https://a/"x', "https://a/{{b}}", "https://a/b\\", "wiki/gpu", "ftp://a/b",
                                 "http://[", "https://[::1", "https://:9", "https://a:99999999", "https://a:0",
                                 "https://a:b/c", "https://@", "https://a@/b",
                                 "https://a/b?x=1", "https://a/b?", "https://a/b#c"])  # fmt: skip
def test_an_address_of_runbooks_that_prometheus_would_read_otherwise_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--runbooks-url", url])

    (tmp_path / ".runbooks-url").write_text(f"{url}\n")
    with pytest.raises(InitError, match=r"\.runbooks-url: .*invalid URL"):
        init.command([str(tmp_path)])


@pytest.mark.parametrize(
    "url", ["https://a", "http://a.example:8080/b/", "https://[::1]:9/b", "https://me@a:65535/~b/%20c"]
)
def test_an_address_of_runbooks_that_opens_is_taken(url: str, tmp_path: Path) -> None:
    assert f"{url.rstrip('/')}/GpuwardenJobStalled.md" in written(tmp_path, "--runbooks-url", url)["README.md"]


@pytest.mark.parametrize("name", [".runbooks-url", ".watchdog-url", "gpuwarden/host"])
def test_what_is_kept_and_is_no_text_is_told_in_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "gpuwarden").mkdir()
    (tmp_path / name).write_bytes(b"https://\xff\n")

    with pytest.raises(InitError, match=rf"{re.escape(name)} is not UTF-8: correct the file, or remove it"):
        init.command([str(tmp_path)])


def test_removing_the_address_restores_the_runbook_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path, "--host", "box1")
    written(tmp_path, "--runbooks-url", "https://wiki.example.com/gpu")
    file = tmp_path / ".runbooks-url"
    told = f"begin with https://wiki.example.com/gpu, kept in {file}; remove that file to link the remediator"
    assert told in capsys.readouterr().out

    file.unlink()

    assert written(tmp_path) == before


def test_a_kept_address_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".watchdog-url").write_text("example.com\n")

    with pytest.raises(
        InitError, match=r"\.watchdog-url: invalid URL 'example\.com'.*; correct the file, or remove it"
    ):
        init.command([str(tmp_path)])


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_docker_is_asked_where_its_socket_is(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setattr(docker_socket, "SYSTEM_SOCKET", path)
    with socket.socket(socket.AF_UNIX) as engine:
        if there:
            engine.bind(str(path))
        found = written(tmp_path / "by-default")["gpuwarden/gpuwarden.env"]
        said = capsys.readouterr().out
        told = written(tmp_path / "told", "--docker", "unix:///run/d.sock")["gpuwarden/gpuwarden.env"]

    watched, acted_on = (f"unix://{path}",) * 2 if there else ("auto", "none")
    assert f"GPUWARDEN_EXPORTER_DOCKER={watched}\n" in found
    assert f"GPUWARDEN_REMEDIATOR_DOCKER={acted_on}\n" in found
    assert ("remediator will not" in said) is not there
    assert "GPUWARDEN_EXPORTER_DOCKER=unix:///run/d.sock\n" in told


def test_a_docker_that_is_not_to_be_asked_is_asked_by_nobody(tmp_path: Path) -> None:
    found = written(tmp_path, "--docker", "none")["gpuwarden/gpuwarden.env"]

    assert "GPUWARDEN_EXPORTER_DOCKER=none\n" in found
    assert "GPUWARDEN_REMEDIATOR_DOCKER=none\n" in found


def test_other_options_change_what_was_left_as_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, "--host", "box1")

    assert "127.0.0.1:7777" in written(tmp_path, "--exporter-port", "7777")["prometheus.yml"]


def test_a_changed_file_is_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path, "--host", "box1")
    (tmp_path / "prometheus.yml").write_text("mine\n")

    with pytest.raises(InitError, match=r"nothing was written(.|\n)*\n  prometheus\.yml\n(.|\n)*--force"):
        init.command([str(tmp_path), "--exporter-port", "7777"])
    assert "7777" not in (tmp_path / "gpuwarden" / "gpuwarden.env").read_text()
    assert (tmp_path / "prometheus.yml").read_text() == "mine\n"

    assert written(tmp_path, "--force") == before
    assert "overwritten: prometheus.yml" in capsys.readouterr().out


def test_files_that_somebody_else_put_there_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "alertmanager.yml").write_text("theirs\n")

    with pytest.raises(InitError, match=r"alertmanager\.yml"):
        init.command([str(tmp_path)])


@pytest.mark.parametrize("path", ["etc/gpuwarden", "/etc/gpu warden", "/etc/%h", "/etc/$x", "/a\n/b"])
def test_a_path_that_systemd_would_read_otherwise_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InitError, match="invalid "):
        init.command([str(tmp_path), "--config-dir", path])


def test_a_host_key_that_cannot_be_a_label_is_refused(tmp_path: Path) -> None:
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
    ids=["by default", "told of Podman and services"],
)
def test_exporter_and_executor_read_the_settings_it_writes(
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
def test_a_pattern_of_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str, says: str) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--systemd-unit", unit])

    assert says in capsys.readouterr().err


def test_a_pattern_that_a_file_of_settings_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InitError, match=r"invalid systemd-unit"):
        init.command([str(tmp_path), "--systemd-unit", r"a\x2d*.service"])


@pytest.mark.needs_parts
def test_promtool_and_amtool_accept_what_it_writes(tmp_path: Path) -> None:
    options = [
        word for name in ("config-dir", "data-dir", "runtime-dir") for word in (f"--{name}", str(tmp_path / name))
    ]
    written(tmp_path / "config-dir", *options)
    (tmp_path / "config-dir" / "gpuwarden").rename(tmp_path / "gpuwarden")
    written(tmp_path / "out", "--config-dir", str(tmp_path / "gpuwarden"))

    assert run_part("promtool", "check", "config", str(tmp_path / "out" / "prometheus.yml")) == []
    assert run_part("amtool", "check-config", str(tmp_path / "out" / "alertmanager.yml")) == []


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on PATH")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    written(tmp_path, "--command", "/bin/true")

    checked = subprocess.run(
        ["systemd-analyze", "verify", *sorted((tmp_path / "systemd").iterdir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "gpuwarden" in line]) == (0, [])
