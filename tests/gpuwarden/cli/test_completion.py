"""`gpuwarden completion` in real shells."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from deploy.standalone import debian_packages
from gpuwarden.cli.completion import tree
from gpuwarden.cli.main import commands
from tests.terminal import at_terminal
from tests.waiting import eventually

TYPED = {
    "gpuwarden disa": "gpuwarden disarm",
    "gpuwarden job subm": "gpuwarden job submit",
    "gpuwarden job submit --steps-t": "gpuwarden job submit --steps-total",
    "gpuwarden arm --remedy wra": "gpuwarden arm --remedy wrangle",
    "gpuwarden worker run --leas": "gpuwarden worker run --lease-s",
    "gpuwarden exporter --sample": "gpuwarden exporter --sample-interval-s",
    "gpuwarden remediator execute --exporter-b": "gpuwarden remediator execute --exporter-basic-auth-file",
    "gpuwarden init the-fold": "gpuwarden init the-folder",
}
"""A line, and what Tab makes of it."""


def bash(script: Path, program: Path) -> tuple[list[str], dict[str, str]]:
    (script.parent / ".bashrc").write_text(f"source {script}\n")
    return [str(program), "--noprofile", "-i"], {}


def zsh(script: Path, program: Path) -> tuple[list[str], dict[str, str]]:
    own = f"{script.parent / 'functions'}"
    Path(own).mkdir()
    script.rename(Path(own, "_gpuwarden"))
    unpacked = program.parents[1] / "usr"
    if program.is_relative_to(debian_packages.PARTS_DIR):
        (modules,) = unpacked.glob("lib/*/zsh/*")
        (script.parent / ".zshenv").write_text(
            f"module_path=({modules})\nfpath=({unpacked}/share/zsh/functions/**/*(/))\n"
        )
    (script.parent / ".zshrc").write_text(f"fpath=({own} $fpath)\nautoload -U compinit\ncompinit -u -D\n")
    return [str(program), "-d", "-i"], {"ZDOTDIR": str(script.parent)}


def fish(script: Path, program: Path) -> tuple[list[str], dict[str, str]]:
    # An unpacked fish reads no files below /usr/share.
    functions = f"{program.parents[1]}/share/fish/functions"
    return [str(program), "-i", "-C", f"set -a fish_function_path {functions}; source {script}"], {}


@pytest.mark.needs_parts
@pytest.mark.parametrize("prepare", [bash, zsh, fish])
def test_shell_completes_commands_options_values_and_folders(
    prepare: Callable[[Path, Path], tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    shell = prepare.__name__
    program = Path("/bin/bash") if shell == "bash" else debian_packages.find(shell)
    script, folder = tmp_path / "script", tmp_path / "here"
    (folder / "the-folder").mkdir(parents=True)
    with script.open("wb") as file:
        subprocess.run([sys.executable, "-m", "gpuwarden", "completion", shell], stdout=file, check=True, timeout=60)
    argv, environment = prepare(script, program)
    environment = debian_packages.env_for_parts() | {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / ".config"),
        **environment,
    }
    with at_terminal(argv, columns=200, env=environment, folder=folder) as found:
        found.press("echo it is''ready\r")
        eventually(lambda: "it isready" in found.said(), "the shell is ready", log=found.said)

        def has(line: str, since: int) -> bool:
            return line in found.said()[since:]

        for keys, line in TYPED.items():
            so_far = len(found.said())
            found.press(f"{keys}\t")
            eventually(partial(has, line, so_far), line, log=found.said)
            found.press("\x15")  # empty the line


def test_every_command_is_completed() -> None:
    assert list(tree().subcommands.choices) == list(commands())
    assert {"run", "list"} <= set(tree().subcommands.choices["worker"].subcommands.choices)
