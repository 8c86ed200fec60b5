"""The gateway: a worker's door to the queue, through a socket in its own folder.

`client` is what a worker uses. The other modules are `gpuwarden gateway`: that of a host (`sockets`, `batching`), and
the central one (`central`), which serves hosts with tokens and takes reports of hosts that are not scraped (`reports`).
"""

from typing import Final

HOST_PORT: Final = 29837
"""Default port of a host's gateway, for its metrics."""

CENTRAL_PORT: Final = 29838
"""Default port of a central gateway."""
