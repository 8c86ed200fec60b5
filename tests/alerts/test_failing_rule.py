"""A rule that cannot be evaluated is told of, by a real Prometheus that scrapes itself."""

from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml

from deploy import parts
from deploy.check import CHECKOUT
from tests.asking import PLAIN
from tests.remediator.listening import listening
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

TOLD: Final = 'ALERTS{alertname="GpuwardenRuleFailing"}'
BROKEN: Final = 'group(up) * on () {__name__=~"up|scrape_duration_seconds"}'


def groups(folder: Path, **expressions: str) -> Path:
    """Rules of one group each, which record something."""
    file = folder / "broken.rules.yaml"
    found = [{"name": name, "rules": [{"record": f"{name}:one", "expr": expr}]} for name, expr in expressions.items()]
    file.write_text(yaml.safe_dump({"groups": found}))
    return file


def test_the_group_that_fails_is_told_and_no_other(tmp_path: Path) -> None:
    """As soon as two scrapes have brought it: whether it lasts for five minutes the rules' own tests say."""
    rules = groups(tmp_path, gpuwarden_broken=BROKEN, gpuwarden_sound="vector(1)", theirs=BROKEN)
    config = tmp_path / "prometheus.yml"
    command = [
        *(str(parts.find("prometheus")), f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"),
        *("--web.listen-address=127.0.0.1:0", "--log.format=json", "--web.enable-lifecycle"),
    ]

    def written(*targets: str) -> None:
        every = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"}
        scrape = [{"job_name": "prometheus", "static_configs": [{"targets": list(targets)}]}]
        files = [str(rules), str(CHECKOUT / "alerts" / "evaluation.rules.yaml")]
        config.write_text(yaml.safe_dump({"global": every, "rule_files": files, "scrape_configs": scrape}))

    written()
    with listening(command, tmp_path / "log") as url:

        def told() -> list[str]:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": TOLD}, trust_env=False, verify=PLAIN)
            found = answer.raise_for_status().json()["data"]["result"]
            return sorted(each["metric"]["rule_group"].rpartition(";")[2] for each in found)

        # What it listens at is known only now.
        written(url.removeprefix("http://"))
        httpx.post(f"{url}/-/reload", trust_env=False, verify=PLAIN).raise_for_status()

        eventually(
            lambda: told() == ["gpuwarden_broken"], "the group that fails is told", within_s=60, log=lambda: str(told())
        )
