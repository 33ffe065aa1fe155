"""XGBoost: gradient boosted trees, each worker with its share of the rows.

Its workers are joined by XGBoost's own communicator: `backend.framework=xgboost`.
"""

from __future__ import annotations

from typing import Any

import ray.train
import xgboost
from ray.train.xgboost import RayTrainReportCallback

from heats.recipes.frameworks import common


def train(config: dict[str, Any]) -> None:
    """Train on every rank, reporting metrics and a checkpoint after each round.

    Args:
        config: `lr`, `epochs` (rounds of boosting), `weight_decay` (of leaves, L2), `max_depth`,
            `seed`.
    """
    train_rows, val_rows = (_matrix(*rows) for rows in common.rows())
    model, rounds_done = None, 0
    if checkpoint := ray.train.get_checkpoint():
        model = RayTrainReportCallback.get_model(checkpoint)
        rounds_done = model.num_boosted_rounds()
    names = {"train_loss": "train-mlogloss", "val_loss": "val-mlogloss", "val_error": "val-merror"}
    xgboost.train(
        {
            "objective": "multi:softprob",
            "num_class": 10,
            "eval_metric": ["mlogloss", "merror"],
            "eta": config["lr"],
            "max_depth": config["max_depth"],
            "lambda": config["weight_decay"],
            "seed": config["seed"],
            "nthread": 1,
        },
        train_rows,
        num_boost_round=config["epochs"] - rounds_done,
        evals=[(train_rows, "train"), (val_rows, "val")],
        xgb_model=model,
        verbose_eval=False,
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
    predicted = model.predict(xgboost.DMatrix(images)).argmax(axis=1)
    return {"val_accuracy": float((predicted == labels).mean())}


def _matrix(images: Any, labels: Any) -> xgboost.DMatrix:
    return xgboost.DMatrix(images, labels, nthread=1)
