"""Which GPUs and how much of them a container uses, by the process lists of the drivers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence import gpu_attribution
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import attribute_gpus
from exporter.model.container import ContainerEvidence, GpuShare, RamUse
from exporter.model.gpu import Gpu, GpuProcess, GpuReadings, MigInstance
from exporter.model.unknown import Unknown
from tests.exporter import builders as build
from tests.exporter.evidence.values import OTHER_PID, OWN, THRESHOLDS, ram

pytestmark = pytest.mark.pure

# Attribution


def attributed(
    *found: Gpu, request: tuple[str, ...] | None = ("all",), pids: frozenset[int] | None = OWN
) -> tuple[float | None, str | None]:
    """The container's utilisation, or the reason why it is unknown."""
    result = attribute_gpus(
        build.container(gpu_request=request), pids, GpuReadings(source="test", gpus=found), THRESHOLDS
    )
    return result.utilization_ratio, result.unknown.reason if result.unknown else None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([build.gpu(0)], (0.0, None), id="no process listed: measured 0"),
        pytest.param([build.gpu(0, build.process(OTHER_PID, 0.9))], (0.0, None), id="work of another container"),
        pytest.param(
            [build.gpu(0, build.process(4001, 0.2), build.process(4002, 0.3), build.process(OTHER_PID, 0.4))],
            (0.5, None),
            id="sum of its processes",
        ),
        pytest.param(
            [build.gpu(0, build.process(4001, 0.8), build.process(4002, 0.9), utilization_ratio=1.0)],
            (1.0, None),
            id="a sum over 1 counts as 1",
        ),
        pytest.param([build.gpu(0), build.gpu(1, build.process(4001, 0.7))], (0.7, None), id="busiest of its GPUs"),
        pytest.param(
            [build.gpu(0), build.gpu(1, processes=None)],
            (None, "not_listed"),
            id="one of two GPUs unlisted",
        ),
        pytest.param(
            [build.gpu(0), build.gpu(1, build.process(4001, None))],
            (None, "not_measured"),
            id="its process is unmeasured",
        ),
        pytest.param(
            [build.gpu(0, build.process(OTHER_PID, None))],
            (None, "not_measured"),
            id="unmeasured process of another could hide its child",
        ),
        pytest.param([build.gpu(0, utilization_ratio=None)], (None, "not_measured"), id="GPU unmeasured"),
        pytest.param(
            [build.gpu(0, utilization_ratio=0.06)], (None, "unattributed"), id="unattributed work above the idle ratio"
        ),
        pytest.param([build.gpu(0, utilization_ratio=0.05)], (0.0, None), id="unattributed work at the idle ratio"),
        pytest.param(
            [build.gpu(0, build.process(OTHER_PID, 0.85), utilization_ratio=0.9)],
            (0.0, None),
            id="0.90 - 0.85 is not over 0.05",
        ),
        pytest.param([], (None, "gpu_missing"), id="host without GPUs"),
    ],
)
def test_utilisation_of_a_container_with_all_gpus(found: list[Gpu], expected: tuple[float | None, str | None]) -> None:
    assert attributed(*found) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(("all",), (0.25, None), id="all"),
        pytest.param(("0",), (0.25, None), id="by index"),
        pytest.param(("GPU-0",), (0.25, None), id="by UUID"),
        pytest.param(("0", "GPU-0", "0"), (0.25, None), id="one GPU named three times"),
        pytest.param(("0", "7"), (None, "gpu_missing"), id="an unreported index"),
        pytest.param(("GPU-0", "MIG-1"), (None, "gpu_missing"), id="an unreported partition"),
        pytest.param(None, (0.25, None), id="none: the GPU that lists its process"),
    ],
)
def test_requested_gpus_are_attributed(
    request_: tuple[str, ...] | None, expected: tuple[float | None, str | None]
) -> None:
    mine, another = build.process(4001, 0.25), build.process(OTHER_PID, 0.9)

    assert attributed(build.gpu(0, mine), build.gpu(1, another), request=request_) == expected


NVIDIA = build.gpu(0, build.process(4001, 0.25))
AMD = build.gpu(0, uuid="GPU-amd", node="renderD128", attribution="device")
INTEL = build.gpu(1, uuid="pci-0000:00:02.0", node="renderD129")


@pytest.mark.parametrize(
    ("request_", "gpus"),
    [
        pytest.param(("all",), ("GPU-0",), id="all: every NVIDIA GPU"),
        pytest.param(("0",), ("GPU-0",), id="index of an NVIDIA GPU"),
        pytest.param(
            ("renderD129",), ("GPU-0", "pci-0000:00:02.0"), id="render node, and the GPU that lists its process"
        ),
        pytest.param(("GPU-amd",), ("GPU-0", "GPU-amd"), id="UUID of any vendor"),
        pytest.param(("dri",), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="folder of all nodes"),
        pytest.param(("0", "dri"), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="index and all nodes"),
        pytest.param(("all", "dri"), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="every GPU of all vendors"),
        pytest.param(("all", "renderD130"), ("GPU-0",), id="all, and a node of an NVIDIA GPU"),
        pytest.param(("0", "renderD130"), ("GPU-0",), id="index, and the node of that GPU"),
    ],
)
def test_gpus_with_a_render_node_are_matched_by_it(request_: tuple[str, ...], gpus: tuple[str, ...]) -> None:
    found = attribute_gpus(build.container(gpu_request=request_), OWN, build.gpus(NVIDIA, AMD, INTEL), THRESHOLDS)

    assert (found.gpus, found.unknown) == (gpus, None)


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        pytest.param(("renderD130",), "renderD130", id="render node"),
        pytest.param(("1", "dri"), "1", id="an index, which AMD and Intel GPUs do not have"),
    ],
)
def test_unreported_gpu_is_missing(request_: tuple[str, ...], missing: str) -> None:
    found = attribute_gpus(build.container(gpu_request=request_), OWN, build.gpus(NVIDIA, AMD, INTEL), THRESHOLDS)

    message = f"assigned GPU {missing} is not reported"
    assert found.unknown == Unknown(reason="gpu_missing", message=message)


