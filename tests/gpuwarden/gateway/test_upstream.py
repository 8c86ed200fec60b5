"""What a gateway makes of errors and of a central gateway that gives no answer."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.gateway import main, upstream
from gpuwarden.gateway.operations import Inputs
from gpuwarden.gateway.upstream import Answer, CentralUpstream, DatabaseUpstream, failed
from gpuwarden.queue import JobStore

INPUTS = Inputs(worker="w1", job_id=1, attempt=1, incarnation="i1")
NO_PART: Any = None


class Broken(Inputs):
    def run(self, store: JobStore, host: str) -> Any:  # noqa: ARG002
        raise RuntimeError("broken")


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    upstream._failures.clear()


def test_unexpected_error_is_an_answer_and_logged_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    database = DatabaseUpstream(NO_PART, NO_PART, NO_PART, threads=1)
    broken = Broken(**INPUTS.model_dump())

    async def twice() -> list[Answer]:
        return [await database.carry_out(broken, host="box1", request_id="") for _ in range(2)]

    assert asyncio.run(twice()) == [failed(500, "queue", "RuntimeError: broken")] * 2
    logged = capsys.readouterr().out
    assert logged.count("operation failed") == 1
    assert "Traceback" in logged


def test_token_file_that_is_gone_is_logged_seldom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("token\n")
    central = CentralUpstream("http://127.0.0.1:1", token, ca_file=None)
    token.unlink()

    async def twice() -> list[Answer]:
        return [await central.carry_out(INPUTS, host="box1", request_id="") for _ in range(2)]

    assert [each.status for each in asyncio.run(twice())] == [503, 503]
    logged = capsys.readouterr().out
    assert logged.count("token file not read") == 1
    assert logged.count("the queue does not answer") == 1


def test_request_after_the_stop_signal_is_repeated_by_its_worker(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token\n")
    central = CentralUpstream("http://127.0.0.1:1", token, ca_file=None)

    async def ask() -> Answer:
        await central.close()
        return await central.carry_out(INPUTS, host="box1", request_id="")

    assert asyncio.run(ask()).status == 503


def test_host_closes_an_idle_connection_before_the_central_gateway() -> None:
    assert upstream.KEEP_ALIVE_S < main.KEEP_ALIVE_S


@pytest.mark.parametrize(("status", "logged"), [(502, "status 502"), (404, "use the same release")])
def test_proxy_without_gateway_and_another_release_are_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, logged: str
) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"message": "why"}')

    token = tmp_path / "token"
    token.write_text("token\n")
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.handle_request, daemon=True).start()
        central = CentralUpstream(f"http://127.0.0.1:{proxy.server_port}", token, ca_file=None)
        found = asyncio.run(central.carry_out(INPUTS, host="box1", request_id=""))

    assert found.status == 503
    assert logged in capsys.readouterr().out
