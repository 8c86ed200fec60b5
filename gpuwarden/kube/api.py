"""Clients of the Kubernetes API, from the official package, and its errors.

The package `kubernetes` takes 0.4 s to import, so a call imports it.

    client = api.connect()
    with api.request("list pods"):
        pods = kubernetes.client.CoreV1Api(client).list_namespaced_pod("default")
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from gpuwarden.errors import GpuwardenError

TIMEOUT_S: Final = 10.0
"""Timeout of a request that sets none, seconds. A watch passes its own `_request_timeout`."""

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""A pod's service account. The client rereads its token."""

CONFLICTS_MAX: Final = 4
"""Retries of a patch if the object changed meanwhile."""

T = TypeVar("T")

_DEFAULT_KUBECONFIG: Final = Path("~/.kube/config")

_ADVICE: Final[Mapping[int, str]] = {
    401: "the token or certificate is not valid or has expired: check the service account or the kubeconfig",
    403: "grant the account this verb in its Role or ClusterRole",
    410: "the resource version is too old: list again",
    429: "try again later",
}


class KubeError(GpuwardenError):
    """A request failed. `status` is None without an answer, `cause` one such as `DisruptionBudget`."""

    def __init__(
        self, message: str, *, status: int | None = None, cause: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.retry_after_s = retry_after_s

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status is None or self.status == 429 or self.status >= 500


def connect(kubeconfig: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Return a `kubernetes.client.ApiClient`; nothing is sent.

    Uses the kubeconfig given here or by `$KUBECONFIG`, else a pod's service account, else `~/.kube/config`.

    Raises:
        GpuwardenError: the package or a valid configuration is missing.
    """
    try:
        from kubernetes import client, config  # noqa: PLC0415
    except ImportError as error:
        raise GpuwardenError(f"{error}: pip install 'gpuwarden[kubernetes]'") from None

    class Client(client.ApiClient):  # type: ignore[misc]
        def call_api(self, *args: Any, **options: Any) -> Any:
            if options.get("_request_timeout") is None:
                options["_request_timeout"] = timeout_s
            return super().call_api(*args, **options)

    found = client.Configuration()
    found.retries = False  # callers decide, and a stopped API is known at once
    named = kubeconfig or _named_by_environment()
    try:
        if named is None and (ACCOUNT / "token").exists():
            config.load_incluster_config(found)
        else:
            path = str((named or _DEFAULT_KUBECONFIG).expanduser())
            config.load_kube_config(path, client_configuration=found, persist_config=False)
    except Exception as error:  # noqa: BLE001 - a kubeconfig may hold anything
        why = f"{type(error).__name__}: {error}"
        raise GpuwardenError(
            f"no access to a Kubernetes API: {why}; run in a pod with a service account, or set KUBECONFIG"
        ) from None
    return Client(found)


def _named_by_environment() -> Path | None:
    return Path(named) if (named := os.environ.get("KUBECONFIG")) else None


@contextmanager
def request(action: str) -> Iterator[None]:
    """Turn errors of requests and watches into KubeError. `action` is what failed, such as "list pods"."""
    from kubernetes.client import ApiException  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    try:
        yield
    except ApiException as error:
        raise _refused(action, error) from None
    except (HTTPError, OSError) as error:
        raise KubeError(f"cannot {action}: no answer from the Kubernetes API: {error}") from None


def retry_conflicts(change: Callable[[], T]) -> T:
    """Result of `change`, which reads and patches. Tried again if another writer was between the two."""
    for _ in range(CONFLICTS_MAX):
        try:
            return change()
        except KubeError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
    return change()


def read_json(response: Any) -> Any:
    """Body of a response to a request with `_preload_content=False`, which makes no slow models.

    Raises:
        kubernetes.client.ApiException: an HTTP error. `request` turns it into a KubeError.
        ValueError: no JSON.
    """
    from kubernetes.client import ApiException  # noqa: PLC0415

    body = response.read()
    if not 200 <= response.status <= 299:
        raise ApiException(http_resp=response)
    return json.loads(body)


def _refused(action: str, error: Any) -> KubeError:
    said = _status_of(error.body)
    details = said.get("details") or {}
    causes = details.get("causes") or [{}]
    wait = details.get("retryAfterSeconds") or (error.headers or {}).get("Retry-After")
    advice = _ADVICE.get(error.status, "")
    why = said.get("message") or error.reason or "no reason given"
    why = " ".join([why, *(each["message"] for each in causes if each.get("message", why) not in why)])
    return KubeError(
        f"cannot {action}: HTTP {error.status}: {why}" + (f"; {advice}" if advice else ""),
        status=error.status,
        cause=causes[0].get("reason"),
        retry_after_s=float(wait) if wait is not None and str(wait).isdigit() else None,
    )


def _status_of(body: Any) -> dict[str, Any]:
    try:
        found = json.loads(body or "")
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
