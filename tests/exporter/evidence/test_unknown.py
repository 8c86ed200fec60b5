"""Counts of unknown values."""

import pytest

from exporter.evidence.unknown import UnknownCounter

pytestmark = pytest.mark.pure


def test_samples_are_counted_by_name_value_and_reason() -> None:
    unknown = UnknownCounter()
    unknown.add("a", "ram", "unreadable")
    before = unknown.counts
    unknown.add("a", "ram", "unreadable")
    unknown.add("a", "gpu", "unreadable")

    assert before == {("a", "ram", "unreadable"): 1}
    assert unknown.counts == {("a", "ram", "unreadable"): 2, ("a", "gpu", "unreadable"): 1}


def test_counts_of_removed_containers_are_dropped() -> None:
    unknown = UnknownCounter()
    unknown.add("a", "ram", "unreadable")
    unknown.add("b", "ram", "unreadable")

    unknown.keep({"b"})

    assert unknown.counts == {("b", "ram", "unreadable"): 1}
