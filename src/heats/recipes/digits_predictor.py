"""The digits model as MLflow serves it ("models from code").

This file is copied into the registered model: it stands on its own and imports nothing of heats.
"""

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from safetensors.torch import load_file
from torch import nn

NUM_PIXELS, NUM_CLASSES, MAX_PIXEL = 64, 10, 16.0


def network(hidden: int) -> nn.Sequential:
    """The MLP of digits.py; its dropout does nothing here, but takes a place in the numbering."""
    return nn.Sequential(
        *(nn.Linear(NUM_PIXELS, hidden), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout()),
        nn.Linear(hidden, NUM_CLASSES),
    )


class DigitsClassifier(PythonModel):
    """Names the digit in each image."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the checkpoint that was registered."""
        checkpoint = Path(context.artifacts["checkpoint"])
        architecture = json.loads((checkpoint / "model.json").read_text())
        self.model = network(architecture["hidden"]).eval()
        self.model.load_state_dict(load_file(checkpoint / "model.safetensors"))

    def predict(
        self,
        context: PythonModelContext,
        model_input: np.ndarray,
        params: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """The digit of each image, (n,) int64.

        Args:
            context: Not used; MLflow gives it.
            model_input: Images, (n, 64), pixels from 0 to 16.
            params: Not used.
        """
        images = torch.as_tensor(np.asarray(model_input, dtype=np.float32)) / MAX_PIXEL
        with torch.no_grad():
            digits: np.ndarray = self.model(images).argmax(dim=1).numpy()
        return digits


mlflow.models.set_model(DigitsClassifier())
