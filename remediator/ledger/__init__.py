"""The ledger: alerts, episodes, intents, orders and the journal, written before anything is done."""
