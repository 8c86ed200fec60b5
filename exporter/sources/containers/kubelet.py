"""GPUs of pods, from `List` of the kubelet's pod-resources API, on a socket that root may open.

    unix:///var/lib/kubelet/pod-resources/kubelet.sock   v1.PodResourcesLister/List   (k8s.io/kubelet, podresources/v1)

    ListPodResourcesResponse { repeated PodResources pod_resources = 1; }
    PodResources             { string name = 1; string namespace = 2; repeated ContainerResources containers = 3; }
    ContainerResources       { string name = 1; repeated ContainerDevices devices = 2; … }
    ContainerDevices         { string resource_name = 1; repeated string device_ids = 2; … }
    ContainerResources       { repeated DynamicResource dynamic_resources = 5; }
    DynamicResource          { repeated ClaimResource claim_resources = 4; … }
    ClaimResource            { string driver_name = 2; string device_name = 4; … }

One gRPC call over HTTP/2 (RFC 9113), written here because the gRPC package takes 27 MB. Headers of the answer are not
read: an answer without a whole message is an error.
"""

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")

TIMEOUT_S: Final = 5.0
"""Timeout of the whole answer, seconds."""

ANSWER_MAX: Final = 16 * 2**20
"""Largest answer, bytes: gRPC's limit for the kubelet's clients."""

DeviceIds = Mapping[tuple[str, str, str], Mapping[str, tuple[str, ...]]]
"""Device ids by (namespace, pod, container), then by resource name or DRA driver."""

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_FRAME_MAX: Final = 2**14
"""Default of SETTINGS_MAX_FRAME_SIZE, bytes."""

_REQUEST: Final = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/v1.PodResourcesLister/List",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


def read_devices(path: Path = SOCKET) -> DeviceIds:
    """Call the kubelet once.

    Raises:
        OSError: no socket, a timeout, or an error.
        ValueError: the answer is invalid.
    """
    return parse(_call(path))


def parse(message: bytes) -> DeviceIds:
    """Decode a ListPodResourcesResponse; unknown fields are skipped.

    Raises:
        ValueError: it is invalid.
    """
    found: dict[tuple[str, str, str], dict[str, tuple[str, ...]]] = {}
    for pod in _all(message, 1):
        for container in _all(pod, 3):
            devices: dict[str, tuple[str, ...]] = {}
            for each in _all(container, 2):  # one entry per NUMA node
                resource = _text(each, 1)
                devices[resource] = devices.get(resource, ()) + tuple(_utf8(name) for name in _all(each, 2))
            for claim in _all(container, 5):
                for each in _all(claim, 4):
                    driver = _text(each, 2)
                    devices[driver] = (*devices.get(driver, ()), _text(each, 4))
            found[_text(pod, 2), _text(pod, 1), _text(container, 1)] = devices
    return found


def _all(message: bytes, wanted: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == wanted]


def _text(message: bytes, wanted: int) -> str:
    return _utf8(b"".join(_all(message, wanted)[-1:]))


def _utf8(value: bytes) -> str:
    return value.decode("utf-8")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields with a length: texts, bytes, messages (protobuf.dev, encoding)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(message):
            raise ValueError("the kubelet's answer is not a message of its pod-resources API")
        if kind == 2:
            yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for position in range(10):
        if at + position >= len(message):
            break
        byte = message[at + position]
        value |= (byte & 0x7F) << (7 * position)
        if not byte & 0x80:
            return value, at + position + 1
    raise ValueError("the kubelet's answer ends within a number")


def _call(path: Path) -> bytes:
    until_s = time.monotonic() + TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        # Windows for the whole answer, so that none has to be enlarged.
        settings = struct.pack(">HIHI", 0x2, 0, 0x4, ANSWER_MAX)  # no push; the window of each stream
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", ANSWER_MAX))
            + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_literal(*each) for each in _REQUEST.items()))
            + _frame(_DATA, _END_STREAM, 1, bytes(5))  # an empty message, not compressed
        )
        data = bytearray()
        ended = False
        while not ended:
            kind, flags, stream, payload = _next_frame(connection, until_s)
            if kind == _SETTINGS and not flags & _ACK:
                connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                connection.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind == _GOAWAY or (kind == _RST_STREAM and stream == 1):
                raise OSError("the kubelet ended the call")
            elif stream == 1 and kind in (_DATA, _HEADERS):
                if kind == _DATA:
                    data += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
                ended = bool(flags & _END_STREAM)
            if len(data) > ANSWER_MAX:
                raise OSError(f"the kubelet's answer is over {ANSWER_MAX} bytes")
    if len(data) < 5 or data[0] or len(data) != 5 + int.from_bytes(data[1:5], "big"):
        raise OSError("the kubelet's answer has no message: it may not support pod-resources API v1")
    return bytes(data[5:])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is in no table (RFC 7541, 6.2.2), shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _next_frame(connection: socket.socket, until_s: float) -> tuple[int, int, int, bytes]:
    head = _receive(connection, 9, until_s)
    size = int.from_bytes(head[:3], "big")
    if size > _FRAME_MAX:
        raise OSError("the kubelet's socket does not speak HTTP/2")
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream & 0x7FFFFFFF, _receive(connection, size, until_s)


def _receive(connection: socket.socket, size: int, until_s: float) -> bytes:
    found = b""
    while len(found) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer from the kubelet within {TIMEOUT_S:g} s")
        connection.settimeout(left_s)
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the kubelet closed the connection")
        found += part
    return found
