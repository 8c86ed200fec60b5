"""The remedies, one file each: `decide(facts) -> Step`, pure. An alert names its remedy in the label `remedy`.

To add one: a file here, its line in `REMEDIES`, a test in tests/remediator.
"""

from collections.abc import Callable, Mapping
from typing import Final

from remediator.plan import Facts, Step
from remediator.remedies import restart_worker

REMEDIES: Final[Mapping[str, Callable[[Facts], Step]]] = {"restart_worker": restart_worker.decide}
