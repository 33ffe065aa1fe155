"""The image classification model as MLflow serves it ("models from code").

This file is copied into the registered model: it stands on its own and imports nothing of heats.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

BATCH_SIZE = 32


class ImageClassifier(PythonModel):
    """Names the class of each image, and how sure it is."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the checkpoint that was registered."""
        source = Path(context.artifacts["checkpoint"], "checkpoint")
        self.processor = AutoImageProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
        self.model = AutoModelForImageClassification.from_pretrained(source).eval()

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """A frame with the columns `label` and `probability`, one row for each image.

        Args:
            context: Not used; MLflow gives it.
            model_input: A frame with the column `image`: nested lists of numbers from 0 to 255, of
                any height and width: height x width (grey), or height x width x 3 (RGB).
            params: Not used.
        """
        images = [to_image(nested) for nested in model_input["image"]]
        labels: list[str] = []
        probabilities: list[float] = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = self.processor(images[start : start + BATCH_SIZE], return_tensors="pt")
            with torch.no_grad():
                best = self.model(**batch).logits.softmax(dim=-1).max(dim=-1)
            labels += [self.model.config.id2label[index] for index in best.indices.tolist()]
            probabilities += best.values.tolist()
        return pd.DataFrame({"label": labels, "probability": probabilities})


def to_image(nested: Any) -> Image.Image:
    """An image of nested lists, or of arrays of arrays, which MLflow may make of them."""
    if isinstance(nested, np.ndarray) and nested.dtype == object:
        nested = [np.stack(row) if row.dtype == object else row for row in nested]
    return Image.fromarray(np.asarray(nested, dtype=np.uint8))


mlflow.models.set_model(ImageClassifier())
