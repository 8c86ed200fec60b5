"""`python -m exporter.sources.nvml_child PARENT PLACE`: asks the NVIDIA driver for the exporter (`driver_child`).

PLACE is an open file, in which it keeps which GPU it asks about just now (`driver_wire.PLACE`).
"""

import sys

from exporter.sources import driver_child
from exporter.sources.driver_wire import Xid
from exporter.sources.nvml import NvmlGpus


def main() -> int:
    """Answer until there is nobody to ask."""
    asks = driver_child.keeps_place(int(sys.argv[2]))

    def driver(tell: driver_child.Tell) -> driver_child.Read:
        return NvmlGpus(lambda gpu, code: tell(Xid(gpu=gpu, code=code)), asks).read

    return driver_child.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
