"""`python -m exporter.sources.gpu.nvml.child PARENT`: asks the NVIDIA driver for the exporter (isolated/server.py)."""

import sys

from exporter.sources.gpu.isolated import server
from exporter.sources.gpu.isolated.protocol import Xid
from exporter.sources.gpu.nvml.gpus import NvmlGpus


def main() -> int:
    """Answer until the exporter closes the pipe."""

    def driver(tell: server.Tell) -> server.Read:
        return NvmlGpus(lambda gpu, code: tell(Xid(gpu=gpu, code=code)), server.announces(tell)).read

    return server.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
