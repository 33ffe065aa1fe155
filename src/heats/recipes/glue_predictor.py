"""The GLUE model as MLflow serves it ("models from code").

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


class GlueModel(PythonModel):
    """Names the class of each text or pair of texts, and how sure it is; or gives its score."""

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
        """A frame with one row for each: `label` and `probability`, or `score` of a regression.

        Args:
            context: Not used; MLflow gives it.
            model_input: A frame with one column of texts, or two, in the order of the task.
            params: Not used.
        """
        columns = [model_input[name].astype(str).tolist() for name in model_input.columns]
        outputs = []
        for start in range(0, len(model_input), BATCH_SIZE):
            batch = self.tokenizer(
                *(column[start : start + BATCH_SIZE] for column in columns),
                truncation=True,
                padding=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                outputs.append(self.model(**batch).logits)
        logits = torch.cat(outputs)
        if self.model.config.num_labels == 1:
            return pd.DataFrame({"score": logits[:, 0].tolist()})
        best = logits.softmax(dim=-1).max(dim=-1)
        names = [self.model.config.id2label[index] for index in best.indices.tolist()]
        return pd.DataFrame({"label": names, "probability": best.values.tolist()})


mlflow.models.set_model(GlueModel())
