"""The ledger on disk, and MLflow fed from it."""
