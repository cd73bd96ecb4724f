"""Random tiny checkpoints in the published Hugging Face layouts, written at test time.

A tensor's values depend on its name, its shape and the seed only, so the goldens store expected
values and no weights. Needs numpy and safetensors; bfloat16 needs `ml_dtypes`, the tokenizer
needs `tokenizers`.
"""

import copy
import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB, EOS, MASK, BLOCK, TAPS = 97, 5, 96, 8, (0, 2)

# What the four families share. `head_dim` is stated where published configs state it (Qwen3), so
# Llama, Mistral and Qwen2 exercise the fallback hidden_size // num_attention_heads = 12.
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "use_cache": True,
    "torch_dtype": "float32",
}
_FAMILY = {
    "llama": {
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
    },
    "mistral": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen2": {"max_window_layers": 4, "sliding_window": 32, "use_sliding_window": False},
    "qwen3": {
        "attention_bias": False,
        "head_dim": 16,
        "max_window_layers": 4,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


def _override(config, overrides):
    """A copy of `config` with the overrides; the value `...` removes the key."""
    return copy.deepcopy({k: v for k, v in (config | overrides).items() if v is not ...})


def target_config(family="qwen3", **overrides):
    """config.json of a tiny target: llama, mistral, qwen2 or qwen3. The value `...` drops a key."""
    names = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family}
    return _override(names | _COMMON | _FAMILY[family], overrides)


def drafter_config(**overrides):
    """config.json of a tiny DFlash drafter in the z-lab layout. The value `...` drops a key."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        **_COMMON,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "attention_bias": False,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "max_window_layers": 2,
        "num_target_layers": 4,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "dtype": "float32",
    }
    del config["torch_dtype"]  # z-lab files carry the newer key `dtype`
    config["layer_types"] = ["full_attention"] * overrides.get("num_hidden_layers", 2)
    return _override(config, overrides)


def tensor(name, shape, seed=0):
    """Float32 values by (name, shape, seed): attention is not flat, rounding stays near 3e-6."""
    rng = np.random.RandomState(zlib.crc32(name.encode()) ^ seed)  # a bit-stable legacy stream
    noise = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.2 * noise).astype(np.float32)
    return ((0.2 if "embed" in name else 0.1) * noise).astype(np.float32)


def _decoder_shapes(config, prefix, bias, qk_norm):
    """Name -> shape of the decoder layers; `bias` has the projections that carry one."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    default = 128 if config["model_type"] == "qwen3" else hidden // heads
    dim = config.get("head_dim") or default
    linears = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {}
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}layers.{i}."
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"{layer}{name}.weight"] = shape
            if name.split(".")[1][0] in bias:
                shapes[f"{layer}{name}.bias"] = shape[:1]
        if qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
    return shapes


def target_tensors(config, seed=0):
    """Tensor name -> float32 array: the exact manifest of a published checkpoint of `config`."""
    family, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    bias = "qkv" if family == "qwen2" else ""  # first letters of the projections with a bias
    bias += "qkvo" if family in ("llama", "qwen3") and config.get("attention_bias") else ""
    bias += "gud" if family == "llama" and config.get("mlp_bias") else ""
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    shapes |= _decoder_shapes(config, "model.", bias, qk_norm=family == "qwen3")
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: tensor(name, shape, seed) for name, shape in shapes.items()}


def drafter_shapes(config):
    """Tensor name -> shape of a z-lab DFlash drafter: no prefix, embedding or head."""
    hidden = config["hidden_size"]
    taps = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    fused = len(taps) * config.get("target_hidden_size", hidden)
    shapes = {"fc.weight": (hidden, fused), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    bias = "qkvo" if config.get("attention_bias") else ""
    return shapes | _decoder_shapes(config, "", bias, qk_norm=True)


def drafter_tensors(config, seed=0):
    """Tensor name -> float32 array of such a drafter."""
    return {name: tensor(name, shape, seed) for name, shape in drafter_shapes(config).items()}


def _numpy_dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def write(
    directory, config, tensors, shards=1, dtype="float32", generation_config=None, tokenizer=None
):
    """Write an HF directory and return its path.

    `dtype` is float32, bfloat16 or float16 and goes into config.json as well; more than one shard
    gets an index file; `tokenizer` maps file name -> content (see `tokenizer_files`).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = config | {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    # save_file stores the raw memory, so a transposed view must be made contiguous first.
    arrays = {k: np.ascontiguousarray(v, dtype=_numpy_dtype(dtype)) for k, v in tensors.items()}
    names = list(arrays)
    weight_map = {}
    for s in range(shards):
        suffix = f"-{s + 1:05d}-of-{shards:05d}" if shards > 1 else ""
        file = f"model{suffix}.safetensors"
        part = {name: arrays[name] for name in names[s::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    files = {"config.json": config}
    if shards > 1:
        total = sum(a.nbytes for a in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files["model.safetensors.index.json"] = index
    if generation_config is not None:
        files["generation_config.json"] = generation_config
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    for name, content in (tokenizer or {}).items():
        (directory / name).write_text(content, encoding="utf-8")
    return directory


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
_CORPUS = (
    "Once upon a time there was a little girl who liked to play in the park with her dog.",
    "ha ha ha ok, said the dog. What is 12 + 30? The answer is 42.",
    "def add(a, b):\n    return a + b\n",
    "La ville est belle. ďábel 😀 世界 世界",
)


def tokenizer_files(base=300):
    """File name -> content of a byte-level BPE with `base` entries, then six added tokens.

    The added ids follow the base ones, as Qwen's do: four special tokens (end of text, turn start,
    turn end = EOS, mask) and the plain pair <think>, </think>. `len(tokenizer) == base + 6`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=base, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens(["<think>", "</think>"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|MASK|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def successor_target(directory, successor, tokenizer=None, layers=1, **overrides):
    """A real Llama directory whose greedy continuation of x is successor[x], whatever came before.

    Embeddings are one-hot, the layers add nothing, and the head reads the successor off.
    """
    vocab = len(successor)
    config = target_config(
        "llama",
        vocab_size=vocab,
        hidden_size=vocab,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=8,
        eos_token_id=...,
        **overrides,
    )
    tensors = {name: np.zeros_like(a) for name, a in target_tensors(config).items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] += 1
    eye = np.eye(vocab, dtype=np.float32)
    tensors["model.embed_tokens.weight"] = eye
    head = np.zeros_like(eye)
    head[np.asarray(successor), np.arange(vocab)] = 1
    tensors["lm_head.weight"] = head
    return write(directory, config, tensors, tokenizer=tokenizer)
