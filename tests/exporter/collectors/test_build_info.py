"""Version and commit of this gpuwarden."""

import json
import platform

import pytest

from exporter.collectors import build_info
from gpuwarden import __version__

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def direct_url(**vcs_info: str) -> str:
    """The file that pip writes for a Git repository (PEP 610)."""
    return json.dumps({"url": "https://example.org/gpuwarden.git", "vcs_info": {"vcs": "git", **vcs_info}})


@pytest.mark.parametrize(
    ("environ", "written", "revision"),
    [
        pytest.param({}, direct_url(commit_id=COMMIT), COMMIT, id="installed from a repository"),
        pytest.param(
            {"GPUWARDEN_REVISION": "feedbee"}, direct_url(commit_id=COMMIT), "feedbee", id="image with a revision"
        ),
        pytest.param({"GPUWARDEN_REVISION": ""}, direct_url(commit_id=COMMIT), COMMIT, id="image without a revision"),
        pytest.param({}, None, "", id="from a package index"),
        pytest.param({}, json.dumps({"url": "file:///src", "dir_info": {"editable": True}}), "", id="from a folder"),
        pytest.param({}, direct_url(), "", id="no commit"),
        pytest.param({}, "{", "", id="half a file"),
        pytest.param({}, "[]", "", id="another shape"),
        pytest.param({"GPUWARDEN_REVISION": 'main"} 1'}, None, "", id="no commit in the environment"),
    ],
)
def test_known_commit_is_published(environ: dict[str, str], written: str | None, revision: str) -> None:
    assert build_info.revision(environ, written) == revision


def test_build_info_has_version_and_python() -> None:
    here = build_info.here()

    assert (here.version, here.python) == (__version__, platform.python_version())
