"""`python -m exporter.sources.gpu.drm.child PARENT PLACE DRIVER…`: reads AMD's and Intel's GPUs (`driver_child`).

A read of a file of the kernel's is a call into the driver that the file is of, and can hang like any other. PLACE is
an open file, in which it keeps whose files it reads just now: the minor number of that GPU's render node
(`driver_wire.PLACE`).
"""

import sys

from exporter.sources.gpu.drm import gpus as drm
from exporter.sources.gpu.isolated import server


def main() -> int:
    """Answer until there is nobody to ask."""
    gpus = drm.DrmGpus(frozenset(sys.argv[3:]), asks=server.keeps_place(int(sys.argv[2])))
    return server.serve(int(sys.argv[1]), lambda _: gpus.read)


if __name__ == "__main__":
    sys.exit(main())
