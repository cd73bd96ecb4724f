"""Tiny Llama GGUF files, written as llama.cpp's converter writes them."""

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, DIM = 2, 32, 64, 4, 2, 8
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
# "yes" is a token that no merge makes.
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TOKENS += ["yes", "<think>"]
VOCAB = len(TOKENS)
Q8 = "blk.1.ffn_down.weight"

KEYS = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": DIM,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (VOCAB - 4) + [4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "aa"]
SPM_KEYS = {
    "llama.vocab_size": len(SPM_TOKENS),
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 4,
    "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -1.0, -2.0],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": None,
    "tokenizer.ggml.eos_token_id": None,
    "tokenizer.ggml.padding_token_id": None,
    "tokenizer.ggml.add_bos_token": None,
    "tokenizer.chat_template": None,
}


def hf_tensors(tied=True, vocab=VOCAB):
    """Random tensors under their Hugging Face names, with half-split q and k."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (vocab, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm": (WIDTH,),
            block + "self_attn.q_proj": (HEADS * DIM, WIDTH),
            block + "self_attn.k_proj": (KV_HEADS * DIM, WIDTH),
            block + "self_attn.v_proj": (KV_HEADS * DIM, WIDTH),
            block + "self_attn.o_proj": (WIDTH, HEADS * DIM),
            block + "post_attention_layernorm": (WIDTH,),
            block + "mlp.gate_proj": (FFN, WIDTH),
            block + "mlp.up_proj": (FFN, WIDTH),
            block + "mlp.down_proj": (WIDTH, FFN),
        }
    if not tied:
        shapes["lm_head"] = (vocab, WIDTH)
    return {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def interleave(weight):
    """llama.cpp's order: row 2i+j of a head is row j*D/2+i of the half-split layout."""
    order = [j * DIM // 2 + i for i in range(DIM // 2) for j in range(2)]
    return np.concatenate([head[order] for head in np.split(weight, len(weight) // DIM)])


def gguf_tensors(tensors):
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    stored = {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                value = interleave(value)
            stored[f"blk.{layer}.{names[stem]}.weight"] = value
        else:
            stored[f"{names[stem]}.weight"] = value
    return stored


def write_gguf(path, keys=(), tensors=None, architecture="llama"):
    """Writes a GGUF file; `keys` changes KEYS, where None removes a key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (KEYS | dict(keys)).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in (gguf_tensors(hf_tensors()) if tensors is None else tensors).items():
        if name == Q8:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
