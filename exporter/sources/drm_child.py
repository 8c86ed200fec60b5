"""`python -m exporter.sources.drm_child PARENT DRIVER…`: reads AMD's and Intel's GPUs (`driver_child`).

A read of a file of the kernel's is a call into the driver that the file is of, and can hang like any other.
"""

import sys

from exporter.sources import driver_child, drm


def main() -> int:
    """Answer until there is nobody to ask."""
    gpus = drm.DrmGpus(frozenset(sys.argv[2:]))
    return driver_child.serve(int(sys.argv[1]), lambda _: lambda _: gpus.read())


if __name__ == "__main__":
    sys.exit(main())
