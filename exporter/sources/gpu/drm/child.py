"""`python -m exporter.sources.gpu.drm.child PARENT DRIVER…`: reads AMD and Intel GPUs (isolated/server.py).

A GPU's number is the minor number of its render node.
"""

import sys

from exporter.sources.gpu.drm import gpus
from exporter.sources.gpu.isolated import server


def main() -> int:
    """Answer until the exporter closes the pipe."""

    def driver(send: server.Send) -> server.Read:
        return gpus.DrmGpus(frozenset(sys.argv[2:]), announce=server.announce_changes(send)).read

    return server.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
