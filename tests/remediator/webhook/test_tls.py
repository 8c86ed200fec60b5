"""The webhook behind TLS: real certificates and real clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, authority
from tests.gpuwarden.http.test_web_config import tls
from tests.remediator.alertmanager import alertmanager, send_alerts
from tests.remediator.builders import LABELS
from tests.remediator.webhook.test_app import ALERTS, AUTHORIZED, Served, serving
from tests.waiting import eventually


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[Served]:
    """A webhook that requires client certificates."""
    config = tls(ours, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(ours.own.cert))
    with serving(tmp_path_factory.mktemp("serve"), web=config) as (served, _):
        yield served


@pytest.mark.needs_parts
def test_real_alertmanager_delivers_over_mutual_tls(mutual: Served, ours: Authority, tmp_path: Path) -> None:
    before = mutual.kept()
    files = {"ca_file": ours.own.cert, "cert_file": ours.client.cert, "key_file": ours.client.key}
    token = tmp_path / "token"
    token.write_text(AUTHORIZED["Authorization"].removeprefix("Bearer "))
    http = {
        "authorization": {"credentials_file": str(token)},
        "tls_config": {name: str(path) for name, path in files.items()},
    }
    url = mutual.url.replace("http://", "https://") + ALERTS
    with alertmanager(tmp_path / "alertmanager", url=url, http_config=http) as its:
        send_alerts(its, LABELS)

        eventually(lambda: mutual.kept() == before + 1, "it is delivered")
