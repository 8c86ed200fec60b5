"""`gpuwarden run --notify` refuses at its start what could not be sent at its end."""

import sys

import pytest

from gpuwarden.notify.address import AddressError
from gpuwarden.notify.person import url_of


def test_a_missing_apprise_is_said_before_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert url_of("ntfys://ntfy.example.com/own") == "ntfys://ntfy.example.com/own"
    monkeypatch.setitem(sys.modules, "apprise", None)

    with pytest.raises(AddressError, match=r"pip install 'gpuwarden\[notify\]'"):
        url_of("ntfys://ntfy.example.com/own")
