"""One small checkpoint in every format, written without the code that reads them, and the numbers that each stands for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

from ninfer_jax.checkpoints import tiny_path

HK, HV, D, HIDDEN, INNER, VOCAB = (2, 6, 32, 256, 192, 1088)  # three value heads a key head: their reordering is no involution
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": HK,
    "linear_num_value_heads": HV,
    "linear_key_head_dim": D,
    "linear_value_head_dim": D,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
}
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
CHANNELS = 2 * HK * D + HV * D


def attention(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes = {
        "self_attn.q_proj": (256, HIDDEN),
        "self_attn.k_proj": (64, HIDDEN),
        "self_attn.v_proj": (64, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 128),
        "self_attn.q_norm": (64,),
        "self_attn.k_norm": (64,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in (shapes | rest()).items()}


def rest() -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }


def shapes() -> dict[str, tuple[int, ...]]:
    gdn = {
        "in_proj_qkv.weight": (CHANNELS, HIDDEN),
        "in_proj_z.weight": (HV * D, HIDDEN),
        "in_proj_a.weight": (HV, HIDDEN),
        "in_proj_b.weight": (HV, HIDDEN),
        "conv1d.weight": (CHANNELS, 1, 4),
        "A_log": (HV,),
        "dt_bias": (HV,),
        "norm.weight": (D,),
        "out_proj.weight": (HIDDEN, HV * D),
    }
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    found |= {f"layers.0.linear_attn.{name}": shape for name, shape in gdn.items()}
    found |= {f"layers.0.{name}.weight": shape for name, shape in rest().items()}
    found |= attention("layers.1.") | attention("mtp.layers.0.")
    found |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    return found | {f"mtp.{n}.weight": (HIDDEN,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}


def draw(seed: int = 3) -> dict[str, np.ndarray]:
    """Random weights, float32 values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes().items():
        spread = 0.1 if len(shape) == 1 else 0.5 if "conv1d" in name else 1 / np.sqrt(shape[-1])
        middle = 1.0 if "linear_attn.norm" in name else 0.0
        found[name] = rng.normal(middle, spread, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    return found


def matrices(tensors: dict[str, np.ndarray]) -> list[str]:
    """Those that checkpoints in 4 or 8 bits have quantised."""
    return [
        n
        for n, t in tensors.items()
        if t.ndim == 2 and "embed" not in n and "lm_head" not in n and "in_proj_a" not in n and "in_proj_b" not in n
    ]


def read_in_blocks(tensor: Any, rows: int = 37) -> np.ndarray:
    return np.concatenate([tensor.read(a, min(a + rows, tensor.shape[0])) for a in range(0, tensor.shape[0], rows)])


def assert_same(source: Any, meaning: dict[str, np.ndarray], exact: Any = lambda name: True) -> None:
    """The source has just these tensors, and these numbers to the bit, or, not exact, to some 2e-6."""
    assert source.tensors.keys() == meaning.keys()
    for name, expected in meaning.items():
        values = read_in_blocks(source.tensors[name])
        assert source.tensors[name].shape == expected.shape and values.dtype == np.float32, name
        if exact(name):
            np.testing.assert_array_equal(values, expected, err_msg=name)
        else:
            np.testing.assert_allclose(values, expected, rtol=2e-6, atol=2e-7, err_msg=name)


def write(
    folder: Path, stored: dict[str, torch.Tensor], quantization: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> Path:
    """A checkpoint directory with these tensors as they are."""
    folder.mkdir(exist_ok=True)
    named = {n if n.startswith(("lm_head.", "mtp.")) else f"model.language_model.{n}": t.contiguous() for n, t in stored.items()}
    save_file(named, folder / "model.safetensors")
    content = dict(config or CONFIG)
    if quantization is not None:
        content["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(content))
    for name in COPIED:
        shutil.copy(tiny_path() / name, folder / name)
    return folder


def as_bfloat16(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(t).to(torch.bfloat16) for name, t in tensors.items()}


def plain(folder: Path, tensors: dict[str, np.ndarray], dtype: torch.dtype = torch.bfloat16) -> Path:
    return write(folder, {name: torch.from_numpy(t).to(dtype) for name, t in tensors.items()}, None)


def fp8(
    folder: Path, tensors: dict[str, np.ndarray], *, exponents: torch.dtype | None = None, change: Any = None, **config: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """Each block of 128 x 128 has its largest magnitude at 448, or, exponents, below it: scales that are powers of two, stored
    as this type of one byte, 127 more than the exponent."""
    stored, meaning = as_bfloat16(tensors), dict(tensors)
    for name in matrices(tensors):
        weight = tensors[name]
        rows, columns = weight.shape
        scale = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
        codes, values = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                scale[i, j] = np.abs(weight[block]).max() / 448
                if exponents is not None:
                    scale[i, j] = 2.0 ** np.ceil(np.log2(scale[i, j]))
                codes[block] = (weight[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
                values[block] = codes[block].astype(np.float32) * scale[i, j]
        stored[name] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.from_numpy(scale)
        if exponents is not None:
            stored[f"{name}_scale_inv"] = torch.from_numpy((np.log2(scale) + 127).astype(np.uint8)).view(exponents)
        meaning[name] = values
    if change is not None:
        change(stored)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **config}
    return write(folder, stored, quantization), meaning


def bit_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """`[rows, n]` of 0 .. 2 ** bits - 1 -> int32 `[rows, ceil(n * bits / 32)]`: number i from bit i * bits of its row on."""
    stream = ((numbers[..., None] >> np.arange(bits)) & 1).reshape(numbers.shape[0], -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


@dataclasses.dataclass(frozen=True)
class Codes:
    """A matrix as whole numbers: value = scale x (code - zero). group: inputs that share scale and zero."""

    codes: np.ndarray  # [outputs, inputs], 0 .. 2 ** bits - 1
    zeros: np.ndarray  # [outputs, groups], likewise
    scales: np.ndarray  # [outputs, groups], float16
    bits: int

    @property
    def meaning(self) -> np.ndarray:
        outputs, groups = self.scales.shape
        codes = self.codes.reshape(outputs, groups, -1).astype(np.float64) - self.zeros[..., None]
        return (codes * self.scales[..., None].astype(np.float64)).reshape(outputs, -1).astype(np.float32)


def coded(weight: np.ndarray, bits: int, group: int, *, asymmetric: bool = False) -> Codes:
    """group: -1 for a whole row. Zeros of asymmetric codes lie where the least value of a group is code 0."""
    top = 2**bits - 1
    blocks = weight.reshape(weight.shape[0], -1, weight.shape[1] if group == -1 else group).astype(np.float64)
    if asymmetric:
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.int64)
    else:
        scales = (2 * np.abs(blocks).max(-1) / top).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    codes = np.clip(np.rint(blocks / scales[..., None] + zeros[..., None]), 0, top).astype(np.int64)
    codes[0, 0, :2] = 0, top  # both ends, whatever was drawn
    return Codes(codes.reshape(weight.shape), zeros, scales, bits)


def as_gptq(base: str, matrix: Codes, lacks: int) -> dict[str, torch.Tensor]:
    """GPTQ's tensors of one module; lacks: by how much stored zeros are less than the zeros."""
    return {
        f"{base}.qweight": torch.from_numpy(bit_words(matrix.codes, matrix.bits).T.copy()),
        f"{base}.scales": torch.from_numpy(matrix.scales.T.copy()),
        f"{base}.qzeros": torch.from_numpy(bit_words(matrix.zeros.T - lacks, matrix.bits)),
    }


def as_packed(base: str, matrix: Codes, zeros: str | None = None) -> dict[str, torch.Tensor]:
    """compressed-tensors' "pack-quantized" of one module. zeros: "packed", or "int8" as some versions left them."""
    found = {
        f"{base}.weight_packed": torch.from_numpy(bit_words(matrix.codes, matrix.bits)),
        f"{base}.weight_scale": torch.from_numpy(matrix.scales),
        f"{base}.weight_shape": torch.tensor(matrix.codes.shape),
    }
    if zeros == "packed":
        found[f"{base}.weight_zero_point"] = torch.from_numpy(bit_words(matrix.zeros.T, matrix.bits).T.copy())
    if zeros == "int8":
        found[f"{base}.weight_zero_point"] = torch.from_numpy((matrix.zeros - 2 ** (matrix.bits - 1)).astype(np.int8))
    return found


def int4(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes -8..7 `[out, in]`, float16 scales `[out, in / group]`, and their product."""
    blocks = weight.reshape(weight.shape[0], -1, group)
    scales = (np.abs(blocks).max(-1) / 7.5).astype(np.float16)
    codes = np.clip(np.rint(blocks / scales[..., None].astype(np.float32)), -8, 7)
    codes[0, 0, :2] = -8, 7  # both ends, whatever was drawn
    values = (codes * scales[..., None].astype(np.float32)).reshape(weight.shape)
    return codes.reshape(weight.shape).astype(np.int64), scales, values.astype(np.float32)


def words(codes: np.ndarray) -> np.ndarray:
    """`[rows, n]` of 0..15 -> int32 `[rows, n / 8]`, the first of eight in the lowest bits."""
    return sum(codes[:, j::8].astype(np.uint32) << np.uint32(4 * j) for j in range(8)).astype(np.uint32).view(np.int32)


def gptq(
    folder: Path, tensors: dict[str, np.ndarray], *, group: int = 64, zero: int = 7, change: Any = None, **config: Any
) -> tuple[Path, dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Also codes and scales by name. change: called with the stored tensors before they are written."""
    stored, meaning, codes_of = as_bfloat16(tensors), dict(tensors), {}
    for name in matrices(tensors):
        codes, scales, meaning[name] = int4(tensors[name], group)
        codes_of[name] = codes, scales
        base = name.removesuffix(".weight")
        del stored[name]
        stored[f"{base}.qweight"] = torch.from_numpy(words_along_rows(codes.T + 8))
        stored[f"{base}.scales"] = torch.from_numpy(scales.T.copy())
        stored[f"{base}.qzeros"] = torch.from_numpy(words(np.full(scales.T.shape, zero)))
        stored[f"{base}.g_idx"] = torch.arange(codes.shape[1], dtype=torch.int32) // group
    if change is not None:
        change(stored)
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False, **config}
    return write(folder, stored, {k: v for k, v in quantization.items() if v is not None}), meaning, codes_of


def words_along_rows(codes: np.ndarray) -> np.ndarray:
    """`[n, columns]` of 0..15 -> int32 `[n / 8, columns]`."""
    return sum(codes[j::8].astype(np.uint32) << np.uint32(4 * j) for j in range(8)).astype(np.uint32).view(np.int32)


def packed(
    folder: Path,
    tensors: dict[str, np.ndarray],
    *,
    group: int = 32,
    change: Any = None,
    weights: dict[str, Any] | None = None,
    format: str = "pack-quantized",
) -> tuple[Path, dict[str, np.ndarray]]:
    """compressed-tensors, scales in bfloat16."""
    stored, meaning = as_bfloat16(tensors), dict(tensors)
    for name in matrices(tensors):
        codes, scales, _ = int4(tensors[name], group)
        rounded = scales.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        meaning[name] = (codes.reshape(*scales.shape, group) * rounded[..., None]).reshape(codes.shape).astype(np.float32)
        del stored[name]
        stored[f"{name}_packed"] = torch.from_numpy(words(codes + 8))
        stored[f"{name}_scale"] = torch.from_numpy(rounded).to(torch.bfloat16)
        stored[f"{name}_shape"] = torch.tensor(codes.shape)
    if change is not None:
        change(stored)
    about = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **(weights or {})}
    quantization = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": about}}}
    return write(folder, stored, quantization), meaning


# --- GGUF, as llama.cpp's conversion of this architecture writes it --------------------------------------------------------

GGUF_TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}


def gguf_name(name: str) -> str:
    if name in GGUF_TOP:
        return GGUF_TOP[name]
    if name.startswith("mtp."):  # the block after the last
        return f"blk.2.{GGUF_NAMES[name.removeprefix('mtp.').removeprefix('layers.0.')]}"
    _, layer, own = name.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[own]}"


# What Ollama's own converter called by the checkpoint's names, and stored without adding 1.
OLLAMA_MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")


def ollama_name(name: str) -> str:
    if name in OLLAMA_MTP:
        return name
    if name.startswith("mtp.layers.0."):
        return f"mtp.layers.0.{GGUF_NAMES[name.removeprefix('mtp.layers.0.')]}"
    return gguf_name(name).replace("ssm_dt.bias", "ssm_dt")


def tiled(blocks: np.ndarray, size: int) -> np.ndarray:
    """Value heads (`size` rows each) from one key head's after another to every key head's first, every one's second, ..."""
    out = np.empty_like(blocks)
    for key in range(HK):
        for value in range(HV // HK):
            to, here = value * HK + key, key * (HV // HK) + value
            out[to * size : (to + 1) * size] = blocks[here * size : (here + 1) * size]
    return out


def untiled(blocks: np.ndarray, size: int) -> np.ndarray:
    out = np.empty_like(blocks)
    for key in range(HK):
        for value in range(HV // HK):
            to, here = value * HK + key, key * (HV // HK) + value
            out[here * size : (here + 1) * size] = blocks[to * size : (to + 1) * size]
    return out


def reordered(name: str, values: np.ndarray, turn: Any) -> np.ndarray:
    own, keys = name.rpartition("linear_attn.")[2], 2 * HK * D
    if own in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([values[:keys], turn(values[keys:], D)])
    if own == "in_proj_z.weight":
        return turn(values, D)
    if own in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return turn(values, 1)
    return turn(values.T.copy(), D).T.copy() if own == "out_proj.weight" else values


def is_norm(name: str) -> bool:
    return "norm" in name and "linear_attn" not in name


def write_gguf(
    file: Path,
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType],
    *,
    architecture: str = "qwen35",
    tokenizer: bool = True,
    change: Any = None,
    blocks: int = 3,
    nextn: int | None = 1,
    ollama: bool = False,
    tile: bool = True,
) -> dict[str, np.ndarray]:
    """types: by canonical name, F32 for all others. Returns what the file stands for. change: of tensors as stored. blocks,
    nextn: as the metadata say, which may say nothing of MTP layers. ollama: with the names, the array of heads and the vision
    tower of the files that Ollama made until the middle of 2026. tile: value heads reordered."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(blocks)
    if nextn is not None:
        writer.add_nextn_predict_layers(nextn)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1] if ollama else 1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_sections([3, 3, 2] if ollama else [3, 3, 2, 0])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(D)
    writer.add_ssm_group_count(HK)
    writer.add_ssm_time_step_rank(HV)
    writer.add_ssm_inner_size(HV * D)
    writer.add_full_attention_interval(2)
    if ollama or not tile:
        writer.add_bool(f"{architecture}.ssm.v_head_reordered", tile)
    if tokenizer:
        _write_tokenizer(writer)
    meaning = {}
    for name, values in tensors.items():
        data = values[:, 0] if "conv1d" in name else values
        turn, back_again = (tiled, untiled) if tile else (lambda blocks, size: blocks,) * 2
        data = reordered(name, data, turn)
        shifted = is_norm(name) and not (ollama and name in OLLAMA_MTP)
        if name.endswith("A_log"):
            data = -np.exp(data)
        elif shifted:
            data = data + 1
        data = np.ascontiguousarray(data, np.float32)
        kind = types.get(name, gguf.GGMLQuantizationType.F32)
        raw = gguf.quants.quantize(data, kind)
        back = gguf.quants.dequantize(raw, kind).reshape(data.shape)
        if change is not None:
            change(name, raw)
        writer.add_tensor(ollama_name(name) if ollama else gguf_name(name), raw, raw_dtype=kind)
        if name.endswith("A_log"):
            back = np.log(-back)
        elif shifted:
            back = back - 1
        back = reordered(name, back, back_again)
        meaning[name] = back[:, None] if "conv1d" in name else back
    if ollama:
        for name in ("v.blk.0.attn_q.weight", "v.patch_embed.weight", "v.merger.norm.bias"):
            writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    content = json.loads((tiny_path() / "tokenizer.json").read_text())
    names = {i: (token, gguf.TokenType.NORMAL) for token, i in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        names[token["id"]] = (token["content"], gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED)
    for i in range(len(names), VOCAB):
        names[i] = f"[PAD{i}]", gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([names[i][0] for i in range(VOCAB)])
    writer.add_token_types([names[i][1] for i in range(VOCAB)])
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(next(i for i, (token, _) in names.items() if token == "<|im_end|>"))
    writer.add_chat_template((tiny_path() / "chat_template.jinja").read_text())
