"""The commands of operators: status, orders, ledger, export, wrangle."""
