"""What a DRM driver says of an open file, read and metered."""

import pytest

from exporter.sources.gpu.drm import fdinfo
from exporter.sources.gpu.drm.fdinfo import Engine, Meter
from tests.exporter.sources.gpu import gpu_tree as tree

pytestmark = pytest.mark.pure

PCI = "0000:03:00.0"
S = 10**9


def ns(used: int, capacity: int = 1) -> dict[str, Engine]:
    return {"render": Engine(used=used, capacity=capacity)}


def cycles(used: int, total: int) -> dict[str, Engine]:
    return {"rcs": Engine(used=used, total_cycles=total)}


def test_i915_tells_its_client_the_time_of_each_engine_and_the_gpus_own_memory() -> None:
    found = fdinfo.parse(tree.i915(PCI, client=12, render_ns=5, video_ns=7, local_mib=3))

    assert found
    assert (found.driver, found.pci, found.number, found.local_bytes) == ("i915", PCI, 12, 3 * 2**20)
    assert found.engines == {
        "render": Engine(used=5),
        "copy": Engine(used=0),
        "video": Engine(used=7, capacity=2),
        "video-enhance": Engine(used=0),
    }


def test_xe_tells_cycles_and_those_that_passed() -> None:
    found = fdinfo.parse(tree.xe(PCI, cycles=28257900, total=7655183225))

    assert found
    assert found.local_bytes == 23992 * 2**10
    assert found.engines == {
        "rcs": Engine(used=28257900, total_cycles=7655183225),
        "ccs": Engine(used=0, total_cycles=7655183225, capacity=4),
    }


def test_amdgpu_leaves_out_what_was_never_used() -> None:
    found = fdinfo.parse(tree.amdgpu(PCI, vram_kib=80, gfx=9))
    unused = fdinfo.parse(tree.amdgpu(PCI))

    assert found
    assert unused
    assert (found.engines, found.local_bytes, unused.engines) == ({"gfx": Engine(used=9)}, 80 * 2**10, {})


def test_an_engine_that_tells_time_and_cycles_is_metered_by_its_time() -> None:
    found = fdinfo.parse("drm-driver: x\ndrm-client-id: 1\ndrm-engine-a: 5 ns\ndrm-cycles-a: 9\n")

    assert found
    assert found.engines == {"a": Engine(used=5)}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("pos:\t0\nflags:\t0100002\nmnt_id:\t26\n", id="an open file of something else"),
        pytest.param("drm-driver:\ti915\n", id="a driver that does not number its clients"),
        pytest.param("drm-client-id:\t3\n", id="a client of nobody"),
        pytest.param("drm-driver:\ti915\ndrm-client-id:\t-3\n", id="a number that is none"),
        pytest.param("", id="an empty file"),
    ],
)
def test_nothing_is_told_by(text: str) -> None:
    assert fdinfo.parse(text) is None


ENGINE = "drm-engine-render:\t5 ns"
MEMORY = "drm-resident-local0:\t5 KiB"


@pytest.mark.parametrize(
    ("engine", "memory", "unknown"),
    [
        pytest.param(ENGINE, MEMORY, set(), id="nothing, where all is well"),
        pytest.param("drm-engine-render:\t5", MEMORY, {"engines"}, id="a time without its unit"),
        pytest.param("drm-engine-render:\t5 us", MEMORY, {"engines"}, id="a time in another unit"),
        pytest.param("drm-engine-render:\tfive ns", MEMORY, {"engines"}, id="a word"),
        pytest.param("drm-engine-render:", MEMORY, {"engines"}, id="half a line"),
        pytest.param(f"{ENGINE}\ndrm-engine-capacity-render:\t0", MEMORY, {"engines"}, id="a kind of no engines"),
        pytest.param("drm-cycles-rcs:\t5", MEMORY, {"engines"}, id="cycles of nothing"),
        pytest.param("", MEMORY, {"engines"}, id="no engine at all"),
        pytest.param(ENGINE, "drm-resident-local0:\tfive KiB", {"local_bytes"}, id="a word of memory"),
        pytest.param(ENGINE, "drm-resident-local0:\t5 GiB", {"local_bytes"}, id="a size in another unit"),
        pytest.param(ENGINE, "drm-resident-system0:\t5 KiB", {"local_bytes"}, id="the host's RAM alone"),
    ],
)
def test_it_costs_its_own_figure_alone(engine: str, memory: str, unknown: set[str]) -> None:
    found = fdinfo.parse(f"drm-driver:\ti915\ndrm-client-id:\t3\n{engine}\n{memory}\n")

    assert found
    assert {name for name in ("engines", "local_bytes") if getattr(found, name) is None} == unknown