@pytest.mark.parametrize(
    ("kind", "request_", "changes", "gpus"),
    [
        pytest.param("process", ("all",), {}, ("GPU-amd", "pci-0000:00:02.0"), id="process without a request"),
        pytest.param("systemd", ("all",), {}, ("GPU-amd", "pci-0000:00:02.0"), id="a service"),
        pytest.param("kubernetes", ("all", "dri"), {}, ("GPU-amd", "pci-0000:00:02.0"), id="pod with GPUs"),
        pytest.param("docker", ("all",), {}, None, id="--gpus all, and NVIDIA GPUs are unread"),
        pytest.param("process", ("all",), {"nvidia_unread": True}, None, id="process, NVIDIA GPUs unread"),
        pytest.param("process", ("all",), {"failed": ("gpu",)}, None, id="process, driver does not answer"),
        pytest.param("kubernetes", ("all", "dri"), {"nvidia_unread": True}, None, id="pod, NVIDIA GPUs unread"),
    ],
)
def test_all_includes_amd_and_intel_gpus_only_without_nvidia_gpus(
    kind: str, request_: tuple[str, ...], changes: dict[str, Any], gpus: tuple[str, ...] | None
) -> None:
    readings = replace(build.gpus(AMD, INTEL), **changes)

    found = attribute_gpus(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == (None if gpus else "gpu_missing")
    assert found.utilization_ratio == (0.0 if gpus else None)
    if gpus:
        assert found.gpus == gpus


@pytest.mark.parametrize(
    ("request_", "readings", "message"),
    [
        pytest.param(
            ("all",),
            build.gpus(INTEL),
            "the container requests every NVIDIA GPU, and none is reported",
            id="none reported",
        ),
        pytest.param(
            ("all",),
            replace(build.gpus(INTEL), nvidia_unread=True),
            "the container requests every NVIDIA GPU, and none is reported, "
            "though NVIDIA hardware or its driver is present",
            id="none reported, but present",
        ),
        pytest.param(
            ("dri",),
            GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",)),
            "the container requests every AMD and Intel GPU, and their source fails",
            id="source fails",
        ),
    ],
)
def test_missing_gpus_have_a_reason(request_: tuple[str, ...], readings: GpuReadings, message: str) -> None:
    found = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert found.unknown == Unknown(reason="gpu_missing", message=message)


FULL = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("request_", "gpus", "nameless"),
    [
        pytest.param(("all",), (), ("all",), id="keyword"),
        pytest.param(("0", "renderD128"), (), ("0", "renderD128"), id="index and node"),
        pytest.param((FULL,), (FULL,), (), id="a UUID"),
        pytest.param((FULL[:12],), (), (FULL[:12],), id="part of a UUID"),
        pytest.param((f"MIG-{FULL}/7/0",), (), (f"MIG-{FULL}/7/0",), id="older name of an instance"),
        pytest.param(("renderD130",), ("GPU-gone",), (), id="node of a GPU that was read before"),
        pytest.param(("renderD130", "7", FULL), (FULL, "GPU-gone"), ("7",), id="one of each kind"),
    ],
)
def test_missing_names_are_uuids(request_: tuple[str, ...], gpus: tuple[str, ...], nameless: tuple[str, ...]) -> None:
    readings = GpuReadings(source="test", gpus=(INTEL,), failed=("gpu", "drm"), gone={"renderD130": "GPU-gone"})

    found = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.gpus, found.nameless) == (gpus, nameless)
    assert (found.unknown and found.unknown.reason) == "gpu_missing"


def test_unread_gpu_of_an_earlier_sample_counts_while_a_requested_gpu_is_missing() -> None:
    container = build.container(gpu_request=("0", FULL[:12]))

    found = attribute_gpus(container, OWN, build.gpus(NVIDIA), THRESHOLDS, ("GPU-0", FULL))

    assert (found.gpus, found.nameless) == (("GPU-0", FULL), (FULL[:12],))


@pytest.mark.parametrize("request_", [("all",), ("0",)], ids=["all", "its index, reused by another GPU"])
@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        pytest.param(("GPU-7",), "gpu_missing", id="driver stopped listing it"),
        pytest.param(("GPU-8",), None, id="another GPU was lost"),
        pytest.param((), None, id="repartitioned or renamed"),
    ],
)
def test_lost_gpu_is_missing(request_: tuple[str, ...], dropped: tuple[str, ...], reason: str | None) -> None:
    readings = GpuReadings(source="test", gpus=(build.gpu(0),), dropped=dropped)

    found = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS, ("GPU-0", "GPU-7"))

    assert (found.unknown and found.unknown.reason, found.nameless) == (reason, ())
    assert (found.gpus, found.utilization_ratio) == ((("GPU-0", "GPU-7"), None) if reason else (("GPU-0",), 0.0))


