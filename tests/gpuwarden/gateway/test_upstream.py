"""What a host's gateway makes of a central one that gives no answer."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from gpuwarden.gateway.operations import Inputs
from gpuwarden.gateway.upstream import Answer, CentralUpstream

INPUTS = Inputs(worker="w1", job_id=1, attempt=1, incarnation="i1")


def test_request_after_the_stop_signal_is_repeated_by_its_worker(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token\n")
    upstream = CentralUpstream("http://127.0.0.1:1", token, ca_file=None)

    async def ask() -> Answer:
        await upstream.close()
        return await upstream.carry_out(INPUTS, host="box1", request_id="")

    assert asyncio.run(ask()).status == 503


def test_proxy_whose_gateway_is_away_is_no_answer(tmp_path: Path) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(502)
            self.end_headers()
            self.wfile.write(b'{"message": "Bad Gateway"}')

    token = tmp_path / "token"
    token.write_text("token\n")
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.handle_request, daemon=True).start()
        upstream = CentralUpstream(f"http://127.0.0.1:{proxy.server_port}", token, ca_file=None)
        found = asyncio.run(upstream.carry_out(INPUTS, host="box1", request_id=""))

    assert found.status == 503
