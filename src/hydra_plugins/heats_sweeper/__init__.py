"""Makes `hydra/sweeper=heats` known to every Hydra app."""
