"""The webhook behind TLS: real certificates and real clients."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority, Pair, authority
from tests.gpuwarden.http.test_web_config import tls
from tests.remediator.alertmanager import alertmanager, tell
from tests.remediator.builders import LABELS, payload, sent
from tests.remediator.webhook.test_app import ALERTS, AUTHORIZED, Served, serving
from tests.waiting import eventually


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "another")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[Served]:
    """It shows its certificate, and asks callers for none."""
    with serving(tmp_path_factory.mktemp("serve"), web=tls(ours)) as (served, _):
        yield served


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[Served]:
    """It asks callers for theirs too."""
    wants = tls(ours, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(ours.own.cert))
    with serving(tmp_path_factory.mktemp("serve"), web=wants) as (served, _):
        yield served


def post(served: Served, trusts: Authority, shows: Pair | None = None) -> int:
    """The answer to one alert over HTTPS; raises httpx.TransportError where no connection comes about."""
    context = ssl.create_default_context(cafile=trusts.own.cert)
    if shows is not None:
        context.load_cert_chain(shows.cert, shows.key)
    url = served.url.replace("http://", "https://") + ALERTS
    with httpx.Client(verify=context, trust_env=False, timeout=20) as client:
        return client.post(url, json=payload(sent()), headers=AUTHORIZED).status_code


def test_tls_alerts_need_the_right_authority(encrypted: Served, ours: Authority, another: Authority) -> None:
    before = encrypted.kept()

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        post(encrypted, another)
    assert encrypted.kept() == before
    assert post(encrypted, ours) == 202
    assert encrypted.kept() == before + 1
    assert '"web": "https, ' in encrypted.log.read_text()


def test_behind_tls_nothing_is_answered_without_it(encrypted: Served) -> None:
    with pytest.raises(httpx.TransportError):
        encrypted.post(payload(sent()))

    assert "Traceback" not in encrypted.log.read_text()


def test_a_caller_needs_a_certificate(mutual: Served, ours: Authority, another: Authority) -> None:
    before = mutual.kept()

    for shows in (None, another.client, another.server):
        with pytest.raises(httpx.TransportError):
            post(mutual, ours, shows)

    assert mutual.kept() == before
    assert post(mutual, ours, ours.client) == 202
    assert mutual.kept() == before + 1
    assert "Traceback" not in mutual.log.read_text()


@pytest.mark.needs_parts
def test_a_real_alertmanager_delivers_over_mutual_tls(mutual: Served, ours: Authority, tmp_path: Path) -> None:
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
        tell(its, LABELS)

        eventually(lambda: mutual.kept() == before + 1, "it is delivered")
