"""Debian's `webhook` (https://github.com/adnanh/webhook) with an empty script, from PATH or unpacked into `.parts`.

It answers before it runs the script.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.figures import wait_until
from deploy.standalone import debian_packages

PATH: Final = "/hooks/nothing"


@contextmanager
def running(folder: Path) -> Iterator[int | str]:
    """Run it; yields its port, or why it cannot run."""
    try:
        program = shutil.which("webhook") or str(debian_packages.unpack("webhook", ["webhook"]) / "usr/bin/webhook")
    except debian_packages.PartMissing as missing:
        yield str(missing)
        return
    script, hooks = folder / "nothing.sh", folder / "hooks.json"
    script.write_text("#!/bin/sh\nexit 0\n", encoding="ascii")
    script.chmod(0o755)
    hooks.write_text(json.dumps([{"id": "nothing", "execute-command": str(script)}]), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [program, "-hooks", str(hooks), "-ip", "127.0.0.1", "-port", str(port)]
    with (folder / "webhook.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: _is_open(port), within_s=10, what="Debian's webhook listens")
            yield port
        finally:
            process.terminate()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
