"""`remediator serve`: receive alerts, write them to the ledger, answer within milliseconds."""
