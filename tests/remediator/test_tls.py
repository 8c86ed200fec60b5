"""The webhook behind TLS: real certificates, real clients, and what is said of files that will not do."""

import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from gpuwarden.errors import GpuwardenError
from remediator import tls
from remediator.settings.settings import ServeSettings
from tests.certificates import Authority, Pair, authority, openssl
from tests.remediator.alertmanager import alertmanager, tell
from tests.remediator.builders import LABELS, payload, sent
from tests.remediator.webhook.test_app import ALERTS, AUTHORIZED, Served, failing, house, serving
from tests.waiting import eventually


def served_with(pair: Pair) -> list[str]:
    return ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "another")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[Served]:
    """It shows its certificate, and asks callers for none."""
    with serving(tmp_path_factory.mktemp("serve"), *served_with(ours.server)) as (served, _):
        yield served


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[Served]:
    """It asks callers for theirs too."""
    client_ca = ["--tls-client-ca-file", str(ours.own.cert)]
    with serving(tmp_path_factory.mktemp("serve"), *served_with(ours.server), *client_ca) as (served, _):
        yield served


def post(served: Served, trusts: Authority, shows: Pair | None = None) -> int:
    """The answer to one alert over HTTPS; raises httpx.TransportError where no connection comes about."""
    context = ssl.create_default_context(cafile=trusts.own.cert)
    if shows is not None:
        context.load_cert_chain(shows.cert, shows.key)
    url = served.url.replace("http://", "https://") + ALERTS
    with httpx.Client(verify=context, trust_env=False, timeout=20) as client:
        return client.post(url, json=payload(sent()), headers=AUTHORIZED).status_code


def test_an_alert_over_tls_is_accepted_from_who_trusts_its_authority_and_no_other(
    encrypted: Served, ours: Authority, another: Authority
) -> None:
    before = encrypted.kept()

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        post(encrypted, another)
    assert encrypted.kept() == before
    assert post(encrypted, ours) == 202
    assert encrypted.kept() == before + 1
    assert '"scheme": "https"' in encrypted.log.read_text()


def test_behind_tls_nothing_is_answered_without_it(encrypted: Served) -> None:
    with pytest.raises(httpx.TransportError):
        encrypted.post(payload(sent()))

    assert "Traceback" not in encrypted.log.read_text()


def test_a_caller_without_a_certificate_of_the_right_authority_reaches_nothing(
    mutual: Served, ours: Authority, another: Authority
) -> None:
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


# --- what it cannot start with


def gone(pair: Pair) -> None:
    pair.cert.unlink()


def key_gone(pair: Pair) -> None:
    pair.key.unlink()


def a_folder(pair: Pair) -> None:
    pair.key.unlink()
    pair.key.mkdir()


def of_another(pair: Pair) -> None:
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", pair.key)


def no_certificate(pair: Pair) -> None:
    shutil.copy(pair.key, pair.cert)


def no_key(pair: Pair) -> None:
    shutil.copy(pair.cert, pair.key)


def with_a_password(pair: Pair) -> None:
    openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", pair.key.with_name("encrypted"))
    pair.key.with_name("encrypted").replace(pair.key)


BROKEN: dict[str, tuple[Callable[[Pair], object], str]] = {
    "no certificate file": (gone, "cert.pem cannot be read (No such file or directory)"),
    "no key file": (key_gone, "key.pem cannot be read (No such file or directory)"),
    "a folder": (a_folder, "key.pem cannot be read (Is a directory)"),
    "the key of another": (of_another, "is not the key of the certificate in"),
    "a key as certificate": (no_certificate, "cert.pem holds no certificate in PEM"),
    "a certificate as key": (no_key, "cannot be used"),
    "an encrypted key": (with_a_password, "key.pem is encrypted: write it without a password"),
}


@pytest.mark.parametrize(("broken", "says"), BROKEN.values(), ids=BROKEN)
def test_a_certificate_or_key_that_will_not_do_is_refused_with_what_is_wrong_with_it(
    tmp_path: Path, ours: Authority, broken: Callable[[Pair], object], says: str
) -> None:
    pair = Pair(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    shutil.copy(ours.server.cert, pair.cert)
    shutil.copy(ours.server.key, pair.key)
    assert tls.options(cert_file=pair.cert, key_file=pair.key, client_ca_file=None)
    broken(pair)

    with pytest.raises(GpuwardenError, match=r"^the TLS ") as refused:
        tls.options(cert_file=pair.cert, key_file=pair.key, client_ca_file=None)

    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read (No such file or directory)"), ("wedged", "holds no certificate in PEM")],
    ids=["no file", "no certificate"],
)
def test_authorities_that_will_not_do_are_refused_with_what_is_wrong_with_them(
    tmp_path: Path, ours: Authority, text: str | None, says: str
) -> None:
    file = tmp_path / "authorities.pem"
    if text is not None:
        file.write_text(text)

    with pytest.raises(GpuwardenError) as refused:
        tls.options(cert_file=ours.server.cert, key_file=ours.server.key, client_ca_file=file)

    assert f"the TLS client CA file {file} {says}" in str(refused.value)


def test_a_file_that_will_not_do_is_one_clear_line_and_1(tmp_path: Path, ours: Authority, another: Authority) -> None:
    mismatched = Pair(cert=ours.server.cert, key=another.server.key)

    code, said = failing("serve", *house(tmp_path / "run"), "--port", "0", *served_with(mismatched))

    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("gpuwarden remediator: the TLS key file ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tls-cert-file", "c"], "--tls-cert-file and --tls-key-file are wanted together"),
        (["--tls-key-file", "k"], "--tls-cert-file and --tls-key-file are wanted together"),
        (["--tls-client-ca-file", "a"], "--tls-client-ca-file wants --tls-cert-file and --tls-key-file"),
    ],
    ids=["no key", "no certificate", "authorities alone"],
)
def test_half_of_what_tls_needs_will_not_do(options: list[str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CliApp.run(ServeSettings, cli_args=["--ledger", "sqlite:////l.db", "--token-file", "t", *options])
