"""What a host's gateway makes of a central one that gives no answer."""

import asyncio
from pathlib import Path

from gpuwarden.gateway.operations import Inputs
from gpuwarden.gateway.upstream import Answer, CentralUpstream

INPUTS = Inputs(worker="w1", job_id=1, attempt=1, incarnation="i1")


def test_request_after_the_stop_signal_is_repeated_by_its_worker(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token\n")
    upstream = CentralUpstream("http://127.0.0.1:1", token, ca_file=None)

    async def ask() -> Answer:
        await upstream.close()
        return await upstream.carry_out(INPUTS, host="box1", request_id="")

    assert asyncio.run(ask()).status == 503
