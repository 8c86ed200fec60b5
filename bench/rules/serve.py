"""`python -m bench.rules.serve TURNOVER_S KIND`: serve a fleet of workers, gangs or tenants to Prometheus.

`/NUMBER/metrics` is a host's exporter and `/NUMBER/remediator` its remediator. Prints its port and ends with its
stdin.
"""

import asyncio
import sys
import time
from typing import cast

from bench.rules.fleet import Fleet, Kind
from exporter.http.exposition import TEXT


class _Server(asyncio.Protocol):
    """Minimal HTTP with persistent connections."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, self._received = self._received.split(b"\r\n\r\n", 1)
            _, number, what = head.split(b" ", 2)[1].split(b"/")
            body = (
                self._fleet.remediator_page()
                if what == b"remediator"
                else self._fleet.page(int(number), now_s=time.time())
            )
            begin = f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            self._transport.write(begin + body)


async def _serve(turnover_s: float, kind: Kind) -> None:
    fleet = Fleet(turnover_s=turnover_s, kind=kind)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Server(fleet), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), cast("Kind", sys.argv[2])))
