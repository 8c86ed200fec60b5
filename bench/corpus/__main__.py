"""`python -m bench.corpus [PLACE ...]`: what the rules make of the scenarios of a file or a folder, a line each.

For who writes one: it says who fired when, and what of that is not what the scenario wants.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.corpus import scenario_file
from bench.corpus.judge import JudgeError, Played, play
from bench.figures import print_text
from deploy.standalone.debian_packages import PartMissing


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print; 1 where one is judged otherwise than it wants, 2 where none can be played."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.corpus",
        description="Judge scenarios by the rules that ship, and by what people use instead (docs/corpus.md).",
        epilog="Exit code: 0 where all are judged as they want, 1 where one is not, 2 where one cannot be read.",
    )
    parser.add_argument(
        "places", metavar="PLACE", type=Path, nargs="*",
        help="a file, or a folder of *.yaml or *.yml; those of this checkout where none is named",
    )  # fmt: skip
    try:
        played = play(scenario_file.read(*parser.parse_args(argv).places))
    except (scenario_file.ScenarioError, JudgeError, PartMissing) as error:
        print(error, file=sys.stderr)
        return 2
    for each in played:
        print_text("\n".join(_lines(each)))
    return int(any(each.wrong() and not each.scenario.not_yet for each in played))


def _lines(played: Played) -> Iterator[str]:
    wrong, one = played.wrong(), played.scenario
    marked = ", and is marked not_yet" if one.not_yet else ""
    yield f"{one.place}: {'wrong' if wrong else 'right'}{marked}: {one.name}"
    yield from (f"    {each}" for each in wrong)
    for each in sorted(played.fired, key=lambda each: each.at_s):
        yield f"    {each.at_s}s, {each.policy}: {each.alert} of {each.of}"


if __name__ == "__main__":
    sys.exit(main())
