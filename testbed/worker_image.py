"""Build the worker image: Debian's Python, a shell and files of the caller, imported into an engine.

No registry is needed. The base is unpacked from Debian packages into `.parts/worker-base`. The tag is a hash of the
content, so an engine that has the image is not changed.

`/usr/bin/python3` has the standard library, busybox is `/bin/sh`, and `/app` is first on Python's path. Modules are
precompiled: otherwise each container would compile for seconds at its start.
"""

import compileall
import hashlib
import marshal
import py_compile
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path, PurePosixPath

import docker
from docker.errors import ImageNotFound

from deploy.standalone import debian_packages

REPOSITORY = "gpuwarden-worker"
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
"""Files in the image do not change but get new dates, so caches are not checked."""

BASE_ROOM = "worker-base"
APP = PurePosixPath("/app")
"""Folder of importable modules."""
CHANGES = [
    *(f"ENV {variable}" for variable in (f"PYTHONPATH={APP}", "PYTHONUNBUFFERED=1", "LANG=C.UTF-8")),
    f"WORKDIR {APP}",
    'CMD ["/usr/bin/python3"]',
]

_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "busybox-static")
# Needed for installing packages, not for Python.
_NOT_IN_THE_IMAGE = frozenset({"dpkg", "tar", "gcc-12-base", "gcc-14-base", "libmd0", "media-types", "readline-common"})
_LEFT_OUT = (
    *(f"usr/share/{folder}" for folder in ("doc", "man", "locale", "lintian", "perl5")),
    *("var/lib/dpkg", "usr/lib/*-linux-gnu*/gconv"),
    *(f"usr/lib/python3*/{folder}" for folder in ("idlelib", "lib2to3", "pydoc_data", "turtledemo")),
)
_MERGED = ("bin", "sbin", "lib", "lib64")
_COMMANDS = (
    "sh", "cat", "cp", "date", "echo", "env", "false", "grep", "head", "id", "kill", "ls", "mkdir", "mv", "nice", "ps",
    "pwd", "rm", "sed", "seq", "sleep", "stat", "sync", "tail", "test", "timeout", "touch", "tr", "true", "uname", "wc",
    "yes",
)  # fmt: skip


def worker_image(client: docker.DockerClient, *, extra: Mapping[str, Path]) -> str:
    """Create the worker image in an engine and return its name with tag. Raises PartMissing or FileNotFoundError.

    `extra` maps absolute paths in the image to host files or folders. `__pycache__` is created new.
    """
    base = base_root()
    added = [
        (PurePosixPath(name), file) for target, source in sorted(extra.items()) for name, file in _files(target, source)
    ]
    tag = _content_hash(base, added)
    name = f"{REPOSITORY}:{tag}"
    try:
        client.images.get(name)
    except ImageNotFound:
        with tempfile.TemporaryFile() as stream, tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(fileobj=stream, mode="w") as tar:
                tar.add(base, arcname=".", filter=_as_root)
                for path, file in (*added, *_caches(added, Path(scratch))):
                    tar.add(file, arcname=f".{path}", recursive=False, filter=_as_root)
            stream.seek(0)
            client.api.import_image_from_data(stream, repository=name, changes=CHANGES)  # Podman ignores a separate tag
    return name


def base_root() -> Path:
    """Root filesystem of all worker images; fetched on the first call."""
    return debian_packages.unpack(BASE_ROOM, _PACKAGES, dependencies=True, without=_NOT_IN_THE_IMAGE, finish=_complete)


def _merge_usr(root: Path) -> None:
    """Move /bin, /lib and others into /usr and link them, as an installed system does."""
    for folder in _MERGED:
        if (root / folder).is_dir() and not (root / folder).is_symlink():
            shutil.copytree(root / folder, root / "usr" / folder, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / folder)
        (root / "usr" / folder).mkdir(exist_ok=True)
        _link(root / folder, f"usr/{folder}")


def _complete(root: Path) -> None:
    """Do the work of the packages' scripts, and delete unneeded files."""
    _merge_usr(root)
    for pattern in _LEFT_OUT:
        for found in list(root.glob(pattern)):
            _remove(found)
    for folder in ("app", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var/tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    for command in _COMMANDS:
        _link(root / "usr/bin" / command, "busybox")
    newest = max((root / "usr/bin").glob("python3.[0-9]*"), key=lambda python: int(python.name.split(".")[1]))
    _link(root / "usr/bin/python3", newest.name)
    if newest.name == f"python3.{sys.version_info.minor}":
        library = root / "usr/lib" / newest.name
        compileall.compile_dir(library, quiet=2, stripdir=root, prependdir="/", invalidation_mode=UNCHECKED)


def _link(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _remove(tree: Path) -> None:
    if tree.is_dir() and not tree.is_symlink():
        for inside in tree.iterdir():
            _remove(inside)
        tree.rmdir()
    else:
        tree.unlink(missing_ok=True)


def _files(target: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Files and folders of `source` with their image paths, parents first, in stable order."""
    if not source.exists():
        raise FileNotFoundError(f"{source} is missing: source of {target} in the worker image")
    yield target, source
    if source.is_dir():
        for inside in sorted(source.iterdir()):
            if inside.name != "__pycache__":
                yield from _files(f"{target.rstrip('/')}/{inside.name}", inside)


def _caches(added: list[tuple[PurePosixPath, Path]], scratch: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """Compiled caches of `added`, created in `scratch`, folders first."""
    folders = set()
    for number, (path, file) in enumerate(added):
        made = scratch / str(number)
        if path.suffix != ".py" or (compiled := _compiled(file)) is None:
            continue
        made.write_bytes(compiled)
        folder = path.parent / "__pycache__"
        if folder not in folders:
            folders.add(folder)
            yield folder, scratch
        yield folder / f"{path.stem}.{sys.implementation.cache_tag}.pyc", made


def _compiled(file: Path) -> bytes | None:
    """A cache of a module, for `UNCHECKED`; None if it cannot be compiled.

    Python's own cache of the file is used if it is fresh: to compile all modules takes 2 s for each image.
    """
    try:
        code = SourceFileLoader(file.stem, str(file)).get_code(file.stem)
    except SyntaxError:
        return None
    unchecked = (0b01).to_bytes(4, "little")  # PEP 552
    return b"".join((MAGIC_NUMBER, unchecked, source_hash(file.read_bytes()), marshal.dumps(code)))


def _content_hash(base: Path, added: list[tuple[PurePosixPath, Path]]) -> str:
    """16 hex digits of packages, recipe, added files and modes."""
    digest = hashlib.sha256((base / ".packages").read_bytes())
    digest.update(sys.version.encode())  # the caches depend on it
    # This file is the recipe.
    digest.update(Path(__file__).read_bytes())
    for path, file in added:
        mode = file.stat().st_mode
        content = file.read_bytes() if stat.S_ISREG(mode) else b""
        digest.update(f"\0{path}\0{mode:o}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a member root's and readable to all."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o555 if member.isdir() else 0o444
    return member
