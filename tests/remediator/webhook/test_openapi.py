"""The real program conforms to `/openapi.json`: schemathesis generates valid and invalid calls."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from tests.remediator.webhook.test_app import ALERTS, ALERTS_MAX, AUTHORIZED, Served, serving

EXAMPLES: Final = settings(
    max_examples=40,
    phases=(Phase.generate,),
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""The same calls at each run."""

REFUSALS: Final = SchemathesisConfig.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 413]}}}
)
"""Statuses of invalid calls. schemathesis does not expect 413 for a list that is too long."""

PAGES: Final = ("/metrics", "/-/healthy", "/-/ready")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process that survives all calls and logs no error."""
    with serving(tmp_path_factory.mktemp("api")) as (found, process):
        yield found
        assert process.poll() is None
        log = found.log.read_text()
        assert "Traceback" not in log
        assert '"level": "error"' not in log


@pytest.fixture(scope="module")
def described(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=REFUSALS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
@pytest.mark.slow
def test_webhook_conforms_to_its_description(served: Served, described: Any, mode: GenerationMode) -> None:
    """A valid body is accepted, any other refused, with the described statuses, headers and bodies."""
    statuses = set()

    @EXAMPLES
    @given(case=described[ALERTS]["POST"].as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        before = served.kept()
        answer = case.call_and_validate(headers=AUTHORIZED)
        statuses.add(answer.status_code)
        if answer.status_code == 202:
            counts = answer.json()
            assert counts["accepted"] + counts["refused"] == len(case.body["alerts"])
            assert served.kept() == before + len(case.body["alerts"])
        else:
            assert served.kept() == before

    call()

    if mode is GenerationMode.POSITIVE:
        assert statuses == {202}
    else:  # schemathesis decides which bodies are valid, since a list takes any alert
        assert 400 in statuses


@pytest.mark.parametrize("path", PAGES)
def test_pages_conform_to_their_description(described: Any, path: str) -> None:
    @settings(EXAMPLES, max_examples=10)
    @given(case=described[path]["GET"].as_strategy())
    def call(case: Any) -> None:
        case.call_and_validate()

    call()


def test_every_path_is_described(described: Any) -> None:
    assert set(described) == {ALERTS, "/api/v1/notifications", *PAGES}


REFUSED: Final = {
    "no token": ({}, b'{"alerts": []}', 401),
    "no payload": (AUTHORIZED, b"[]", 400),
    "too many alerts": (AUTHORIZED, b'{"alerts": [' + b",".join([b"{}"] * (ALERTS_MAX + 1)) + b"]}", 413),
    "too many bytes": (AUTHORIZED, b" " * 2**17, 413),
}


@pytest.mark.parametrize(("headers", "body", "status"), REFUSED.values(), ids=REFUSED)
def test_every_refusal_is_described(
    served: Served, described: Any, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = served.post(content=body, headers=headers)

    assert answer.status_code == status
    assert str(status) in described.raw_schema["paths"][ALERTS]["post"]["responses"]
    described[ALERTS]["POST"].validate_response(answer)