@pytest.mark.parametrize(
    ("request_", "uuids", "found"),
    [
        pytest.param(FULL[:12], [FULL, "GPU-8932f938"], FULL, id="first digits"),
        pytest.param(FULL[:-1], [FULL], FULL, id="nearly the whole UUID"),
        pytest.param(FULL[:11], [FULL], None, id="too few digits"),
        pytest.param(FULL[:12], [FULL, f"{FULL[:12]}-another"], None, id="digits of two GPUs"),
        pytest.param(FULL[:12], [FULL, FULL[:12]], FULL[:12], id="a whole UUID that starts another"),
        pytest.param(FULL[:12], ["GPU-8932f938"], None, id="digits of no GPU"),
    ],
)
def test_gpu_matches_the_first_digits_of_its_uuid(request_: str, uuids: list[str], found: str | None) -> None:
    gpus = [build.gpu(number, uuid=uuid) for number, uuid in enumerate(uuids)]

    use = attribute_gpus(build.container(gpu_request=(request_,)), OWN, build.gpus(*gpus), THRESHOLDS)

    assert use.gpus == ((found,) if found else ())
    assert (use.utilization_ratio, use.unknown and use.unknown.reason) == (
        (0.0, None) if found else (None, "gpu_missing")
    )


def test_first_digits_do_not_match_an_amd_gpu() -> None:
    gpu = build.gpu(0, uuid="GPU-18b70c33a1b2c3d4", node="renderD128")

    use = attribute_gpus(build.container(gpu_request=("GPU-18b70c33",)), OWN, build.gpus(gpu), THRESHOLDS)

    assert (use.gpus, use.unknown and use.unknown.reason) == ((), "gpu_missing")


@pytest.mark.parametrize(
    ("request_", "found", "reason"),
    [
        pytest.param(("0", "renderD131"), (NVIDIA, INTEL), "gpu_missing", id="node of a missing GPU"),
        pytest.param(("all", "renderD131"), (NVIDIA,), "gpu_missing", id="with all NVIDIA GPUs"),
        pytest.param(("renderD131",), (NVIDIA,), "gpu_missing", id="the only GPU with a node"),
        pytest.param(("dri",), (NVIDIA, INTEL), "gpu_missing", id="one of all nodes"),
        pytest.param(("0", "renderD130"), (NVIDIA, INTEL), None, id="node of a GPU that was never read"),
        pytest.param(
            ("dri",), (build.gpu(0, uuid="GPU-gone", node="renderD132"),), None, id="the GPU has another node now"
        ),
    ],
)
def test_removed_gpu_is_not_ignored(request_: tuple[str, ...], found: tuple[Gpu, ...], reason: str | None) -> None:
    readings = GpuReadings(source="test", gpus=found, gone={"renderD131": "GPU-gone"})

    use = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (use.unknown and use.unknown.reason) == reason


@pytest.mark.parametrize(
    ("request_", "found", "shares"),
    [
        pytest.param(
            ("GPU-elsewhere",),
            [build.gpu(0, build.process(4001, 0.25, 7), build.process(OTHER_PID, 0.5, 9)), build.gpu(1)],
            [GpuShare(gpu="GPU-0", utilization_ratio=0.25, memory_bytes=7, attributed=True)],
            id="unknown name, and processes on another GPU",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0), build.gpu(1, build.process(4002, 0.5, 9))],
            [
                GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0, attributed=True),
                GpuShare(gpu="GPU-1", utilization_ratio=0.5, memory_bytes=9, attributed=True),
            ],
            id="one unknown name, and processes on a third GPU",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0, build.process(4001, None, None))],
            [GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=None, attributed=False)],
            id="its process is unmeasured",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0, utilization_ratio=0.9, memory_used_bytes=9 * 2**30)],
            [GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=None, attributed=False, busiest_ratio=0.0)],
            id="unattributed work",
        ),
        pytest.param(("7",), [build.gpu(0)], [], id="no use anywhere"),
    ],
)
def test_missing_gpu_hides_no_other_use(request_: tuple[str, ...], found: list[Gpu], shares: list[GpuShare]) -> None:
    use = attribute_gpus(build.container(gpu_request=request_), OWN, build.gpus(*found), THRESHOLDS)

    assert list(use.shares) == shares
    assert (use.utilization_ratio, use.unknown and use.unknown.reason) == (None, "gpu_missing")


def test_missing_gpu_leaves_no_share_if_processes_are_unknown() -> None:
    use = attribute_gpus(build.container(gpu_request=("0", "7")), None, build.gpus(build.gpu(0)), THRESHOLDS)

    assert (use.shares, use.unknown and use.unknown.reason) == ((), "gpu_missing")


