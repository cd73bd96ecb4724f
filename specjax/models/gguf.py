"""GGUF files of the Llama family as Hugging Face model directories.

The `gguf` library reads and dequantises; this module names, reorders and checks. Format: GGUF
version 3 and the `llama` architecture of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.gguf_tokenizer import SpecialIds, tokenizer_files
from specjax.models.storage import write_directory

# Every key that describes the network. Any other `llama.*` key could change it: refused.
_KEYS = {
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.attention.value_length",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.expert_count",
    "llama.expert_used_count",
    "llama.feed_forward_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scale_linear",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.finetuned",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.type",
    "llama.vocab_size",
}


def convert_gguf(path: str | Path, directory: str | Path) -> None:
    """Converts a Llama-type GGUF file to a Hugging Face directory in float32, whole or not at all.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json and
    tokenizer_config.json (with the chat template). Quantised tensors are dequantised; the rows of
    the q and k projections go back from llama.cpp's interleaved order to halves.

    Args:
      path: one GGUF file.
      directory: must not exist, or be an empty directory.

    Raises:
      ImportError: the `gguf` library is missing.
      FileExistsError: `directory` is not empty.
      ValueError: a file that is truncated, of another architecture, or that says or holds
        something that is not supported; the message names it.
    """
    path = Path(path)
    try:
        import gguf
    except ImportError:
        raise ImportError("reading GGUF files needs: pip install specjax[gguf]") from None
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from error
    try:
        tensors = _Tensors(metadata, reader.tensors)
        files, ids = tokenizer_files(
            metadata, tensors.config["vocab_size"], tensors.config["max_position_embeddings"]
        )
        config = tensors.config | _ids(ids, several=False)
        generation = _ids(ids, several=True)
        files |= {"config.json": config, "generation_config.json": generation}
        write_directory(directory, tensors, files)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors under their Hugging Face names, each dequantised when it is asked for."""

    def __init__(self, metadata: Mapping[str, Any], stored: list[Any]) -> None:
        by_name = {tensor.name: tensor for tensor in stored}
        factors = by_name.pop("rope_freqs.weight", None)
        shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in by_name.items()}
        if "token_embd.weight" not in shapes:
            raise ValueError("tensor token_embd.weight is missing")
        tied = "output.weight" not in shapes
        self.config = _config(metadata, shapes["token_embd.weight"][0], tied)
        self.config |= _rope(metadata, self.config["head_dim"], factors)
        expected = _expected(self.config)
        for problem, names in [
            ("missing", expected.keys() - shapes.keys()),
            ("not supported", shapes.keys() - expected.keys()),
        ]:
            if names:
                raise ValueError(f"tensors {problem}: {', '.join(sorted(names)[:5])}")
        for name, (_, shape) in expected.items():
            if shapes[name] != shape:
                raise ValueError(f"tensor {name} has shape {shapes[name]}, expected {shape}")
        self._source = {target: by_name[name] for name, (target, _) in expected.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._source[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ValueError(f"tensor {tensor.name}: {error}") from None
        if name.endswith("q_proj.weight"):
            return _halves(values, self.config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return _halves(values, self.config["num_key_value_heads"])
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0,1), (2,3), ... to the two halves that rotate_half pairs."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [H, D/2, 2, E]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture {architecture!r} is not supported; only 'llama'")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("split.count > 1: join the parts first (llama-gguf-split --merge)")
    unknown = [k for k in metadata if k.startswith("llama.") and k not in _KEYS]
    if unknown:
        raise ValueError(f"not supported: {', '.join(unknown)}")
    if metadata.get("llama.expert_count", 0):
        raise ValueError("llama.expert_count > 0: mixtures of experts are not supported")
    width = _integer(metadata, "embedding_length")
    heads = _integer(metadata, "attention.head_count")
    kv_heads = _integer(metadata, "attention.head_count_kv", heads)
    head_dim = _integer(metadata, "attention.key_length", width // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{heads} heads, {kv_heads} key/value heads, head dim {head_dim}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(metadata, key, head_dim) != head_dim:
            raise ValueError(f"llama.{key} = {metadata['llama.' + key]}, expected {head_dim}")
    if _integer(metadata, "vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"llama.vocab_size = {metadata['llama.vocab_size']}, the embedding has {vocab_size}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": _integer(metadata, "feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _integer(metadata, "context_length"),
        "rms_norm_eps": _decimal(_value(metadata, "attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def _rope(metadata: Mapping[str, Any], head_dim: int, factors: Any) -> dict[str, Any]:
    theta = _decimal(_value(metadata, "rope.freq_base", 10000.0))
    factor = _value(metadata, "rope.scaling.factor", _value(metadata, "rope.scale_linear", 0.0))
    kind = _value(metadata, "rope.scaling.type", "linear" if factor else "none")
    scaling: dict[str, Any] | None = None
    if kind == "linear" and factor not in (0.0, 1.0):
        scaling = {"rope_type": "linear", "factor": _decimal(factor)}
    elif kind not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type {kind!r} is not supported; only none, linear")
    if factors is not None:
        if scaling is not None:
            raise ValueError("rope_freqs.weight together with linear scaling is not supported")
        values = np.asarray(factors.data, np.float32).reshape(-1)
        scaling = _llama3(theta, head_dim, values)
    return {"rope_theta": theta} | ({} if scaling is None else {"rope_scaling": scaling})


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The published Llama 3.x scaling, if it gives exactly the stored divisors; else an error.

    The stored divisors of the frequencies are all that the scaling does, so equal divisors prove
    the translation right.
    """
    factor, low, high, context = float(factors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # [D/2]
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    if factors.shape != blend.shape or not np.allclose(
        factors, 1 / ((1 - blend) / factor + blend), rtol=1e-4, atol=0.0
    ):
        raise ValueError(
            "rope_freqs.weight is not the Llama 3 scaling (low 1, high 4, context 8192): "
            "not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape [out, in])."""
    width, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    block = {
        "attn_norm": ("input_layernorm", (width,)),
        "attn_q": ("self_attn.q_proj", (queries, width)),
        "attn_k": ("self_attn.k_proj", (keys, width)),
        "attn_v": ("self_attn.v_proj", (keys, width)),
        "attn_output": ("self_attn.o_proj", (width, queries)),
        "ffn_norm": ("post_attention_layernorm", (width,)),
        "ffn_gate": ("mlp.gate_proj", (ffn, width)),
        "ffn_up": ("mlp.up_proj", (ffn, width)),
        "ffn_down": ("mlp.down_proj", (width, ffn)),
    }
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        f"blk.{layer}.{name}.weight": (f"model.layers.{layer}.{target}.weight", shape)
        for layer in range(config["num_hidden_layers"])
        for name, (target, shape) in block.items()
    }
    table["token_embd.weight"] = ("model.embed_tokens.weight", (config["vocab_size"], width))
    table["output_norm.weight"] = ("model.norm.weight", (width,))
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (config["vocab_size"], width))
    return table


def _ids(ids: SpecialIds, *, several: bool) -> dict[str, Any]:
    eos: Any = ids.eos
    if several and ids.end_of_turn:
        eos = [i for i in (ids.eos, *ids.end_of_turn) if i is not None]
    values = {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}
    return {name: value for name, value in values.items() if value is not None}


def _value(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = metadata.get("llama." + key, default)
    if value is None:
        raise ValueError(f"llama.{key} is missing")
    return value


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(metadata, key, default)
    if isinstance(value, list):  # one entry a layer
        if len(set(value)) != 1:
            raise ValueError(f"llama.{key} differs between layers: not supported")
        value = value[0]
    if value <= 0:
        raise ValueError(f"llama.{key} = {value} must be positive")
    return int(value)


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
