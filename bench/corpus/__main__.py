"""`python -m bench.corpus [PLACE ...]`: judge scenario files, and print their alerts and faults."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.corpus import page, scenario_file
from bench.corpus.judge import JudgeError, Played, play
from bench.figures import print_text
from deploy.standalone.debian_packages import PartMissing


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print. Exit code 1: a verdict is wrong. 2: a file is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.corpus",
        description="Judge scenarios by our alert rules and by common alternatives (bench/README.md).",
        epilog="Exit code: 0 if all verdicts are right, 1 if one is wrong, 2 if a file is invalid.",
    )
    parser.add_argument(
        "places", metavar="PLACE", type=Path, nargs="*",
        help="a file, or a folder with *.yaml or *.yml (default: the scenarios of this checkout)",
    )  # fmt: skip
    parser.add_argument(
        "--page", action="store_true", help="only write the words of scenarios into bench/corpus/README.md"
    )
    arguments = parser.parse_args(argv)
    if arguments.page:
        page.write_words()
        return 0
    try:
        played = play(scenario_file.read(*arguments.places))
    except (scenario_file.ScenarioError, JudgeError, PartMissing) as error:
        print(error, file=sys.stderr)
        return 2
    for each in played:
        print_text("\n".join(_lines(each)))
    return int(any(each.wrong() and not each.scenario.not_yet for each in played))


def _lines(played: Played) -> Iterator[str]:
    wrong, one = played.wrong(), played.scenario
    marked = ", marked not_yet" if one.not_yet else ""
    yield f"{one.place}: {'wrong' if wrong else 'right'}{marked}: {one.name}"
    yield from (f"    {each}" for each in wrong)
    for each in sorted(played.fired, key=lambda each: each.at_s):
        yield f"    {each.at_s}s, {each.policy}: {each.alert} of {each.of}"


if __name__ == "__main__":
    sys.exit(main())
