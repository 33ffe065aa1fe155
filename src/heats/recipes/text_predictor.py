"""The text classification model as MLflow serves it ("models from code").

This file is copied into the registered model: it stands on its own and imports nothing of heats.
"""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH_SIZE = 32


class TextClassifier(PythonModel):
    """Names the class of each text, and how sure it is."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the checkpoint that was registered."""
        source = Path(context.artifacts["checkpoint"], "checkpoint")
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.model = AutoModelForSequenceClassification.from_pretrained(source).eval()

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """A frame with the columns `label` and `probability`, one row for each text.

        Args:
            context: Not used; MLflow gives it.
            model_input: A frame with the column `text`.
            params: Not used.
        """
        texts = [str(text) for text in model_input["text"]]
        labels: list[str] = []
        probabilities: list[float] = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = self.tokenizer(
                texts[start : start + BATCH_SIZE],
                truncation=True,
                padding=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                best = self.model(**batch).logits.softmax(dim=-1).max(dim=-1)
            labels += [self.model.config.id2label[index] for index in best.indices.tolist()]
            probabilities += best.values.tolist()
        return pd.DataFrame({"label": labels, "probability": probabilities})


mlflow.models.set_model(TextClassifier())
