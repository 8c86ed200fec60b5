"""Free ports: distinct, below the range for connections, and not in use."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.standalone import ports


def test_ports_are_distinct_and_below_the_kernel_range() -> None:
    found = ports.free_ports(20)

    assert len(set(found)) == 20
    assert max(found) < int(ports.RANGE.read_text().split()[0])
    assert min(found) >= ports.PORTS_FROM


def test_port_in_use_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_ports(1)[0]
    monkeypatch.setattr(ports, "PORTS_FROM", first)
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    (tmp_path / "range").write_text(f"{first + 1} 60999\n")
    assert ports.free_ports(1) == [first]

    with ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", first)))
        with pytest.raises(OSError, match="0 of 1 ports are free"):
            ports.free_ports(1)
