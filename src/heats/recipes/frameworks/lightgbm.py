"""LightGBM: gradient boosted trees, each worker with its share of the rows.

Its workers are joined by LightGBM's own network: `backend.framework=lightgbm`.
"""

from __future__ import annotations

from typing import Any

import lightgbm
import ray.train
from ray.train.lightgbm import RayTrainReportCallback, get_network_params

from heats.recipes.frameworks import common


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each round.

    Args:
        config: `lr`, `epochs` (rounds of boosting), `weight_decay` (of leaves, L2), `num_leaves`,
            `seed`.
    """
    (images, labels), _ = common.rows()
    _, (val_images, val_labels) = common.rows(rank=0, world_size=1)
    train_rows = lightgbm.Dataset(images, labels)
    val_rows = lightgbm.Dataset(val_images, val_labels, reference=train_rows)
    model, rounds_done = None, 0
    if checkpoint := ray.train.get_checkpoint():
        model = RayTrainReportCallback.get_model(checkpoint)
        rounds_done = model.num_trees() // model.num_model_per_iteration()
    names = {"val_loss": "val-multi_logloss", "val_error": "val-multi_error"}
    lightgbm.train(
        {
            "objective": "multiclass",
            "num_class": 10,
            "metric": ["multi_logloss", "multi_error"],
            "learning_rate": config["lr"],
            "num_leaves": config["num_leaves"],
            "lambda_l2": config["weight_decay"],
            "seed": config["seed"],
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": 1,
            "verbose": -1,
            "tree_learner": "data",
            "pre_partition": True,
            **get_network_params(),
        },
        train_rows,
        num_boost_round=config["epochs"] - rounds_done,
        valid_sets=[val_rows],
        valid_names=["val"],
        init_model=model,
        callbacks=[
            RayTrainReportCallback(
                metrics=names,
                frequency=1,
                checkpoint_at_end=False,  # The last round has one.
                results_postprocessing_fn=common.with_accuracy,
            )
        ],
    )


def evaluate(config: dict[str, Any], checkpoint_dir: str) -> dict[str, float]:
    """`val_accuracy` of a checkpoint, computed anew on the validation data."""
    del config
    model = RayTrainReportCallback.get_model(ray.train.Checkpoint(checkpoint_dir))
    _, (images, labels) = common.rows(rank=0, world_size=1)
    predicted: Any = model.predict(images)
    return {"val_accuracy": float((predicted.argmax(axis=1) == labels).mean())}
