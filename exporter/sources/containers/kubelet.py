"""GPUs of pods, from `List` of the kubelet's pod-resources API, on a socket that root may open.

    unix:///var/lib/kubelet/pod-resources/kubelet.sock   v1.PodResourcesLister/List   (k8s.io/kubelet, podresources/v1)

The messages are declared here, with the fields that are read. gRPC and protobuf are imported on the first call.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")

TIMEOUT_S: Final = 5.0
"""Timeout of the whole answer, seconds."""

ANSWER_MAX: Final = 16 * 2**20
"""Largest answer, bytes, as in the kubelet's own client."""

DeviceIds = Mapping[tuple[str, str, str], Mapping[str, tuple[str, ...]]]
"""Device ids by (namespace, pod, container), then by resource name or DRA driver."""

_METHOD: Final = "/v1.PodResourcesLister/List"

# Fields by message: name, number, and the message that it repeats; None for a text, "" for repeated texts.
_MESSAGES: Final[Mapping[str, tuple[tuple[str, int, str | None], ...]]] = {
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources"),),
    "PodResources": (("name", 1, None), ("namespace", 2, None), ("containers", 3, "ContainerResources")),
    "ContainerResources": (
        ("name", 1, None),
        ("devices", 2, "ContainerDevices"),
        ("dynamic_resources", 5, "DynamicResource"),
    ),
    "ContainerDevices": (("resource_name", 1, None), ("device_ids", 2, "")),
    "DynamicResource": (("claim_resources", 4, "ClaimResource"),),
    "ClaimResource": (("driver_name", 2, None), ("device_name", 4, None)),
}


def read_devices(path: Path = SOCKET) -> DeviceIds:
    """Call the kubelet once.

    Raises:
        OSError: no socket, a timeout, or an error.
        ValueError: the answer is invalid.
    """
    try:
        import grpc  # noqa: PLC0415
    except ImportError as error:
        raise OSError(f"{error}: pip install 'gpuwarden[kubernetes]'") from None
    options = [("grpc.max_receive_message_length", ANSWER_MAX)]
    with grpc.insecure_channel(f"unix://{path}", options=options) as channel:
        try:
            message = channel.unary_unary(_METHOD)(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise OSError(f"{error.code().name}: {error.details()}") from None
    return parse(message)


def parse(message: bytes) -> DeviceIds:
    """Decode a ListPodResourcesResponse; unknown fields are skipped.

    Raises:
        ValueError: it is invalid.
    """
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    try:
        answer = _response_type().FromString(message)
    except DecodeError as error:
        raise ValueError(f"the kubelet's answer is not a message of its pod-resources API: {error}") from None
    found: dict[tuple[str, str, str], dict[str, tuple[str, ...]]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices: dict[str, tuple[str, ...]] = {}
            for each in container.devices:  # one entry per NUMA node
                devices[each.resource_name] = (*devices.get(each.resource_name, ()), *each.device_ids)
            for claim in container.dynamic_resources:
                for each in claim.claim_resources:
                    devices[each.driver_name] = (*devices.get(each.driver_name, ()), each.device_name)
            found[pod.namespace, pod.name, container.name] = devices
    return found


@cache
def _response_type() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    of = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for name, number, repeats in fields:
            declared.field.add(
                name=name,
                number=number,
                label=of.LABEL_OPTIONAL if repeats is None else of.LABEL_REPEATED,
                type=of.TYPE_MESSAGE if repeats else of.TYPE_STRING,
                type_name=f".v1.{repeats}" if repeats else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))