def test_all_render_nodes_mean_nothing_if_every_gpu_lacks_one() -> None:
    container = build.container(gpu_request=("dri",))

    found = attribute_gpus(container, OWN, build.gpus(build.gpu(0, build.process(OTHER_PID, 0.9))), THRESHOLDS)

    assert (found.gpus, found.unknown) == ((), Unknown(reason="no_gpu", message="no GPU is assigned"))


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        pytest.param(("renderD129",), "renderD129", id="one node"),
        pytest.param(("dri", "renderD129"), "renderD129", id="with all nodes"),
        pytest.param(("renderD130", "renderD129"), "renderD129", id="two nodes"),
        pytest.param(("0", "renderD129"), None, id="node may belong to the requested NVIDIA GPU"),
        pytest.param(("all", "renderD129"), None, id="with all NVIDIA GPUs"),
    ],
)
def test_gpu_removed_before_the_start_is_missing(request_: tuple[str, ...], missing: str | None) -> None:
    found = attribute_gpus(build.container(gpu_request=request_), OWN, build.gpus(build.gpu(0)), THRESHOLDS)

    message = f"assigned GPU {missing} is not reported"
    assert found.unknown == (Unknown(reason="gpu_missing", message=message) if missing else None)
    assert found.utilization_ratio == (None if missing else 0.0)


def test_memory_on_an_nvidia_gpu_requested_by_node_is_published() -> None:
    mine = build.gpu(0, build.process(4001, 0.5, 5 * 2**20))

    found = attribute_gpus(build.container(gpu_request=("renderD128",)), OWN, build.gpus(mine), THRESHOLDS)

    assert found.shares == (GpuShare(gpu="GPU-0", utilization_ratio=0.5, memory_bytes=5 * 2**20, attributed=True),)
    assert (found.gpus, found.utilization_ratio) == (("GPU-0",), None)


@pytest.mark.parametrize(
    ("request_", "had", "failed", "reason"),
    [
        pytest.param(("0",), ("GPU-0", "GPU-amd"), ("drm",), "source_failed", id="source of an earlier GPU fails"),
        pytest.param(("0",), ("GPU-0",), ("drm",), None, id="source of other GPUs fails"),
        pytest.param(("0",), ("GPU-0", "GPU-amd"), (), None, id="nothing fails and it left the GPU"),
        pytest.param(("7",), ("GPU-0", "GPU-amd"), ("drm",), "gpu_missing", id="a requested GPU is missing"),
    ],
)
def test_earlier_gpu_counts_while_its_source_fails(
    request_: tuple[str, ...], had: tuple[str, ...], failed: tuple[str, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=failed)

    found = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS, had)

    assert (found.gpus, found.unknown and found.unknown.reason) == (had if failed else ("GPU-0",), reason)
    assert (found.utilization_ratio is None) == (reason is not None)


UNREAD = replace(AMD, processes=None, unknown="AMD's compute driver is there and cannot be read")


@pytest.mark.parametrize(
    ("pids", "gpus", "unlisted", "reason"),
    [
        pytest.param(OWN, (NVIDIA, UNREAD), (), "not_listed", id="processes cannot be listed"),
        pytest.param(OWN, (NVIDIA, AMD), (4002,), "not_listed", id="open files of one of its processes unreadable"),
        pytest.param(OWN, (NVIDIA, AMD), None, "not_listed", id="open files of too many unreadable"),
        pytest.param(None, (NVIDIA, AMD), (), "processes_unknown", id="its processes are unknown"),
        pytest.param(OWN, (NVIDIA, replace(UNREAD, uuid="pci-0")), (), "not_listed", id="GPU renamed"),
        pytest.param(OWN, (NVIDIA, AMD), (OTHER_PID,), None, id="listed without its processes"),
        pytest.param(OWN, (NVIDIA,), None, None, id="GPU removed"),
    ],
)
def test_earlier_gpu_counts_until_a_full_list_excludes_it(
    pids: frozenset[int] | None, gpus: tuple[Gpu, ...], unlisted: tuple[int, ...] | None, reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=gpus, unlisted=unlisted)

    found = attribute_gpus(build.container(gpu_request=("0",)), pids, readings, THRESHOLDS, ("GPU-0", "GPU-amd"))

    assert (found.gpus, found.unknown and found.unknown.reason) == (("GPU-0", "GPU-amd")[: 2 if reason else 1], reason)
    assert (found.utilization_ratio is None) == (reason is not None)
    assert [share.gpu for share in found.shares] == ([] if pids is None else ["GPU-0"])


def test_list_of_a_gpu_without_render_node_is_complete() -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA, build.gpu(1)), unlisted=None)

    found = attribute_gpus(build.container(gpu_request=("0",)), OWN, readings, THRESHOLDS, ("GPU-0", "GPU-1"))

    assert (found.gpus, found.utilization_ratio) == (("GPU-0",), 0.25)


