"""The remedy for VRAM as truth tables: who is recycled, who never is, and what is only waited for."""

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


def test_the_remedy_is_found_by_the_name_that_rules_use_and_is_about_tenants() -> None:
    remedy = REMEDIES["recycle_container"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.TENANT)
    assert {Condition.VRAM} == CONFIRMABLE


# --- whose turn it is

CHOICES: dict[str, tuple[GpuMemoryFacts, str | None, Doubt | None]] = {
    "the one over its budget": (card(tenant()), KEY, None),
    "the most over, and not the greatest": (
        card(tenant("big", 9000, 8000), tenant("c1", 5000, 2000)), KEY, None
    ),
    "the greatest is within its budget": (card(tenant("big", 9000, 9000), tenant("c1", 2500, 2000)), KEY, None),
    "a byte over": (card(tenant(used_bytes=2048 * MIB + 1)), KEY, None),
    "exactly at its budget": (card(tenant(used_mib=2048)), None, Doubt.NONE_OVER),
    "everybody under budget": (card(tenant(used_mib=100), tenant("d", 3, 5)), None, Doubt.NONE_OVER),
    "nobody is on it": (card(), None, Doubt.NONE_OVER),
    "free memory at its floor": (card(tenant(), free_mib=1536), None, Doubt.ROOM),
    "a burst into slack": (card(tenant(), free_mib=5000), None, Doubt.ROOM),
    "a byte under its floor": (replace(card(tenant()), free_bytes=1536 * MIB - 1), KEY, None),
    "nothing free at all": (card(tenant(), free_mib=0), KEY, None),
    "there is room once what has left is back": (
        card(tenant(), returning_mib=1136), None,
        Doubt.ROOM,
    ),
    "a byte too little once what has left is back": (
        replace(card(tenant()), reclaiming_bytes=1136 * MIB - 1), KEY, None
    ),
    "what has left is unknown": (
        card(tenant(), returning_mib=None), None,
        Doubt.MEMORY_UNKNOWN,
    ),
    "what has left is unknown, and there is room": (
        card(tenant(), free_mib=1536, returning_mib=None), None, Doubt.ROOM
    ),
    "free memory is unknown": (card(tenant(), free_mib=None), None, Doubt.MEMORY_UNKNOWN),
    "no budget is no offence": (card(tenant(budget_mib=None)), None, Doubt.NONE_OVER),
    "the one without a budget holds most": (
        card(tenant("free rider", 12_000, None), tenant("c1", 2100, 2000)), KEY, None
    ),
    "the most over is protected, or did not opt in": (
        card(tenant("safe", 9000, 1000, recyclable=False), tenant("c1", 2500, 2000)), KEY,
        None,
    ),
    "the only one over is protected": (card(tenant(recyclable=False)), None, Doubt.NONE_OVER),
    "what it holds is unknown": (card(tenant(used_mib=None)), None, Doubt.RANKING_UNKNOWN),
    "what another holds is unknown": (card(tenant(), tenant("x", None, 9000)), None, Doubt.RANKING_UNKNOWN),
    "unknown, and without a budget": (
        card(tenant(), tenant("x", None, None)), KEY, None
    ),
    "unknown, and protected": (
        card(tenant(), tenant("x", None, 9000, recyclable=False)), KEY, None
    ),
    "level, and the first by name": (
        card(tenant("c1", 3000, 2000), tenant("z", 3256, 2000)), KEY, None
    ),
    "less over by more than a tie": (
        card(tenant("a", 2743, 2000), tenant("c1", 3000, 2000)), KEY, None
    ),
    "level to the byte: the first by name": (card(tenant("c1", 3000, 2000), tenant("z", 3500, 2500)), KEY, None),
    "level to the byte, in another order": (card(tenant("z", 3500, 2500), tenant("c1", 3000, 2000)), KEY, None),
    "level, but not over": (card(tenant("a", 2000, 2000), tenant("c1", 2001, 2000)), KEY, None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "victim", "doubt"), CHOICES.values(), ids=CHOICES)
