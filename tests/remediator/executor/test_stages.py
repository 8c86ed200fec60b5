"""The stages that a decided step passes."""

from typing import cast

import pytest

from remediator import plan
from remediator.clients.alertmanager import SilenceResult, Silences
from remediator.executor.limits import RemedyLimits
from remediator.executor.stages import CheckSilences
from remediator.plan import Facts
from remediator.reasons import Reason
from remediator.remedies.guards import Silence
from tests.remediator.builders import KEY, LIMITS, facts, held_job, host_facts, run_facts, server_facts, tenant_facts
from tests.remediator.executor.builders import BOUNDLESS


class Silenced:
    """An Alertmanager that silences every alert."""

    def of(self, _fingerprints: frozenset[str], *, host: str) -> SilenceResult:
        return SilenceResult(silences=[Silence(silence_id="s1", by="ann", comment=f"{host} moves")])


SUBJECTS = {
    "worker": facts(),
    "server": server_facts(),
    "container over its VRAM budget": tenant_facts(),
    "lost host": host_facts(held_job()),
    "run": run_facts(None),
}


@pytest.mark.parametrize("found", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_silence_replaces_the_request_for_approval(found: Facts) -> None:
    limits = RemedyLimits(None, limits=LIMITS, safety_limits=BOUNDLESS)
    asks = plan.Wait(reason=Reason.APPROVAL, message="an operator must approve", asks=KEY)

    step = CheckSilences(cast("Silences", Silenced()), limits=limits)(found, asks)

    assert isinstance(step, plan.Wait)
    assert (step.reason, step.asks) == (Reason.SILENCED, None)
    assert CheckSilences(None, limits=limits)(found, asks) is asks