ON_BOTH = (NVIDIA, replace(AMD, processes=(build.process(4001, 0.9),)))
FAILED = GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",), gone={"renderD128": "GPU-amd"})
BETWEEN = {
    "nothing": (),
    "its processes were unknown": ((None, build.gpus(*ON_BOTH)),),
    "its list could not be read": ((OWN, build.gpus(NVIDIA, UNREAD)),),
    "no source answered": ((OWN, None),),
    "another process of its reader had not found it yet": (
        (OWN, FAILED),
        (OWN, GpuReadings(source="test", gpus=(NVIDIA, AMD), unlisted=(4001,))),
    ),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_unknown_sample_does_not_count_as_idle(
    between: tuple[tuple[frozenset[int] | None, GpuReadings | None], ...],
) -> None:
    history = ContainerHistory(THRESHOLDS)
    place = build.container(gpu_request=("0",))
    found = []

    for now_s, (pids, readings) in enumerate([(OWN, build.gpus(*ON_BOTH)), *between, (OWN, FAILED), (OWN, FAILED)]):
        seen = attribute_gpus(place, pids, readings, THRESHOLDS, history.gpus)
        found.append(history.observe(place, seen, ram(0), now_s=now_s))

    assert [each.gpu_idle_s for each in found] == [0.0] + [None] * (len(found) - 1)
    assert found[-1].busy_s["GPU-0"] - found[-2].busy_s["GPU-0"] == 0.25


@pytest.mark.parametrize(
    ("kind", "request_", "gpus", "unlisted", "reason"),
    [
        pytest.param("process", ("all",), (NVIDIA, UNREAD), (), "not_listed", id="list cannot be read"),
        pytest.param("systemd", ("all",), (NVIDIA, AMD), (4001,), "not_listed", id="its open files unreadable"),
        pytest.param("process", ("all",), (NVIDIA, AMD), (OTHER_PID,), None, id="open files of another unreadable"),
        pytest.param("process", ("all",), (NVIDIA,), None, None, id="no such GPU"),
        pytest.param("process", ("0",), (NVIDIA, UNREAD), (), None, id="names an NVIDIA GPU"),
        pytest.param("docker", ("all",), (NVIDIA, UNREAD), (), None, id="--gpus all includes only NVIDIA GPUs"),
    ],
)
def test_container_that_sees_every_gpu_may_use_unlisted_ones(
    kind: str, request_: tuple[str, ...], gpus: tuple[Gpu, ...], unlisted: tuple[int, ...] | None, reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=gpus, unlisted=unlisted)

    found = attribute_gpus(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason
    assert [share.gpu for share in found.shares] == ["GPU-0"]


@pytest.mark.parametrize(
    ("kind", "request_", "failed", "reason"),
    [
        pytest.param("process", ("all",), ("drm",), "source_failed", id="process without a request"),
        pytest.param("systemd", ("all",), ("drm",), "source_failed", id="service without a request"),
        pytest.param("process", ("0",), ("drm",), None, id="names an NVIDIA GPU"),
        pytest.param("docker", ("all",), ("drm",), None, id="--gpus all includes only NVIDIA GPUs"),
        pytest.param("process", ("all",), (), None, id="nothing fails"),
    ],
)
def test_container_that_sees_every_gpu_may_use_unread_ones(
    kind: str, request_: tuple[str, ...], failed: tuple[str, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=failed)

    found = attribute_gpus(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(("all",), None, id="all NVIDIA GPUs, which are read"),
        pytest.param(("dri",), "gpu_missing", id="all nodes"),
        pytest.param(("0", "renderD128"), "gpu_missing", id="index, and a node that may be a missing GPU"),
        pytest.param(("renderD128",), "gpu_missing", id="node of a missing GPU"),
        pytest.param(("GPU-0",), None, id="GPU of a source that answers"),
    ],
)
def test_gpus_of_a_failed_source_are_missing(request_: tuple[str, ...], reason: str | None) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",))

    found = attribute_gpus(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason


@pytest.mark.parametrize(
    ("found", "attributed"),
    [
        pytest.param(build.gpu(0, build.process(4001, 0.9)), True, id="each process is measured"),
        pytest.param(build.gpu(0, build.process(4001, 0.0)), True, id="idle, and measured"),
        pytest.param(
            build.gpu(0, build.process(4001, None), utilization_ratio=0.9), False, id="its process is unmeasured"
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=0.9),
            False,
            id="process of another is unmeasured",
        ),
        pytest.param(build.gpu(0, utilization_ratio=0.9), False, id="no listed process works"),
        pytest.param(build.gpu(0, processes=None, utilization_ratio=0.9), False, id="no list"),
        pytest.param(build.gpu(0, processes=None, utilization_ratio=None), None, id="lost GPU"),
    ],
)
@pytest.mark.behaviour("A19")
def test_share_is_unattributed_if_only_the_whole_gpu_is_measured(found: Gpu, attributed: bool | None) -> None:
    use = attribute_gpus(build.container(), OWN, build.gpus(found), THRESHOLDS)

    assert [share.attributed for share in use.shares] == [attributed]
    assert (use.unknown is None) == (attributed is True)


def test_gpu_named_twice_has_one_share() -> None:
    found = attribute_gpus(build.container(gpu_request=("0", "GPU-0")), OWN, build.gpus(build.gpu(0)), THRESHOLDS)

    assert found.gpus == ("GPU-0",)
    assert len(found.shares) == 1


def test_work_on_an_unrequested_gpu_counts() -> None:
    elsewhere = build.gpu(1, build.process(4001, 0.9))

    assert attributed(build.gpu(0), elsewhere, request=("0",)) == (0.9, None)
    assert attributed(build.gpu(0), build.gpu(1, build.process(OTHER_PID, 0.9)), request=("0",)) == (0.0, None)


def test_unknown_processes_make_the_utilisation_unknown() -> None:
    assert attributed(build.gpu(0), pids=None) == (None, "processes_unknown")


def test_without_a_gpu_source_the_utilisation_is_unknown() -> None:
    found = attribute_gpus(build.container(), OWN, None, THRESHOLDS)

    assert found.utilization_ratio is None
    assert found.unknown == Unknown(reason="source_failed", message="no GPU source answers")


def test_unknown_names_the_gpu_and_the_reason() -> None:
    lost = build.gpu(1, processes=None, utilization_ratio=None, unknown="GPU is lost")

    found = attribute_gpus(build.container(), OWN, build.gpus(build.gpu(0), lost), THRESHOLDS)

    assert found.gpus == ("GPU-0", "GPU-1")
    assert found.unknown == Unknown(reason="not_listed", message="GPU-1: GPU is lost")
    assert found.shares[1] == GpuShare(gpu="GPU-1", utilization_ratio=None, memory_bytes=None)


def test_memory_is_the_sum_of_the_processes_or_unknown() -> None:
    known = build.gpu(0, build.process(4001, 0.0, 10), build.process(4002, 0.0, 20), build.process(OTHER_PID, 0.0, 40))
    unknown = build.gpu(1, build.process(4001, 0.0, None))

    found = attribute_gpus(build.container(), OWN, build.gpus(known, unknown), THRESHOLDS)

    assert [share.memory_bytes for share in found.shares] == [30, None]


@pytest.mark.parametrize(
    ("found", "ratio", "size"),
    [
        pytest.param(
            build.gpu(0, build.process(1, 0.25, 10), utilization_ratio=0.75, memory_used_bytes=30),
            0.5,
            20,
            id="positive",
        ),
        pytest.param(
            build.gpu(0, build.process(1, 0.5, 30), utilization_ratio=0.25, memory_used_bytes=10),
            -0.25,
            -20,
            id="processes report more than the GPU",
        ),
        pytest.param(build.gpu(0, build.process(1, None, None)), None, None, id="a process unknown"),
        pytest.param(build.gpu(0, processes=None), None, None, id="no list"),
        pytest.param(build.gpu(0, utilization_ratio=None, memory_used_bytes=None), None, None, id="no figure"),
    ],
)
def test_unattributed_use(found: Gpu, ratio: float | None, size: int | None) -> None:
    assert found.unattributed_ratio == ratio
    assert gpu_attribution.unattributed_bytes(found) == size


percents = st.integers(0, 100).map(lambda percent: percent / 100)


@pytest.mark.parametrize(
    ("processes", "ratio", "size"),
    [
        pytest.param([build.process(7, 0.25, 10), build.process(8, 0.5, 20), build.process(4001, 0.1, 5)], 0.75, 30,
                     id="sum"),
        pytest.param([build.process(4001, 0.1, 5)], 0.0, 0, id="every process is in a container"),
        pytest.param([build.process(4001, None, None)], 0.0, 0, id="containers unmeasured"),
        pytest.param([build.process(7, None, 10), build.process(8, 0.5, None)], None, None,
                     id="one process unmeasured"),
        pytest.param(None, None, None, id="no list"),
    ],
)  # fmt: skip
def test_use_outside_containers(processes: list[GpuProcess] | None, ratio: float | None, size: int | None) -> None:
    gpu = build.gpu(0, processes=None) if processes is None else build.gpu(0, *processes)

    found = gpu_attribution.unplaced(gpu, OWN)

    assert found == GpuShare(gpu="GPU-0", utilization_ratio=ratio, memory_bytes=size)


def test_decoding_job_is_busy_and_charged_only_its_engine_share() -> None:
    decodes = GpuProcess(pid=4001, utilization_ratio=0.02, memory_bytes=9, busiest_ratio=0.9)
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))

    def look(now_s: float) -> ContainerEvidence:
        use = attribute_gpus(container, OWN, build.gpus(build.gpu(0, decodes)), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    look(1.0)
    found = look(2.0)

    assert (found.shares[0].utilization_ratio, found.shares[0].busiest_ratio) == (0.02, 0.9)
    assert (found.gpu_idle_s, found.gpu_last_busy_age_s) == (0.0, 0.0)
    assert found.busy_s == {"GPU-0": pytest.approx(0.02)}


@pytest.mark.parametrize(
    ("neighbour", "total", "hidden", "idle_s"),
    [
        pytest.param(GpuProcess(OTHER_PID, 0.0, 9, busiest_ratio=0.9), 0.08, -0.82, 1.0, id="neighbour decodes"),
        pytest.param(GpuProcess(OTHER_PID, 0.0, 9), 0.08, 0.08, None, id="neighbour does not explain the time"),
        pytest.param(GpuProcess(OTHER_PID, 0.1, 9, busiest_ratio=0.3), 0.35, 0.05, 1.0, id="idle ratio is left"),
        pytest.param(
            GpuProcess(OTHER_PID, 0.1, 9, busiest_ratio=0.3), 0.36, 0.06, None, id="more than the idle ratio is left"
        ),
    ],
)
def test_engine_time_of_a_neighbour(neighbour: GpuProcess, total: float, hidden: float, idle_s: float | None) -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    gpu = build.gpu(0, build.process(4001), neighbour, utilization_ratio=total)

    def look(now_s: float) -> ContainerEvidence:
        return history.observe(
            container, attribute_gpus(container, OWN, build.gpus(gpu), THRESHOLDS), RamUse(usage_bytes=1), now_s=now_s
        )

    look(1.0)
    found = look(2.0)

    assert (gpu.hidden_ratio, found.gpu_idle_s) == (hidden, idle_s)
    assert gpu.unattributed_ratio == pytest.approx(total - (neighbour.utilization_ratio or 0.0))
    assert found.shares[0].attributed is (idle_s is not None)


work = st.lists(st.tuples(st.sampled_from([4001, 4002, 5001, 9999]), percents, st.none() | percents), max_size=6)


@given(work, percents)
def test_utilisation_adds_up(processes: list[tuple[int, float, float | None]], total: float) -> None:
    listed = (GpuProcess(pid, own, 1, busiest_ratio=most) for pid, own, most in processes)
    gpu = build.gpu(0, *listed, utilization_ratio=total)
    a, b = OWN, frozenset({5001})

    uses = [attribute_gpus(build.container(gpu_request=("0",)), pids, build.gpus(gpu), THRESHOLDS) for pids in (a, b)]

    containers = sum(use.shares[0].utilization_ratio or 0.0 for use in uses)
    outside = gpu_attribution.unplaced(gpu, a | b).utilization_ratio
    assert containers + (outside or 0.0) + (gpu.unattributed_ratio or 0.0) == pytest.approx(total)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        pytest.param(
            build.gpu(0, utilization_ratio=0.7, memory_used_bytes=9 * 2**30),
            (None, None),
            id="unlisted work and unlisted memory",
        ),
        pytest.param(build.gpu(0, utilization_ratio=0.7), (None, 0), id="unlisted work, no memory"),
        pytest.param(build.gpu(0, utilization_ratio=0.05), (0.0, 0), id="no work: measured"),
        pytest.param(
            build.gpu(0, build.process(4001, 0.0, 9), utilization_ratio=0.7), (None, 9), id="unlisted work, own memory"
        ),
        pytest.param(
            build.gpu(0, build.process(4001, 0.1, 9), utilization_ratio=0.7), (0.1, 9), id="own work and memory"
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.7),
            (None, 0),
            id="another is unmeasured, memory is listed",
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.4, memory_used_bytes=2 * 2**30),
            (None, None),
            id="another is unmeasured, unlisted memory",
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.05, memory_used_bytes=2 * 2**30),
            (None, 0),
            id="another is unmeasured, GPU idle: unlisted memory is the driver's",
        ),
        pytest.param(
            build.gpu(0, utilization_ratio=None, memory_used_bytes=2 * 2**30),
            (None, None),
            id="GPU use unknown, unlisted memory",
        ),
        pytest.param(
            build.gpu(0, attribution="none", utilization_ratio=None), (None, 0), id="use cannot be attributed"
        ),
    ],
)
def test_zero_is_published_only_if_measured(gpu: Gpu, expected: tuple[float | None, int | None]) -> None:
    use = attribute_gpus(build.container(gpu_request=("0",)), OWN, build.gpus(gpu), THRESHOLDS)

    (share,) = use.shares
    assert (share.utilization_ratio, share.memory_bytes) == expected
    assert not (share.attributed is False and 0 in expected[:1])


