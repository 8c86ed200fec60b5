"""How a command's options are told to people by `--help`, where argparse and pydantic tell them to programmers."""

import argparse
import re
from typing import Final

_NOTHING: Final = re.compile(r" \(default: (None|\(\)|)\)$")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """With each default that is one: of an option that nothing is given for, nothing is said."""

    def _expand_help(self, action: argparse.Action) -> str:
        return _NOTHING.sub("", super()._expand_help(action))
