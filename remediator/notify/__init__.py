"""Notifications of people, sent by `remediator serve`."""
