"""Every form in which Docker, Podman, CDI, device plugins and Slurm name GPUs."""

import pytest

from gpuwarden import gpu_names

pytestmark = pytest.mark.pure

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"
OLD_MIG = f"MIG-{UUID}/3/0"
MOUNTS = "/var/run/nvidia-container-devices"
CDI_DEVICE = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        pytest.param("all", "all", id="all"),
        pytest.param("0", "0", id="number"),
        pytest.param("0:1", "0:1", id="number of an instance"),
        pytest.param(UUID, UUID, id="UUID"),
        pytest.param("GPU-8932f937", "GPU-8932f937", id="begin of a UUID"),
        pytest.param(MIG, MIG, id="UUID of an instance"),
        pytest.param(OLD_MIG, OLD_MIG, id="instance, before R470"),
        pytest.param("GPU-ef2c1799a1f3e2ed", "GPU-ef2c1799a1f3e2ed", id="chip number of an AMD GPU"),
        pytest.param(f"{UUID}::3", UUID, id="NVIDIA's plugin: a share"),
        pytest.param("0::3", "0", id="NVIDIA's plugin: a share, by number"),
        pytest.param("nvidia0", "0", id="GKE's plugin: GPU"),
        pytest.param("nvidia12/vgpu1", "12", id="GKE's plugin: share"),
        pytest.param("nvidia1/gi3", "1/gi3", id="GKE's plugin: instance"),
        pytest.param("nvidia1/gi3/vgpu0", "1/gi3", id="GKE's plugin: share of an instance"),
        pytest.param(f"{UUID}-3", UUID, id="HAMi's plugin"),
        pytest.param(f"{UUID}-_-12", UUID, id="Aliyun's plugin"),
        pytest.param("card0-2", "card0", id="Intel's plugin"),
        pytest.param("0000:03:00.0", "0000:03:00.0", id="AMD's plugin"),
        pytest.param("amdgpu_xcp_30", "amdgpu_xcp_30", id="AMD's plugin: partition"),
        pytest.param("gpu-2", "2", id="NVIDIA's DRA driver"),
        pytest.param("nvidia.com/gpu=0", "0", id="CDI: number"),
        pytest.param("nvidia.com/gpu=gpu0", "0", id="CDI: type and number"),
        pytest.param("nvidia.com/gpu=mig0:1", "0:1", id="CDI: instance"),
        pytest.param(f"nvidia.com/gpu={UUID}", UUID, id="CDI: UUID"),
        pytest.param("nvidia.com/gpu=all", "all", id="CDI: all"),
        pytest.param("runtime.nvidia.com/gpu=all", "all", id="CDI of NVIDIA's runtime"),
        pytest.param(f"k8s.device-plugin.nvidia.com/gpu={UUID}", UUID, id="CDI of NVIDIA's plugin"),
        pytest.param("amd.com/gpu=all", "dri", id="CDI: all AMD GPUs"),
        pytest.param("intel.com/gpu=card1", "card1", id="CDI: an Intel GPU"),
        pytest.param("/dev/nvidia3", "3", id="device"),
        pytest.param("/dev/dri", "dri", id="folder of devices"),
        pytest.param("/dev/dri/renderD129", "renderD129", id="render node"),
    ],
)
def test_forms_of_one_gpu(written: str, name: str) -> None:
    assert gpu_names.read(written) == name
    assert gpu_names.is_known(name)


@pytest.mark.parametrize("written", ["vcuda-3", "amd.com/gpu=0", "nvidia.com/gpu=GA102", "nvidia0/x", "nvidia.com/gpu"])
def test_other_forms_stay_as_written(written: str) -> None:
    assert gpu_names.read(written) == written
    assert not gpu_names.is_known(written)


