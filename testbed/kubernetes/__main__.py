"""`python -m testbed.kubernetes`: run a cluster until Ctrl-C, import an image, restart a program."""

import argparse
import signal
import sys
import time
from pathlib import Path

from testbed.kubernetes.cluster import Cluster, NoCluster, kubernetes_cluster
from testbed.kubernetes.programs import NoClusterError, find


def main() -> int:
    """Run a command. Returns 1 without a cluster."""
    parser = argparse.ArgumentParser(prog="python -m testbed.kubernetes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="run a cluster in DIR until Ctrl-C; its logs stay there")
    start.set_defaults(run=_start)
    image = commands.add_parser("image", help="import the root file system ROOT as image NAME:TAG")
    image.set_defaults(run=lambda given: Cluster(given.dir).add_image(given.name, given.root))
    restart = commands.add_parser("restart", help="restart a program of the cluster")
    restart.set_defaults(run=lambda given: Cluster(given.dir).restart(given.program))
    for command in (start, image, restart):
        command.add_argument("dir", type=lambda text: Path(text).resolve(), metavar="DIR")
    image.add_argument("name", metavar="NAME:TAG")
    image.add_argument("root", type=Path, metavar="ROOT")
    restart.add_argument("program", metavar="PROGRAM")
    check = commands.add_parser("check", help="say whether there are the programs for a cluster")
    check.set_defaults(run=_check)
    given = parser.parse_args()
    try:
        return given.run(given) or 0
    except NoClusterError as problem:
        print(problem, file=sys.stderr)
        return 1


def _check(_: argparse.Namespace) -> int:
    found = find()
    print(f"Kubernetes {found.version[0]}.{found.version[1]} in {found.folder}")
    return 0


def _start(given: argparse.Namespace) -> int:
    begun_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with kubernetes_cluster(given.dir) as found:
            if isinstance(found, NoCluster):
                print(found.reason, file=sys.stderr)
                return 1
            version = ".".join(map(str, found.version))
            print(f"Kubernetes {version} is ready after {time.monotonic() - begun_s:.0f} s: {found.url}")
            print(f"export KUBECONFIG={found.kubeconfig}", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
