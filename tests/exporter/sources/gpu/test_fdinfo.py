"""Parse and meter the fdinfo of a DRM client."""

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


def test_i915_has_the_time_of_each_engine_and_local_memory() -> None:
    found = fdinfo.parse(tree.i915(PCI, client=12, render_ns=5, video_ns=7, local_mib=3))

    assert found
    assert (found.driver, found.pci, found.number, found.local_bytes) == ("i915", PCI, 12, 3 * 2**20)
    assert found.engines == {
        "render": Engine(used=5),
        "copy": Engine(used=0),
        "video": Engine(used=7, capacity=2),
        "video-enhance": Engine(used=0),
    }


def test_xe_has_used_and_total_cycles() -> None:
    found = fdinfo.parse(tree.xe(PCI, cycles=28257900, total=7655183225))

    assert found
    assert found.local_bytes == 23992 * 2**10
    assert found.engines == {
        "rcs": Engine(used=28257900, total_cycles=7655183225),
        "ccs": Engine(used=0, total_cycles=7655183225, capacity=4),
    }


def test_amdgpu_omits_unused_engines() -> None:
    found = fdinfo.parse(tree.amdgpu(PCI, vram_kib=80, gfx=9))
    unused = fdinfo.parse(tree.amdgpu(PCI))

    assert found
    assert unused
    assert (found.engines, found.local_bytes, unused.engines) == ({"gfx": Engine(used=9)}, 80 * 2**10, {})


def test_engine_with_time_and_cycles_is_metered_by_time() -> None:
    found = fdinfo.parse("drm-driver: x\ndrm-client-id: 1\ndrm-engine-a: 5 ns\ndrm-cycles-a: 9\n")

    assert found
    assert found.engines == {"a": Engine(used=5)}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("pos:\t0\nflags:\t0100002\nmnt_id:\t26\n", id="other file"),
        pytest.param("drm-driver:\ti915\n", id="driver without client ids"),
        pytest.param("drm-client-id:\t3\n", id="client without a driver"),
        pytest.param("drm-driver:\ti915\ndrm-client-id:\t-3\n", id="negative client id"),
        pytest.param("", id="an empty file"),
    ],
)
def test_no_client_in(text: str) -> None:
    assert fdinfo.parse(text) is None


ENGINE = "drm-engine-render:\t5 ns"
MEMORY = "drm-resident-local0:\t5 KiB"


@pytest.mark.parametrize(
    ("engine", "memory", "unknown"),
    [
        pytest.param(ENGINE, MEMORY, set(), id="valid"),
        pytest.param("drm-engine-render:\t5", MEMORY, {"engines"}, id="time without a unit"),
        pytest.param("drm-engine-render:\t5 us", MEMORY, {"engines"}, id="time in another unit"),
        pytest.param("drm-engine-render:\tfive ns", MEMORY, {"engines"}, id="a word"),
        pytest.param("drm-engine-render:", MEMORY, {"engines"}, id="half a line"),
        pytest.param(f"{ENGINE}\ndrm-engine-capacity-render:\t0", MEMORY, {"engines"}, id="capacity of zero"),
        pytest.param("drm-cycles-rcs:\t5", MEMORY, {"engines"}, id="cycles without a total"),
        pytest.param("", MEMORY, {"engines"}, id="no engine"),
        pytest.param(ENGINE, "drm-resident-local0:\tfive KiB", {"local_bytes"}, id="memory is a word"),
        pytest.param(ENGINE, "drm-resident-local0:\t5 GiB", {"local_bytes"}, id="size in another unit"),
        pytest.param(ENGINE, "drm-resident-system0:\t5 KiB", {"local_bytes"}, id="only RAM of the host"),
    ],
)
def test_invalid_line_makes_only_its_value_unknown(engine: str, memory: str, unknown: set[str]) -> None:
    found = fdinfo.parse(f"drm-driver:\ti915\ndrm-client-id:\t3\n{engine}\n{memory}\n")

    assert found
    assert {name for name in ("engines", "local_bytes") if getattr(found, name) is None} == unknown


def test_resident_memory_overrides_the_older_key_and_regions_are_summed() -> None:
    lines = "drm-memory-vram0: 9\ndrm-resident-vram0: 5\ndrm-resident-vram1: 2 KiB\ndrm-memory-vram1: 1 KiB\n"
    found = fdinfo.parse(f"drm-driver: xe\ndrm-client-id: 3\n{lines}")

    assert found
    assert found.local_bytes == 5 + 2048


@pytest.mark.parametrize(
    ("before", "engines", "looked_s", "wanted"),
    [
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(2 * S), 9.0, 0.5, id="half of the time since the last read"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(2 * S, 2), 9.0, 0.25, id="one of two engines"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(S), 9.0, 0.0, id="no use"),
        pytest.param(Meter(read_s=8.0, engines=ns(S)), ns(S // 2), 9.0, 0.0, id="counter fell"),
        pytest.param(Meter(read_s=8.0, engines={}), ns(S), 9.0, 0.5, id="first use of an engine"),
        pytest.param(None, ns(S // 4), 9.0, 0.25, id="new client since the last sample"),
        pytest.param(None, ns(S), None, None, id="client with work before the first sample"),
        pytest.param(None, ns(0), None, 0.0, id="client without work"),
        pytest.param(Meter(read_s=10.0, engines=ns(0)), ns(S), 9.0, None, id="two reads at the same time"),
    ],
)
def test_engine_time_is_a_share_of_the_elapsed_time(
    before: Meter | None, engines: dict[str, Engine], looked_s: float | None, wanted: float | None
) -> None:
    shares = fdinfo.utilization(before, engines, now_s=10.0, looked_s=looked_s)

    assert shares == (None if wanted is None else {"render": wanted})


@pytest.mark.parametrize(
    ("before", "engines", "wanted"),
    [
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(350, 2000), 0.25, id="a quarter"),
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(100, 1000), 0.0, id="GPU asleep"),
        pytest.param(Meter(read_s=8.0, engines=cycles(100, 1000)), cycles(200, 900), None, id="cycles fell"),
        pytest.param(Meter(read_s=8.0, engines={}), cycles(200, 900), None, id="first read of an engine"),
        pytest.param(None, cycles(200, 900), None, id="new client with work"),
        pytest.param(None, cycles(0, 900), 0.0, id="new client without work"),
    ],
)
def test_cycles_are_a_share_of_total(before: Meter | None, engines: dict[str, Engine], wanted: float | None) -> None:
    shares = fdinfo.utilization(before, engines, now_s=10.0, looked_s=9.0)

    assert shares == (None if wanted is None else {"rcs": wanted})


def test_counter_that_fell_counts_no_work_twice() -> None:
    meter = fdinfo.advance(None, ns(2 * S), now_s=8.0)
    meter = fdinfo.advance(meter, ns(S), now_s=9.0)

    assert meter == Meter(read_s=9.0, engines=ns(2 * S))
    assert fdinfo.utilization(meter, ns(2 * S + S // 2), now_s=10.0, looked_s=9.0) == {"render": 0.5}


def test_engine_that_is_missing_once_is_not_forgotten() -> None:
    meter = fdinfo.advance(fdinfo.advance(None, ns(2 * S), now_s=8.0), {}, now_s=9.0)

    assert fdinfo.utilization(meter, ns(2 * S), now_s=10.0, looked_s=9.0) == {"render": 0.0}
