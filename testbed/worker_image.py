"""The worker image: Debian's Python and a shell, with what the caller adds, imported straight into an engine.

No registry and no image builder is needed. The base is a root filesystem unpacked from Debian's packages, kept in
`.parts/worker-root`; the image is that and the caller's files as one tar stream. Its tag is a hash of all that is in
it, so that an engine that has it already is left alone.

In the image: `/usr/bin/python3` with the standard library, busybox as `/bin/sh` and its commonest commands; `/app` is
first on Python's path. Python finds all of it compiled, where it is of our own version: else each container would
compile it anew at its first start, for longer than all else that a worker does until it is ready.
"""

import compileall
import hashlib
import py_compile
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import docker
from docker.errors import ImageNotFound

from deploy.standalone import debian_packages

REPOSITORY = "gpuwarden-worker"
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
"""Nobody edits what is in an image, and its files are dated anew: a cache is believed without a look at its source."""

BASE_ROOM = "worker-root"
APP = PurePosixPath("/app")
"""What lies below it in the image is importable."""
CHANGES = [
    *(f"ENV {variable}" for variable in (f"PYTHONPATH={APP}", "PYTHONUNBUFFERED=1", "LANG=C.UTF-8")),
    f"WORKDIR {APP}",
    'CMD ["/usr/bin/python3"]',
]

_PACKAGES = ("python3-minimal", "libpython3-stdlib", "busybox-static")
# Needed to install packages or to look things up, not to run Python.
_NOT_IN_THE_IMAGE = frozenset({"dpkg", "tar", "gcc-12-base", "gcc-14-base", "libmd0", "media-types", "readline-common"})
_LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/perl5",
    "var/lib/dpkg",
)
_LEFT_OUT_OF_LIBRARIES = (
    "*-linux-gnu*/gconv",
    "python3*/idlelib",
    "python3*/lib2to3",
    "python3*/pydoc_data",
    "python3*/turtledemo",
)
_MERGED = ("bin", "sbin", "lib", "lib64")
_COMMANDS = (
    *(
        "sh",
        "cat",
        "cp",
        "date",
        "echo",
        "env",
        "false",
        "grep",
        "head",
        "id",
        "kill",
        "ls",
        "mkdir",
        "mv",
        "nice",
        "ps",
    ),
    *(
        "pwd",
        "rm",
        "sed",
        "seq",
        "sleep",
        "stat",
        "sync",
        "tail",
        "test",
        "timeout",
        "touch",
        "tr",
        "true",
        "uname",
        "wc",
        "yes",
    ),
)


def worker_image(client: docker.DockerClient, *, extra: Mapping[str, Path]) -> str:
    """Have the worker image in the engine of `client`, and return its name with its tag.

    `extra` maps absolute paths in the image to host files or folders that are copied there; `__pycache__` is not, but
    made anew.
    Raises PartMissing when the base cannot be fetched, FileNotFoundError when something of `extra` is not there.
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
            client.api.import_image_from_data(stream, repository=name, changes=CHANGES)  # Podman reads no tag beside it
    return name


def base_root() -> Path:
    """The unpacked root filesystem that every worker image starts from; fetched on the first call."""
    return debian_packages.unpack(BASE_ROOM, _PACKAGES, dependencies=True, without=_NOT_IN_THE_IMAGE, finish=_complete)


def _merge_usr(root: Path) -> None:
    """Move /bin, /lib and the like into /usr and lead there by links, as an installed system has it."""
    for folder in _MERGED:
        if (root / folder).is_dir() and not (root / folder).is_symlink():
            shutil.copytree(root / folder, root / "usr" / folder, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / folder)
        (root / "usr" / folder).mkdir(exist_ok=True)
        _link(root / folder, f"usr/{folder}")


def _complete(root: Path) -> None:
    """Do what the packages' scripts would have done, and leave out what no worker needs."""
    _merge_usr(root)
    for left_out in _LEFT_OUT:
        _remove(root / left_out)
    for pattern in _LEFT_OUT_OF_LIBRARIES:
        for found in list((root / "usr/lib").glob(pattern)):
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
    """Each file and folder of `source` with its path in the image, parents first, in a settled order."""
    if not source.exists():
        raise FileNotFoundError(f"{source}, which {target} in the worker image is to be copied from, is not there")
    yield target, source
    if source.is_dir():
        for inside in sorted(source.iterdir()):
            if inside.name != "__pycache__":
                yield from _files(f"{target.rstrip('/')}/{inside.name}", inside)


def _caches(added: list[tuple[PurePosixPath, Path]], scratch: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """What our Python compiles of `added`, made in `scratch`, each folder before what is in it.

    A Python of another version does not look at it.
    """
    folders = set()
    for number, (path, file) in enumerate(added):
        made = scratch / str(number)
        if path.suffix != ".py" or not py_compile.compile(
            str(file), cfile=str(made), dfile=str(path), quiet=2, invalidation_mode=UNCHECKED
        ):
            continue
        folder = path.parent / "__pycache__"
        if folder not in folders:
            folders.add(folder)
            yield folder, scratch
        yield folder / f"{path.stem}.{sys.implementation.cache_tag}.pyc", made


def _content_hash(base: Path, added: list[tuple[PurePosixPath, Path]]) -> str:
    """16 hexadecimal digits that change with anything in the image: packages, recipe, added files and their modes."""
    digest = hashlib.sha256((base / ".packages").read_bytes())
    digest.update(sys.version.encode())  # of what is compiled
    # The recipe is this file.
    digest.update(Path(__file__).read_bytes())
    for path, file in added:
        mode = file.stat().st_mode
        content = file.read_bytes() if stat.S_ISREG(mode) else b""
        digest.update(f"\0{path}\0{mode:o}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Everything in the image is root's and readable to all, whoever wrote it on the host and under whichever umask."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o555 if member.isdir() else 0o444
    return member
