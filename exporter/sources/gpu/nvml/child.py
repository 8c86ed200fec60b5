"""`python -m exporter.sources.gpu.nvml.child PARENT PLACE`: asks the NVIDIA driver for the exporter (`driver_child`).

PLACE is an open file, in which it keeps which GPU it asks about just now (`driver_wire.PLACE`).
"""

import sys

from exporter.sources.gpu.isolated import server
from exporter.sources.gpu.isolated.protocol import Xid
from exporter.sources.gpu.nvml.gpus import NvmlGpus


def main() -> int:
    """Answer until there is nobody to ask."""
    asks = server.keeps_place(int(sys.argv[2]))

    def driver(tell: server.Tell) -> server.Read:
        return NvmlGpus(lambda gpu, code: tell(Xid(gpu=gpu, code=code)), asks).read

    return server.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
