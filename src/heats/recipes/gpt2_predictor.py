"""A GPT-2 that goes on with a text, as MLflow serves it ("models from code").

This file is copied into the registered model: it stands on its own and imports nothing of heats.
"""

import base64
import json
import warnings
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import tiktoken
import torch
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import GPT2Config, GPT2LMHeadModel

ENCODING_FILE = "encoding.json"
DEFAULTS: dict[str, Any] = {"max_new_tokens": 32, "temperature": 0.0, "seed": 0}


class TextGenerator(PythonModel):
    """Goes on with each prompt."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the checkpoint that was registered."""
        self.model = load_model(context.artifacts["checkpoint"])
        self.encoding = load_encoding(context.artifacts["checkpoint"])

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """A frame with the column `text`: what follows each prompt, which is not repeated.

        Args:
            context: Not used; MLflow gives it.
            model_input: A frame with the column `prompt`.
            params: `max_new_tokens`; `temperature` (0: always the most likely token), `seed`.
        """
        chosen = DEFAULTS | (params or {})
        texts = [self._continued(str(prompt), **chosen) for prompt in model_input["prompt"]]
        return pd.DataFrame({"text": texts})

    @torch.no_grad()
    def _continued(self, prompt: str, *, max_new_tokens: int, temperature: float, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        end = self.encoding.eot_token
        ids = [end, *self.encoding.encode_ordinary(prompt)]
        start = len(ids)
        for _ in range(max_new_tokens):
            window = torch.tensor([ids[-self.model.config.n_positions :]])
            logits = self.model(input_ids=window).logits[0, -1]
            if temperature > 0:
                probabilities = (logits / temperature).softmax(dim=-1)
                chosen = int(torch.multinomial(probabilities, 1, generator=generator))
            else:
                chosen = int(logits.argmax())
            if chosen == end:
                break
            ids.append(chosen)
        return self.encoding.decode(ids[start:])


def load_model(checkpoint_dir: str) -> GPT2LMHeadModel:
    """The model of a whole checkpoint, or of one that several ranks wrote in parts."""
    folder = _folder(checkpoint_dir)
    if (folder / "model.safetensors").exists():
        return GPT2LMHeadModel.from_pretrained(folder)  # In evaluation mode.
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(folder))
    model.train(False)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # Those of the embeddings.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # As is wanted.
        load({"model": weights}, checkpoint_id=folder, no_dist=True)
    return model


def load_encoding(checkpoint_dir: str) -> tiktoken.Encoding:
    """The encoding that the model was trained with."""
    content = json.loads((_folder(checkpoint_dir) / ENCODING_FILE).read_text(encoding="utf-8"))
    ranks = {base64.b64decode(each): rank for each, rank in content.pop("mergeable_ranks").items()}
    return tiktoken.Encoding(mergeable_ranks=ranks, **content)


def _folder(checkpoint_dir: str) -> Path:
    """That of the Hugging Face Trainer is a folder within the checkpoint."""
    within = Path(checkpoint_dir, "checkpoint")
    return within if within.is_dir() else Path(checkpoint_dir)


mlflow.models.set_model(TextGenerator())
