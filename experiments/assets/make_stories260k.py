"""Builds specjax/assets/stories260k from the llama2.c files of karpathy's stories260K.

  python experiments/assets/make_stories260k.py \
      --weights stories260K.bin --tokenizer tok512.bin --out specjax/assets/stories260k

Both files are those of karpathy/tinyllamas; their sha256 is checked. The output directory must not
exist. LICENSE and README.md are kept beside it by hand and are not written here.
"""

import argparse
import hashlib
import struct
from pathlib import Path

import numpy as np

from specjax.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    UNKNOWN,
    add_ends,
    add_special_tokens,
    sentencepiece_bpe,
    tokenizer_config,
)
from specjax.models.storage import write_directory

WEIGHTS_SHA256 = "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"
TOKENIZER_SHA256 = "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"
HEADER = struct.Struct("<7i")  # dim, hidden, layers, heads, kv heads, vocabulary, context
UNK, BOS, EOS = 0, 1, 2
NORMAL = 1


def read_checked(path: Path, sha256: str) -> bytes:
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{path} has sha256 {found}, expected {sha256}")
    return data


def config_of(data: bytes) -> dict:
    dim, hidden, layers, heads, kv_heads, vocab, context = HEADER.unpack_from(data)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0,1), (2,3), ... to the two halves that rotate_half pairs."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(data: bytes, config: dict) -> dict[str, np.ndarray]:
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys = kv_heads * config["head_dim"]
    layout = [  # the order of the file
        ("model.embed_tokens", (vocab, dim)),
        ("input_layernorm", (layers, dim)),
        ("self_attn.q_proj", (layers, dim, dim)),
        ("self_attn.k_proj", (layers, keys, dim)),
        ("self_attn.v_proj", (layers, keys, dim)),
        ("self_attn.o_proj", (layers, dim, dim)),
        ("post_attention_layernorm", (layers, dim)),
        ("mlp.gate_proj", (layers, ffn, dim)),
        ("mlp.down_proj", (layers, dim, ffn)),
        ("mlp.up_proj", (layers, ffn, dim)),
        ("model.norm", (dim,)),
    ]
    tensors, offset = {}, HEADER.size
    for name, shape in layout:
        count = int(np.prod(shape))
        array = np.frombuffer(data, "<f4", count, offset).reshape(shape)
        offset += 4 * count
        if name.startswith("model."):
            tensors[f"{name}.weight"] = array
            continue
        for layer in range(layers):
            weight = array[layer]
            if name.endswith("q_proj"):
                weight = halves(weight, heads)
            elif name.endswith("k_proj"):
                weight = halves(weight, kv_heads)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    tables = 4 * config["max_position_embeddings"] * config["head_dim"]  # cos and sin, not needed
    if offset + tables != len(data):
        raise SystemExit(f"{len(data)} bytes, expected {offset + tables}")
    return tensors


def tokenizer_of(data: bytes, context: int) -> dict:
    """llama2.c's encoder: highest-score merging, spaces as they are, bytes as the last resort."""
    tokens, scores, offset = [], [], 4
    while offset < len(data):
        score, length = struct.unpack_from("<fi", data, offset)
        tokens.append(data[offset + 8 : offset + 8 + length].decode())
        scores.append(score)
        offset += 8 + length
    tokens[BOS], tokens[EOS] = "<s>", "</s>"  # llama2.c stores them between line ends
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    types += [NORMAL] * (len(tokens) - len(types))
    tokenizer = sentencepiece_bpe(tokens, scores, types, space=" ")
    add_special_tokens(tokenizer, tokens, types)
    add_ends(tokenizer, BOS, None)
    names = {"bos_token": tokens[BOS], "eos_token": tokens[EOS], "unk_token": tokens[UNK]}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": tokenizer_config(
            names, add_bos=True, add_eos=False, context=context
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    weights = read_checked(args.weights, WEIGHTS_SHA256)
    config = config_of(weights)
    files = tokenizer_of(
        read_checked(args.tokenizer, TOKENIZER_SHA256), config["max_position_embeddings"]
    )
    files["config.json"] = config
    # The model ends a story with BOS (its separator of documents) and never says EOS; llama2.c
    # stops at BOS too.
    files["generation_config.json"] = {"bos_token_id": BOS, "eos_token_id": [EOS, BOS]}
    write_directory(args.out, tensors_of(weights, config), files)


if __name__ == "__main__":
    main()
