"""The remedy `recycle_container` as truth tables: the container to recycle, and the steps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.evidence import GpuMemoryFacts, VramShareFacts
from gpuwarden.job import Condition
from remediator.plan import (
    Advance,
    Begin,
    Close,
    Facts,
    Outcome,
    Stage,
    Start,
    Step,
    Stop,
    Subject,
    Wait,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Doubt
from remediator.remedies import REMEDIES
from remediator.remedies.recycle_container import CONFIRMABLE, RANKED_MAX, choose, confirm, decide
from tests.remediator.builders import (
    HANDLE,
    KEY,
    LIMITS,
    MIB,
    PIDS,
    REBORN,
    card,
    container,
    free,
    server,
    stopped,
    tenant,
    tenant_facts,
)

pytestmark = pytest.mark.pure

PLANNED = free(Stage.PLANNED)
STOPPING = free(Stage.STOPPING, tries=1)


def test_remedy_has_the_name_of_the_rules_and_is_about_vram() -> None:
    remedy = REMEDIES["recycle_container"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.TENANT)
    assert {Condition.VRAM} == CONFIRMABLE


# --- the container to recycle

CHOICES: dict[str, tuple[GpuMemoryFacts, str | None, Doubt | None]] = {
    "over its budget": (card(tenant()), KEY, None),
    "most over its budget, not the largest": (
        card(tenant("big", 9000, 8000), tenant("c1", 5000, 2000)), KEY, None
    ),
    "the largest is within its budget": (card(tenant("big", 9000, 9000), tenant("c1", 2500, 2000)), KEY, None),
    "one byte over": (card(tenant(used_bytes=2048 * MIB + 1)), KEY, None),
    "exactly at its budget": (card(tenant(used_mib=2048)), None, Doubt.NONE_OVER),
    "all under their budgets": (card(tenant(used_mib=100), tenant("d", 3, 5)), None, Doubt.NONE_OVER),
    "no container on the GPU": (card(), None, Doubt.NONE_OVER),
    "free memory at its floor": (card(tenant(), free_mib=1536), None, Doubt.ROOM),
    "free memory above its floor": (card(tenant(), free_mib=5000), None, Doubt.ROOM),
    "free memory one byte under its floor": (replace(card(tenant()), free_bytes=1536 * MIB - 1), KEY, None),
    "no free memory": (card(tenant(), free_mib=0), KEY, None),
    "enough free memory once returning memory is free": (
        card(tenant(), returning_mib=1136), None,
        Doubt.ROOM,
    ),
    "one byte too little once returning memory is free": (
        replace(card(tenant()), reclaiming_bytes=1136 * MIB - 1), KEY, None
    ),
    "returning memory unknown": (
        card(tenant(), returning_mib=None), None,
        Doubt.MEMORY_UNKNOWN,
    ),
    "returning memory unknown, enough free memory": (
        card(tenant(), free_mib=1536, returning_mib=None), None, Doubt.ROOM
    ),
    "free memory unknown": (card(tenant(), free_mib=None), None, Doubt.MEMORY_UNKNOWN),
    "a container without a budget": (card(tenant(budget_mib=None)), None, Doubt.NONE_OVER),
    "the largest has no budget": (
        card(tenant("no budget", 12_000, None), tenant("c1", 2100, 2000)), KEY, None
    ),
    "the most over may not be recycled": (
        card(tenant("safe", 9000, 1000, recyclable=False), tenant("c1", 2500, 2000)), KEY,
        None,
    ),
    "the only one over may not be recycled": (card(tenant(recyclable=False)), None, Doubt.NONE_OVER),
    "its memory is unknown": (card(tenant(used_mib=None)), None, Doubt.RANKING_UNKNOWN),
    "memory of another is unknown": (card(tenant(), tenant("x", None, 9000)), None, Doubt.RANKING_UNKNOWN),
    "memory of another without a budget is unknown": (
        card(tenant(), tenant("x", None, None)), KEY, None
    ),
    "memory of another that may not be recycled is unknown": (
        card(tenant(), tenant("x", None, 9000, recyclable=False)), KEY, None
    ),
    "a tie: the first by name": (
        card(tenant("c1", 3000, 2000), tenant("z", 3256, 2000)), KEY, None
    ),
    "less over, by more than a tie": (
        card(tenant("a", 2743, 2000), tenant("c1", 3000, 2000)), KEY, None
    ),
    "equal to the byte: the first by name": (card(tenant("c1", 3000, 2000), tenant("z", 3500, 2500)), KEY, None),
    "equal to the byte, in another order": (card(tenant("z", 3500, 2500), tenant("c1", 3000, 2000)), KEY, None),
    "a tie with one not over": (card(tenant("a", 2000, 2000), tenant("c1", 2001, 2000)), KEY, None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "victim", "doubt"), CHOICES.values(), ids=CHOICES)
def test_container_most_over_its_budget_is_chosen(
    seen: GpuMemoryFacts, victim: str | None, doubt: Doubt | None
) -> None:
    choice = choose(seen)

    assert (choice.victim, choice.doubt) == (victim, doubt)


def test_message_ranks_containers_and_counts_the_rest() -> None:
    containers = [tenant(f"t{number:02}", 100 + number, 50) for number in range(RANKED_MAX)]

    message = choose(card(*containers, tenant(), tenant("idle", 7, None))).message

    assert message.startswith("c1 is most over its budget")
    assert message.index("c1 10957 MiB of 2048 MiB (+8909)") < message.index("t23 123") < message.index("t01 101")
    assert message.endswith("(+51), and 2 more")
    assert len(message) < 2000


def names() -> st.SearchStrategy[VramShareFacts]:
    size = st.none() | st.integers(0, 20_000)
    return st.builds(tenant, st.sampled_from("abcdefgh"), size, size, recyclable=st.booleans())


@given(
    tenants=st.lists(names(), unique_by=lambda each: each.container, max_size=8),
    free_mib=st.none() | st.integers(0, 3000),
)
def test_only_the_most_over_is_recycled_under_the_floor(tenants: list[VramShareFacts], free_mib: int | None) -> None:
    seen = card(*tenants, free_mib=free_mib)

    victim = choose(seen).victim

    over = {
        each.incarnation: each.used_bytes - each.budget_bytes
        for each in tenants
        if each.recyclable and each.budget_bytes is not None and each.used_bytes is not None
    }
    unknown_memory = any(
        each.recyclable and each.budget_bytes is not None and each.used_bytes is None for each in tenants
    )
    short = free_mib is not None and free_mib < 1536
    assert (victim is not None) == (short and not unknown_memory and any(by > 0 for by in over.values()))
    if victim is not None:
        assert 0 < over[victim] >= max(over.values()) - seen.tie_bytes
        assert choose(card(*reversed(tenants), free_mib=free_mib)).victim == victim


# --- confirmation

BOTH_LISTED: dict[str, list[int] | None] = {"GPU-0": [], "GPU-1": []}

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "it is chosen": ({"cards": [card(tenant())]}, None),
    "it is chosen on one of its GPUs": (
        {"cards": [card(tenant(used_mib=1), gpu="GPU-1", free_mib=9000), card(tenant())], "gpu_pids": BOTH_LISTED},
        None,
    ),
    "another is chosen": ({"cards": [card(tenant(), tenant("x", 15_000, 1000))]}, Doubt.OTHER_VICTIM),
    "another is chosen on another GPU": (
        {"cards": [card(tenant("x", 15_000, 1000))]}, Doubt.NO_MEMORY_HELD
    ),
    "enough free memory": ({"cards": [card(tenant(), free_mib=9000)]}, Doubt.ROOM),
    "GPU memory unknown": ({"cards": None}, Doubt.MEMORY_UNKNOWN),
    "it is on no GPU": ({"cards": []}, Doubt.NO_MEMORY_HELD),
    "processes of another GPU unknown": (
        {"cards": [card(tenant()), card(tenant(used_mib=None), gpu="GPU-1")], "gpu_pids": {"GPU-0": [], "GPU-1": None}},
        None,
    ),
    "processes of one of its GPUs unknown": (
        {"cards": [card(tenant())], "gpus": ["GPU-0", "GPU-1"], "gpu_pids": {"GPU-0": [], "GPU-1": None}},
        Doubt.PROCESSES_UNKNOWN,
    ),
    "it has an unidentified GPU": (
        {"cards": [card(tenant())], "nameless_gpus": ["7"]},
        Doubt.PROCESSES_UNKNOWN,
    ),
    "its engine does not list another": (
        {"cards": [card(tenant())], "unseen": ["x", "a"]},
        Doubt.RANKING_UNKNOWN,
    ),
    "its engine does not list another, enough free memory": (
        {"cards": [card(tenant(), free_mib=9000)], "unseen": ["x"]}, Doubt.ROOM
    ),
    "processes of all GPUs unknown": ({"cards": [card(tenant())], "gpu_pids": None}, Doubt.PROCESSES_UNKNOWN),
    "a simulated GPU": ({"cards": [card(tenant())], "gpu_simulated": True}, None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_recycle_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(server(**seen), KEY).doubt is doubt


def test_recycle_without_an_incarnation_is_never_confirmed() -> None:
    assert confirm(server(cards=[card(tenant())]), None).doubt is Doubt.NO_MEMORY_HELD


# --- steps

ENOUGH_FREE = server(cards=[card(tenant(), free_mib=9000)])
OTHER = server(cards=[card(tenant(), tenant("x", 15_000, 1000))])
LATE = {"free_for_s": LIMITS.restart_timeout_s}
DEAD_AND_GONE = server(
    container_id=None, container_incarnation=None, gpu_pids={"GPU-0": []}, cards=[card(free_mib=11_357)]
)

STEPS: dict[str, tuple[Facts, type[Step]]] = {
    "confirmed": (tenant_facts(), Begin),
    "confirmed, dry run": (tenant_facts(armed=False), WouldAct),
    "enough free memory": (tenant_facts(server=ENOUGH_FREE), Wait),
    "another is chosen": (tenant_facts(server=OTHER), Wait),
    "no evidence": (tenant_facts(server=None), Wait),
    "it has workers": (tenant_facts(server=server(workers=1, cards=[card(tenant())])), Close),
    "its workers are unknown": (tenant_facts(server=server(workers=None, cards=[card(tenant())])), Wait),
    "its engine reports no opt-in": (tenant_facts(container=container(managed=False)), Close),
    "it was restarted since": (
        tenant_facts(server=server(container_incarnation=REBORN), container=container(incarnation=REBORN)), Close
    ),
    "planned, confirmed": (tenant_facts(PLANNED), Stop),
    "planned, enough free memory": (tenant_facts(PLANNED, server=ENOUGH_FREE), Wait),
    "planned, enough free memory past the timeout": (tenant_facts(PLANNED, server=ENOUGH_FREE, **LATE), Withdraw),
    "planned, disarmed": (tenant_facts(PLANNED, armed=False), Wait),
    "stopping, confirmed": (tenant_facts(STOPPING), Stop),
    "stopping, enough free memory": (tenant_facts(STOPPING, server=ENOUGH_FREE), Wait),
    "stopped, listed by the driver": (tenant_facts(STOPPING, container=stopped()), Wait),
    "stopped, off its GPU": (tenant_facts(STOPPING, container=stopped(), server=DEAD_AND_GONE), Advance),
    "dead": (tenant_facts(free(Stage.DEAD, tries=1), container=stopped(), server=DEAD_AND_GONE), Start),
    "done": (tenant_facts(free(Stage.DONE)), Close),
}  # fmt: skip


@pytest.mark.parametrize(("known", "step"), STEPS.values(), ids=STEPS)
def test_next_step(known: Facts, step: type[Step]) -> None:
    assert type(decide(known)) is step


def test_begin_has_the_ranking_and_no_job() -> None:
    step = decide(tenant_facts())

    assert isinstance(step, Begin)
    assert (step.condition, step.free_key, step.settle_key, step.container_handle) == (
        Condition.VRAM,
        KEY,
        None,
        HANDLE,
    )
    assert (step.gpus, step.pids) == (("GPU-0",), PIDS)
    assert step.message.endswith("c1 10957 MiB of 2048 MiB (+8909)")


def test_exit_message_has_the_free_memory() -> None:
    step = decide(STEPS["stopped, off its GPU"][0])

    assert isinstance(step, Advance)
    assert step.stage is Stage.DEAD
    assert step.message.endswith("; 11357 MiB free on GPU-0, the floor is 1536 MiB")


def test_exit_message_has_only_its_own_gpus() -> None:
    every = replace(DEAD_AND_GONE, cards=[card(free_mib=11_357), card(gpu="GPU-1")])

    step = decide(tenant_facts(STOPPING, container=stopped(), server=every))

    assert isinstance(step, Advance)
    assert "GPU-1" not in step.message


def test_exit_without_gpu_memory_is_confirmed() -> None:
    step = decide(tenant_facts(STOPPING, container=stopped(), server=replace(DEAD_AND_GONE, cards=None)))

    assert isinstance(step, Advance)
    assert step.message.endswith("do not list its pids")


def test_exit_message_names_unknown_free_memory() -> None:
    silent = replace(DEAD_AND_GONE, cards=[card(free_mib=None)])

    step = decide(tenant_facts(STOPPING, container=stopped(), server=silent))

    assert isinstance(step, Advance)
    assert "an unknown amount free on GPU-0" in step.message


def test_begin_has_the_gpus_on_which_the_container_holds_memory() -> None:
    seen = server(
        gpus=[],
        cards=[
            card(tenant()),
            card(tenant(used_mib=0), gpu="GPU-1"),
            card(tenant("x"), gpu="GPU-2"),
            card(tenant(used_mib=None), gpu="GPU-3"),
        ],
    )

    step = decide(tenant_facts(server=seen))

    assert isinstance(step, Begin)
    assert step.gpus == ("GPU-0",)


def test_resolved_alert_closes_an_unconfirmed_episode() -> None:
    known = tenant_facts(server=ENOUGH_FREE)

    step = decide(replace(known, episode=replace(known.episode, firing=False)))

    assert isinstance(step, Close)
    assert step.outcome is Outcome.UNCONFIRMED
