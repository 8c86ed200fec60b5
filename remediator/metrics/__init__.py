"""The remediator's own metrics page: ledger and queue."""
