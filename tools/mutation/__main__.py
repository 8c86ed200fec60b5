"""`python -m tools.mutation`: plant every fault and list the ones that no test catches."""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deploy.standalone import debian_packages
from deploy.standalone.debian_packages import PartMissing
from tools.mutation import judging, product
from tools.mutation.equivalent import EQUIVALENT
from tools.mutation.generated import generate_mutants
from tools.mutation.judging import UnsoundError
from tools.mutation.rules import Mutant, StaleError, by_hand, files

EPILOG = """\
Without arguments all faults run, in about an hour on two cores. Exit status: 1 if a fault survives, 2 if the tests
fail on the unchanged rules or promtool is missing.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the chosen rules or machines. Prints one line for each, and the survivors."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation", description=(__doc__ or "").partition(": ")[2], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    known = {file.name: file for file in files()}
    parser.add_argument("--rules", metavar="FILE", action="append", default=[], help="judge one rule file, such as "
                        "alerts/stall.rules.yaml; may be repeated")  # fmt: skip
    parser.add_argument("--product", choices=product.MACHINES, action="append", default=[],
                        help="judge the bugs of one state machine; may be repeated")  # fmt: skip
    chosen = parser.parse_args(argv)
    if unknown := [name for name in chosen.rules if Path(name).name not in known]:
        parser.error(f"unknown rule file {unknown[0]}; known: {', '.join(known)}")
    everything = not (chosen.rules or chosen.product)
    rules = list(known.values()) if everything else [known[Path(name).name] for name in chosen.rules]
    survived = 0
    try:
        if rules:
            survived += _judge_rules(rules)
    except (PartMissing, StaleError, UnsoundError) as error:
        print(f"cannot judge the rules: {error}", file=sys.stderr)
        return 2
    for name in product.MACHINES if everything else chosen.product:
        survived += _judge_product(name)
    return 1 if survived else 0


def mutants(rules: Sequence[Path], promtool: Path, room: Path) -> list[Mutant]:
    """Mutants of these files that parse and are not equivalent. `room` is an empty folder."""
    found: dict[str, Mutant] = {}
    for file in rules:
        found |= {each.text: each for each in (*by_hand(file), *generate_mutants(file)) if each.name not in EQUIVALENT}
    return judging.select_parsing(list(found.values()), promtool, room)


def _judge_rules(rules: Sequence[Path]) -> int:
    promtool = debian_packages.find("promtool")
    with tempfile.TemporaryDirectory(dir=judging.MEMORY) as folder:
        parse = Path(folder, "parse")
        parse.mkdir()
        broken = mutants(rules, promtool, parse)
        left = Counter(each.rules for each in broken)
        total, survived = left.copy(), {file.name: list[str]() for file in rules}
        for judged in judging.judge_all(broken, promtool, Path(folder)):
            survived[judged.rules] += judged.survived
            left[judged.rules] -= len(judged.caught) + len(judged.survived)
            if not left[judged.rules]:
                _report(judged.rules, total[judged.rules], survived[judged.rules])
    return sum(map(len, survived.values()))


def _judge_product(name: str) -> int:
    found = dict(product.MACHINES[name]())
    survived = [bug for bug, caught in found.items() if not caught]
    _report(name, len(found), survived)
    return len(survived)


def _report(what: str, total: int, survived: Sequence[str]) -> None:
    print(f"{what:26}{total - len(survived):5} of {total:4} caught", flush=True)
    for name in sorted(survived):
        print(f"  survived: {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
