"""`python -m exporter.sources.nvml_child PARENT`: asks the NVIDIA driver for the exporter (`driver_child`)."""

import sys

from exporter.sources import driver_child
from exporter.sources.driver_wire import Xid
from exporter.sources.nvml import NvmlGpus


def main() -> int:
    """Answer until there is nobody to ask."""

    def driver(tell: driver_child.Tell) -> driver_child.Read:
        return NvmlGpus(lambda gpu, code: tell(Xid(gpu=gpu, code=code))).read

    return driver_child.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