def test_resident_memory_wins_over_the_older_word_and_regions_add_up() -> None:
    lines = "drm-memory-vram0: 9\ndrm-resident-vram0: 5\ndrm-resident-vram1: 2 KiB\ndrm-memory-vram1: 1 KiB\n"
    found = fdinfo.parse(f"drm-driver: xe\ndrm-client-id: 3\n{lines}")

    assert found
    assert found.local_bytes == 5 + 2048


@pytest.mark.parametrize(
    ("before", "engines", "looked_s", "wanted"),
    [
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(2 * S), 9.0, 0.5, id="half of the time since it was read"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(2 * S, 2), 9.0, 0.25, id="of one of two engines"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(S), 9.0, 0.0, id="nothing"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(S // 2), 9.0, 0.0, id="a counter that fell behind"),
        pytest.param(Meter(read_s=8.0, engines={}), ns(S), 9.0, 0.5, id="the first use of an engine"),
        pytest.param(None, ns(S // 4), 9.0, 0.25, id="a new client, since the last look"),
        pytest.param(None, ns(S), None, None, id="a client that worked before the first look"),
        pytest.param(None, ns(0), None, 0.0, id="a client that has never worked"),
        pytest.param(Meter(read_s=10.0, engines=ns(0)), ns(S), 9.0, None, id="two readings at one moment"),
    ],
)
def test_time_on_an_engine_is_a_share_of_the_time_between(
    before: Meter | None, engines: dict[str, Engine], looked_s: float | None, wanted: float | None
) -> None:
    shares = fdinfo.utilization(before, engines, now_s=10.0, looked_s=looked_s)

    assert shares == (None if wanted is None else {"render": wanted})


@pytest.mark.parametrize(
    ("before", "engines", "wanted"),
    [
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(350, 2000), 0.25, id="a quarter"),
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(100, 1000), 0.0, id="a GPU that slept"),
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(200, 900), None, id="cycles that went back"),
        pytest.param(Meter(read_s=8.0, engines={}), cycles(200, 900), None, id="the first reading of an engine"),
        pytest.param(None, cycles(200, 900), None, id="a new client that has worked"),
        pytest.param(None, cycles(0, 900), 0.0, id="a new client that has not"),
    ],
)
def test_cycles_are_shares(before: Meter | None, engines: dict[str, Engine], wanted: float | None) -> None:
    shares = fdinfo.utilization(before, engines, now_s=10.0, looked_s=9.0)

    assert shares == (None if wanted is None else {"rcs": wanted})


def test_a_counter_that_falls_behind_counts_nothing_twice_once_it_has_caught_up() -> None:
    meter = fdinfo.advance(None, ns(2 * S), now_s=8.0)
    meter = fdinfo.advance(meter, ns(S), now_s=9.0)

    assert meter == Meter(read_s=9.0, engines=ns(2 * S))
    assert fdinfo.utilization(meter, ns(2 * S + S // 2), now_s=10.0, looked_s=9.0) == {"render": 0.5}


def test_an_engine_that_is_not_told_for_once_is_not_forgotten() -> None:
    meter = fdinfo.advance(fdinfo.advance(None, ns(2 * S), now_s=8.0), {}, now_s=9.0)

    assert fdinfo.utilization(meter, ns(2 * S), now_s=10.0, looked_s=9.0) == {"render": 0.0}
