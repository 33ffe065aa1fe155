"""heats: hyperparameter sweeps that race. See README.md."""
