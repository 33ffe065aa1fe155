"""Train a recipe once or sweep over its settings: `python sweep.py --help`."""

from typing import Any

import hydra
from omegaconf import DictConfig

from heats.entry import clear_errors


@clear_errors
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """What the train function returns; the workers of a trial run this, each with its config."""
    train = hydra.utils.instantiate(cfg.recipe, _partial_=True, _convert_="all")
    return train()


if __name__ == "__main__":
    main()