def test_who_is_recycled(seen: GpuMemoryFacts, victim: str | None, doubt: Doubt | None) -> None:
    choice = choose(seen)

    assert (choice.victim, choice.doubt) == (victim, doubt)


def test_the_reason_ranks_everybody_and_says_how_many_it_leaves_out() -> None:
    crowd = [tenant(f"t{number:02}", 100 + number, 50) for number in range(RANKED_MAX)]

    because = choose(card(*crowd, tenant(), tenant("idle", 7, None))).message

    assert because.startswith("c1 is most over its budget")
    assert because.index("c1 10957 MiB of 2048 MiB (+8909)") < because.index("t23 123") < because.index("t01 101")
    assert because.endswith("(+51), and 2 more")
    assert len(because) < 2000


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
    blind = any(each.recyclable and each.budget_bytes is not None and each.used_bytes is None for each in tenants)
    short = free_mib is not None and free_mib < 1536
    assert (victim is not None) == (short and not blind and any(by > 0 for by in over.values()))
    if victim is not None:
        assert 0 < over[victim] >= max(over.values()) - seen.tie_bytes
        assert choose(card(*reversed(tenants), free_mib=free_mib)).victim == victim


# --- what confirms the accused

BOTH_LISTED: dict[str, list[int] | None] = {"GPU-0": [], "GPU-1": []}

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "it is the one": ({"cards": [card(tenant())]}, None),
    "on one of its GPUs": (
        {"cards": [card(tenant(used_mib=1), gpu="GPU-1", free_mib=9000), card(tenant())], "gpu_pids": BOTH_LISTED},
        None,
    ),
    "another one is": ({"cards": [card(tenant(), tenant("x", 15_000, 1000))]}, Doubt.OTHER_VICTIM),
    "another one is, on a GPU that it has no part in": (
        {"cards": [card(tenant("x", 15_000, 1000))]}, Doubt.NO_MEMORY_HELD
    ),
    "there is room by now": ({"cards": [card(tenant(), free_mib=9000)]}, Doubt.ROOM),
    "no GPU is read": ({"cards": None}, Doubt.MEMORY_UNKNOWN),
    "it is on none": ({"cards": []}, Doubt.NO_MEMORY_HELD),
    "another GPU than its own lists no processes": (
        {"cards": [card(tenant()), card(tenant(used_mib=None), gpu="GPU-1")], "gpu_pids": {"GPU-0": [], "GPU-1": None}},
        None,
    ),
    "a GPU of its own lists no processes": (
        {"cards": [card(tenant())], "gpus": ["GPU-0", "GPU-1"], "gpu_pids": {"GPU-0": [], "GPU-1": None}},
        Doubt.PROCESSES_UNKNOWN,
    ),
    "it was given a GPU that nobody knows": (
        {"cards": [card(tenant())], "nameless_gpus": ["7"]},
        Doubt.PROCESSES_UNKNOWN,
    ),
    "its engine does not tell of another": (
        {"cards": [card(tenant())], "unseen": ["x", "a"]},
        Doubt.RANKING_UNKNOWN,
    ),
    "its engine does not tell of another, and there is room": (
        {"cards": [card(tenant(), free_mib=9000)], "unseen": ["x"]}, Doubt.ROOM
    ),
    "of no GPU processes are told": ({"cards": [card(tenant())], "gpu_pids": None}, Doubt.PROCESSES_UNKNOWN),
    "a simulated GPU says so": ({"cards": [card(tenant())], "gpu_simulated": True}, None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_what_confirms_that_it_is_its_turn(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(server(**seen), KEY).doubt is doubt


def test_no_accused_is_nobody() -> None:
    assert confirm(server(cards=[card(tenant())]), None).doubt is Doubt.NO_MEMORY_HELD


# --- the steps

ROOM = server(cards=[card(tenant(), free_mib=9000)])
OTHER = server(cards=[card(tenant(), tenant("x", 15_000, 1000))])
LATE = {"free_for_s": LIMITS.restart_timeout_s}
DEAD_AND_GONE = server(
    container_id=None, container_incarnation=None, gpu_pids={"GPU-0": []}, cards=[card(free_mib=11_357)]
)

STEPS: dict[str, tuple[Facts, type[Step]]] = {
    "its turn": (tenant_facts(), Begin),
    "its turn, in a dry run": (tenant_facts(armed=False), WouldAct),
    "room again": (tenant_facts(server=ROOM), Wait),
    "another's turn": (tenant_facts(server=OTHER), Wait),
    "nobody looked": (tenant_facts(server=None), Wait),
    "workers live in it": (tenant_facts(server=server(workers=1, cards=[card(tenant())])), Close),
    "whether workers do is unknown": (tenant_facts(server=server(workers=None, cards=[card(tenant())])), Wait),
    "it did not opt in, says its engine": (tenant_facts(container=container(managed=False)), Close),
    "it was restarted since": (
        tenant_facts(server=server(container_incarnation=REBORN), container=container(incarnation=REBORN)), Close
    ),
    "promised, and its turn still": (tenant_facts(PLANNED), Stop),
    "promised, and room again": (tenant_facts(PLANNED, server=ROOM), Wait),
    "promised, and room for longer than patience lasts": (tenant_facts(PLANNED, server=ROOM, **LATE), Withdraw),
    "promised, and disarmed since": (tenant_facts(PLANNED, armed=False), Wait),
    "told to stop, it runs, and its turn still": (tenant_facts(STOPPING), Stop),
    "told to stop, it runs, and room again": (tenant_facts(STOPPING, server=ROOM), Wait),
    "stopped, and the driver lists it still": (tenant_facts(STOPPING, container=stopped()), Wait),
    "stopped, and off its GPU": (tenant_facts(STOPPING, container=stopped(), server=DEAD_AND_GONE), Advance),
    "seen dead": (tenant_facts(free(Stage.DEAD, tries=1), container=stopped(), server=DEAD_AND_GONE), Start),
    "done": (tenant_facts(free(Stage.DONE)), Close),
}  # fmt: skip


@pytest.mark.parametrize(("known", "step"), STEPS.values(), ids=STEPS)
def test_what_comes_next_when_it_is(known: Facts, step: type[Step]) -> None:
    assert type(decide(known)) is step


def test_it_is_begun_with_the_whole_ranking_and_without_a_job() -> None:
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


def test_what_is_seen_dead_tells_what_is_free_then() -> None:
    step = decide(STEPS["stopped, and off its GPU"][0])

    assert isinstance(step, Advance)
    assert step.stage is Stage.DEAD
    assert step.message.endswith("; 11357 MiB free on GPU-0, the floor is 1536 MiB")


def test_what_is_seen_dead_tells_nothing_of_gpus_that_it_was_not_on() -> None:
    every = replace(DEAD_AND_GONE, cards=[card(free_mib=11_357), card(gpu="GPU-1")])

    step = decide(tenant_facts(STOPPING, container=stopped(), server=every))

    assert isinstance(step, Advance)
    assert "GPU-1" not in step.message


def test_what_is_seen_dead_where_no_memory_is_told_of_is_dead_all_the_same() -> None:
    step = decide(tenant_facts(STOPPING, container=stopped(), server=replace(DEAD_AND_GONE, cards=None)))

    assert isinstance(step, Advance)
    assert step.message.endswith("do not list its pids")


def test_free_memory_that_nobody_tells_is_said_to_be_unknown() -> None:
    silent = replace(DEAD_AND_GONE, cards=[card(free_mib=None)])

    step = decide(tenant_facts(STOPPING, container=stopped(), server=silent))

    assert isinstance(step, Advance)
    assert "an unknown amount free on GPU-0" in step.message


def test_the_gpus_that_must_let_go_of_it_are_those_that_it_was_seen_on_too() -> None:
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


def test_the_alert_that_ends_closes_what_was_never_confirmed() -> None:
    known = tenant_facts(server=ROOM)

    step = decide(replace(known, episode=replace(known.episode, firing=False)))

    assert isinstance(step, Close)
    assert step.outcome is Outcome.UNCONFIRMED