@pytest.mark.parametrize(
    ("written", "name"),
    [("nvidia.com/gpu=0", "0"), ("example.com/nic=0", None), ("0", None), ("example.com/gpu", None)],
)
def test_cdi_devices_that_are_gpus(written: str, name: str | None) -> None:
    assert gpu_names.read_cdi(written) == name


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("all", ("all",)),
        ("0", ("0",)),
        ("0,1,0", ("0", "1")),
        (" 0 , GPU-1 ,", ("0", "GPU-1")),
        ("nvidia.com/gpu=0,nvidia.com/gpu=1", ("0", "1")),
        ("none", None),
        ("void", None),
        ("NoDevFiles", None),
        ("", None),
        (" , ", None),
    ],
)
def test_forms_of_a_list(value: str, names: tuple[str, ...] | None) -> None:
    assert gpu_names.read_list(value) == names


@pytest.mark.parametrize(
    ("env", "mounts", "names"),
    [
        pytest.param({}, (), None, id="nothing"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "1"}, ("/srv",), ("1",), id="variable"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "void"}, (), None, id="none"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": MOUNTS}, (f"{MOUNTS}/GPU-1", MOUNTS), ("GPU-1",), id="mount"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": MOUNTS}, (f"{MOUNTS}/cdi/{CDI_DEVICE}/1",), ("1",), id="mount, CDI"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": MOUNTS}, (f"{MOUNTS}/imex/0",), None, id="mount of a channel"),
        pytest.param(
            {"DOCKER_RESOURCE_NVIDIA-GPU": UUID, "NVIDIA_VISIBLE_DEVICES": "all"}, (), (UUID,), id="Docker Swarm"
        ),
        pytest.param({"AMD_VISIBLE_DEVICES": "all"}, (), ("dri",), id="AMD: all"),
        pytest.param({"AMD_VISIBLE_DEVICES": "none"}, (), None, id="AMD: none"),
        pytest.param(
            {"AMD_VISIBLE_DEVICES": "0xEF2C1799A1F3E2ED"}, (), ("GPU-ef2c1799a1f3e2ed",), id="AMD: chip number"
        ),
        pytest.param({"AMD_VISIBLE_DEVICES": "0-3"}, (), ("AMD_VISIBLE_DEVICES=0-3",), id="AMD: numbers are unknown"),
    ],
)
def test_gpus_of_a_container(env: dict[str, str], mounts: tuple[str, ...], names: tuple[str, ...] | None) -> None:
    assert gpu_names.of_container(env, mounts) == names


@pytest.mark.parametrize(
    ("env", "names"),
    [
        pytest.param({}, ("all",), id="nothing: all"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "1"}, ("1",), id="NVIDIA's variable"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ("1",), id="CUDA counts from there"),
        pytest.param(
            {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "1"}, ("1",), id="CUDA's alone names one"
        ),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": UUID}, (UUID,), id="UUIDs of CUDA"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "none"}, None, id="none"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, None, id="CUDA: none"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, None, id="CUDA: -1"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, ("2",), id="CUDA: up to -1"),
        pytest.param({"GPUWARDEN_GPUS": UUID, "CUDA_VISIBLE_DEVICES": "0"}, (UUID,), id="ours before all"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, id="Slurm: none"),
        pytest.param({"SLURM_JOB_GPUS": "2,3"}, ("2", "3"), id="Slurm: a job"),
        pytest.param({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, ("2", "3"), id="Slurm: with cgroups"),
        pytest.param({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3"), id="Slurm: without"),
        pytest.param(
            {"SLURM_JOB_GPUS": "2,3", "SLURM_STEP_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"}, ("3",), id="Slurm: a step"
        ),
        pytest.param(
            {"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "1"},
            ("CUDA_VISIBLE_DEVICES=1",),
            id="Slurm: a part of a job is unknown",
        ),
        pytest.param({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": MIG}, (MIG,), id="Slurm: an instance"),
        pytest.param({"ROCR_VISIBLE_DEVICES": "GPU-ef2c1799a1f3e2ed"}, ("GPU-ef2c1799a1f3e2ed",), id="AMD: UUID"),
        pytest.param({"HIP_VISIBLE_DEVICES": "1"}, ("HIP_VISIBLE_DEVICES=1",), id="AMD: numbers are unknown"),
    ],
)
def test_gpus_of_a_process(env: dict[str, str], names: tuple[str, ...] | None) -> None:
    assert gpu_names.of_process(env) == names
