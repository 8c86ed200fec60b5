"""`python -m exporter.sources.gpu.drm.child PARENT DRIVER…`: reads AMD's and Intel's GPUs (isolated/server.py).

A read of a file of the kernel's is a call into the driver that the file is of, and can hang like any other. A GPU's
number is the minor number of its render node.
"""

import sys

from exporter.sources.gpu.drm import gpus
from exporter.sources.gpu.isolated import server


def main() -> int:
    """Answer until the exporter closes the pipe."""

    def driver(tell: server.Tell) -> server.Read:
        return gpus.DrmGpus(frozenset(sys.argv[2:]), asks=server.announces(tell)).read

    return server.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
