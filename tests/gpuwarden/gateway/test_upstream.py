"""What a host's gateway makes of a central one that gives no answer."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpuwarden.gateway import upstream
from gpuwarden.gateway.operations import Inputs
from gpuwarden.gateway.upstream import LOG_S, Answer, CentralUpstream

INPUTS = Inputs(worker="w1", job_id=1, attempt=1, incarnation="i1")


def test_request_after_the_stop_signal_is_repeated_by_its_worker(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token\n")
    central = CentralUpstream("http://127.0.0.1:1", token, ca_file=None)

    async def ask() -> Answer:
        await central.close()
        return await central.carry_out(INPUTS, host="box1", request_id="")

    assert asyncio.run(ask()).status == 503


@pytest.mark.parametrize(("status", "logged"), [(502, "status 502"), (404, "use the same release")])
def test_proxy_without_gateway_and_another_release_are_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int, logged: str
) -> None:
    monkeypatch.setattr(upstream, "_failures", upstream.Seldom(LOG_S))

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
