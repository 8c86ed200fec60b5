"""A real systemd runs the units of the gateways, with their users and their sandboxes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.standalone import init, ports
from deploy.standalone.stack import CHECKOUT
from testbed.private_systemd import UNITS, NoSystemd, Systemd, private_systemd
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_systemd, pytest.mark.slow]

ROOM = Path("/run/warden")
"""In the private systemd's own /run, because the units see another /tmp."""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with private_systemd(tmp_path) as found:
        if isinstance(found, NoSystemd):
            pytest.skip(found.reason)
        yield found


def shell(systemd: Systemd, script: str, *, check: bool = True) -> str:
    command = [*systemd.enter, "/bin/sh", "-euc", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=CHECKOUT)
    assert not check or done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_units_serve_a_workers_folder_and_hosts(systemd: Systemd, tmp_path: Path) -> None:
    host_port, central_port = ports.free_ports(2)
    options = ["--gateway-host-port", str(host_port), "--gateway-central-port", str(central_port), "--docker", "none"]
    options += [word for name in ("config", "data", "runtime") for word in (f"--{name}-dir", str(ROOM / name))]
    files = tmp_path / "files"
    assert init.command([str(files), "--host", "box1", "--gateway", "both", *options]) == 0
    open_python_to_all(systemd)
    install(systemd, files)

    def status() -> str:
        return shell(systemd, "systemctl status --no-pager 'gpuwarden-gateway-*'", check=False)

    def has_socket() -> bool:
        metrics = shell(systemd, f"curl -sf http://127.0.0.1:{host_port}/metrics", check=False)
        return "gpuwarden_gateway_sockets 1.0" in metrics

    def is_healthy() -> bool:
        return shell(systemd, f"curl -sf http://127.0.0.1:{central_port}/-/healthy", check=False) == "ok\n"

    eventually(is_healthy, "the central gateway answers", within_s=60, log=status)
    eventually(has_socket, "the host's gateway has a socket", within_s=60, log=status)
    socket = ROOM / "runtime" / "w1" / "queue.sock"
    assert shell(systemd, f"stat -c '%F %u %a' {socket}") == "socket 1234 600\n"
    as_worker = "setpriv --reuid 1234 --regid 1234 --clear-groups"
    ask = f'curl -s --unix-socket {socket} -d \'{{"worker":"w1"}}\' http://gateway/v1/quarantine'
    assert shell(systemd, f"{as_worker} {ask}") == '{"result": null}'
    main_pids = "systemctl show --value --property MainPID gpuwarden-gateway-central gpuwarden-gateway-host"
    assert shell(systemd, f"for pid in $({main_pids}); do stat -c %U /proc/$pid; done").split() == ["gpuwarden", "root"]


def install(systemd: Systemd, files: Path) -> None:
    """Install the files as their README says, with a user that only this systemd knows."""
    shell(
        systemd,
        f"""
        cp /etc/passwd /etc/group /run
        echo gpuwarden:x:7777:7777::/:/bin/false >>/run/passwd
        echo gpuwarden:x:7777: >>/run/group
        mount --bind /run/passwd /etc/passwd
        mount --bind /run/group /etc/group
        cd {files}
        systemd-tmpfiles --create "$PWD"/tmpfiles.d/gpuwarden.conf
        install -D --mode 0644 gpuwarden/gpuwarden.env --target-directory {ROOM}/config
        install -d --owner 1234 --group 1234 --mode 0700 {ROOM}/runtime/w1
        for unit in systemd/gpuwarden-gateway-*.service; do  # without basic.target
          sed 's/^.Unit.$/&\\nDefaultDependencies=no/' "$unit" >{UNITS}/"$(basename "$unit")"
        done
        systemctl daemon-reload
        systemctl start gpuwarden-gateway-central gpuwarden-gateway-host
        """,
    )


def open_python_to_all(systemd: Systemd) -> None:
    """Bind this interpreter into an open folder, if it is in a home that other users cannot enter."""
    prefix = Path(sys.base_prefix)
    closed = init._closed_folder(prefix / "bin")
    if closed is not None:
        shell(
            systemd,
            f"""
            mkdir /run/python && mount --bind {prefix} /run/python
            mount -t tmpfs -o mode=755 tmpfs {closed}
            mkdir -p {prefix} && mount --bind /run/python {prefix}
            """,
        )
