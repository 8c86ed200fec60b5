"""`python -m exporter.sources.gpu.nvml.child PARENT`: calls the NVIDIA driver for the exporter (isolated/server.py)."""

import sys

from exporter.sources.gpu.isolated import server
from exporter.sources.gpu.isolated.protocol import Xid
from exporter.sources.gpu.nvml.gpus import NvmlGpus


def main() -> int:
    """Answer until the exporter closes the pipe."""

    def driver(send: server.Send) -> server.Read:
        return NvmlGpus(lambda gpu, code: send(Xid(gpu=gpu, code=code)), server.announce_changes(send)).read

    return server.serve(int(sys.argv[1]), driver)


if __name__ == "__main__":
    sys.exit(main())
