"""A TCP relay: it makes a server of loopback reachable from another network."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def relay(address: str, port: int) -> Iterator[int]:
    """Forward connections to `address` to this port of loopback. Yields the relay's port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=_copy, args=(server, self.request), daemon=True)
                back.start()
                _copy(self.request, server)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while sent := source.recv(65536):
            target.sendall(sent)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