def test_unknown_memory_leaves_no_peak() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    unmeasured = build.process(OTHER_PID, None, 9)

    def look(now_s: float, other: GpuProcess) -> ContainerEvidence:
        gpu = build.gpu(0, other, utilization_ratio=0.4, memory_used_bytes=2 * 2**30)
        use = attribute_gpus(container, OWN, build.gpus(gpu), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    first = look(1.0, unmeasured)
    second = look(2.0, build.process(OTHER_PID, 0.0, 9))

    assert [each.shares[0].memory_bytes for each in (first, second)] == [None, None]
    assert (first.peak_bytes, second.peak_bytes) == ({}, {})


@pytest.mark.parametrize(
    ("attribution", "used_ratio", "expected"),
    [
        pytest.param("none", 0.03, (None, 0.0, 0.0), id="idle GPU without attribution"),
        pytest.param("none", 0.7, (None, 0.0, None), id="busy GPU without attribution"),
        pytest.param("process", 0.03, (0.0, None, 0.0), id="measured 0"),
    ],
)
def test_engine_use_is_separate_from_an_unknown_utilisation(
    attribution: str, used_ratio: float, expected: tuple[float | None, float | None, float | None]
) -> None:
    gpu = build.gpu(0, build.process(4001), attribution=attribution, utilization_ratio=used_ratio)

    use = attribute_gpus(build.container(gpu_request=("0",)), OWN, build.gpus(gpu), THRESHOLDS)

    (share,) = use.shares
    assert (share.utilization_ratio, share.busiest_ratio, use.utilization_ratio) == expected


def test_unmeasured_zero_starts_no_peak_and_no_counter() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))

    def look(now_s: float, gpu: Gpu) -> ContainerEvidence:
        use = attribute_gpus(container, OWN, build.gpus(gpu), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    hidden = look(1.0, build.gpu(0, utilization_ratio=0.7, memory_used_bytes=9 * 2**30))
    shown = look(2.0, build.gpu(0))

    assert (hidden.peak_bytes, hidden.busy_s) == ({}, {})
    assert (shown.peak_bytes, shown.busy_s) == ({"GPU-0": 0}, {"GPU-0": 0.0})


@given(st.lists(st.tuples(st.sampled_from([4001, 4002, 9998, 9999]), percents), max_size=5), percents)
def test_known_utilisation_adds_up_to_within_idle(processes: list[tuple[int, float]], total: float) -> None:
    found = build.gpu(0, *(build.process(pid, ratio) for pid, ratio in processes), utilization_ratio=total)

    own, reason = attributed(found)

    listed = sum(ratio for _, ratio in processes)
    assert (own is None) == (reason == "unattributed") == (round(total - listed, 9) > THRESHOLDS.gpu_idle_ratio)
    if own is not None:
        assert own == pytest.approx(min(1.0, sum(ratio for pid, ratio in processes if pid in OWN)))


# Instances of a GPU


def instance(number: int, *processes: GpuProcess, **changes: Any) -> Gpu:
    """An instance of GPU-0: the driver reports its memory and processes, and no utilisation."""
    mig = MigInstance(parent="GPU-0", number=number, gpu_instance=number + 1, compute_instance=0)
    given: dict[str, Any] = {
        "uuid": f"MIG-{number}",
        "mig": mig,
        "utilization_ratio": None,
        "attribution": "none",
    }
    return build.gpu(0, *processes, **(given | changes))


CUT = build.gpu(0, processes=None, utilization_ratio=None, unknown="it is in MIG mode", attribution="none")


@pytest.mark.parametrize("request_", ["MIG-1", "0:1", "MIG-GPU-0/2/0"], ids=["UUID", "number", "older name"])
def test_container_has_only_the_instance_that_it_names(request_: str) -> None:
    own = instance(1, build.process(4001, None, 700), memory_used_bytes=900)
    readings = build.gpus(CUT, instance(0, build.process(OTHER_PID, None, 5)), own)

    found = attribute_gpus(build.container(gpu_request=(request_,)), OWN, readings, THRESHOLDS)

    assert found.gpus == ("MIG-1",)
    assert found.shares == (GpuShare(gpu="MIG-1", utilization_ratio=None, memory_bytes=700, attributed=False),)
    assert found.utilization_ratio is None
    assert found.unknown is not None
    assert found.unknown.reason == "not_measured"


@pytest.mark.parametrize(
    ("request_", "parts", "missing"),
    [
        pytest.param(("MIG-0",), [instance(0, build.process(4001, None, 5))], {"MIG-0": False}, id="by UUID"),
        pytest.param(("MIG-0",), [instance(0)], {"MIG-0": False}, id="no process on it"),
        pytest.param(("MIG-0",), [instance(0, processes=None)], {"MIG-0": False}, id="processes unlisted"),
        pytest.param(
            ("GPU-1",),
            [instance(0, build.process(4001, None, 5)), instance(1), build.gpu(1, uuid="GPU-1")],
            {"MIG-0": False, "GPU-1": True},
            id="its processes, and a whole GPU",
        ),
        pytest.param(
            None, [instance(0, build.process(4001, None, 5)), instance(1)], {"MIG-0": False}, id="not requested"
        ),
        pytest.param(
            ("all",),
            [instance(0), instance(1)],
            {"GPU-0": None, "MIG-0": None, "MIG-1": None},
            id="all, no process on any",
        ),
        pytest.param(
            ("all",),
            [instance(0, build.process(4001, None, 5)), instance(1, build.process(OTHER_PID, None, 5))],
            {"GPU-0": None, "MIG-0": False, "MIG-1": None},
            id="all, processes on one",
        ),
        pytest.param(("all",), [instance(0, processes=None)], {"GPU-0": None, "MIG-0": False}, id="all, may be on one"),
        pytest.param(
            ("all", "MIG-1"),
            [instance(0), instance(1)],
            {"GPU-0": None, "MIG-0": None, "MIG-1": False},
            id="all, and one by name",
        ),
        pytest.param(("0",), [instance(0)], {"GPU-0": False}, id="the whole GPU, no process listed"),
        pytest.param(
            ("0",),
            [instance(0, build.process(4001, None, 5)), instance(1)],
            {"GPU-0": None, "MIG-0": False},
            id="the whole GPU, processes on one instance",
        ),
    ],
)
@pytest.mark.behaviour("A19")
def test_share_of_a_partitioned_gpu_is_unattributed(
    request_: tuple[str, ...] | None, parts: list[Gpu], missing: dict[str, bool | None]
) -> None:
    found = attribute_gpus(build.container(gpu_request=request_), OWN, build.gpus(CUT, *parts), THRESHOLDS)

    assert {share.gpu: share.attributed for share in found.shares} == missing
    assert found.utilization_ratio is None


def test_unrequested_gpu_with_its_process_is_unattributed() -> None:
    busy = build.gpu(0, build.process(4001, None, 5), utilization_ratio=0.9)
    other = build.gpu(1, build.process(OTHER_PID, None, 5), utilization_ratio=0.9)

    found = attribute_gpus(build.container(gpu_request=None), OWN, build.gpus(busy, other), THRESHOLDS)

    assert found.shares == (GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=5, attributed=False),)


def test_instance_without_processes_is_unknown_not_idle() -> None:
    found = attribute_gpus(build.container(gpu_request=("MIG-0",)), OWN, build.gpus(CUT, instance(0)), THRESHOLDS)

    assert found.utilization_ratio is None
    assert found.unknown is not None


def test_removed_instance_is_missing() -> None:
    readings = build.gpus(CUT, instance(0))

    found = attribute_gpus(build.container(gpu_request=("MIG-1",)), OWN, readings, THRESHOLDS)

    assert found.unknown == Unknown(reason="gpu_missing", message="assigned GPU MIG-1 is not reported")


def test_unattributed_memory_of_a_shared_instance_is_unknown() -> None:
    own = instance(0, build.process(4001, None, 700), memory_used_bytes=900)
    assert own.mig
    shared = replace(own, mig=replace(own.mig, shares_memory=True))

    assert gpu_attribution.unattributed_bytes(own) == 200
    assert gpu_attribution.unattributed_bytes(shared) is None
