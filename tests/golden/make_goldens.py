"""Make targets.npz, drafters.npz and generate.npz: values by published PyTorch implementations.

Targets come from transformers (eager attention, float32), drafters and whole generations from the
z-lab package `dflash`. Weights and inputs are those of `tests/tiny.py`, so only configs and
expected values are stored. Run it in the environment of `make parity`, never in the library's own:

    python tests/golden/make_goldens.py            # write the files
    python tests/golden/make_goldens.py --check    # re-make them and compare with the files

targets.npz   tokens                  int32 [2, 24], the input of every case
              <case>/configs          JSON list of config.json dicts that all mean this model
              <case>/logits           float32 [2, 24, V]
              <case>/hidden           float32 [2, 24, 2E], outputs of blocks 0 and 2 (some cases)
              <case>/last             float32 [2, 24, E], after the final norm (some cases)
drafters.npz  anchors                 int32 [3, 2], token of slot 0 for each round and row
              commits                 int32 [3], new context rows of each round: 9, 4, 1
              <case>/configs          as above; `tiny.drafter_tensors` gives the weights
              <case>/hidden           float32 [3, 2, T, E], after the final norm, for each round
generate.npz  prompts                 int32 [2, 9], -1 behind a shorter prompt
              <case>/target           config.json of the target; `tiny.target_tensors`, seed
              <case>/drafter          config.json of the drafter; `tiny.drafter_tensors`, seed
              <case>/seed             int32, of both networks
              <case>/tokens           int32 [2, NEW], the greedy new tokens
              <case>/emitted          int32 [2, NEW - 1], new tokens of every round, then zeros
              <case>/gap              float32, smallest top-2 logit gap of any choice that counts
all           versions                JSON dict of the packages that made the file
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tiny  # noqa: E402

# One machine repeats itself exactly; another instruction set sums in another order (3e-6 seen).
TOLERANCE = 1e-5
TOKENS = np.random.RandomState(0).randint(0, tiny.VOCAB, (2, 24)).astype(np.int32)
ANCHORS = np.random.RandomState(1).randint(0, tiny.MASK, (3, 2)).astype(np.int32)
COMMITS = np.array([9, 4, 1], np.int32)
PROMPTS = np.full((2, 9), -1, np.int32)
PROMPTS[0] = np.random.RandomState(2).randint(0, 5, 9)
PROMPTS[1, :4] = np.random.RandomState(3).randint(0, 5, 4)
NEW = 40
MIN_GAP = 1e-3  # far above rounding, so the same choices on every machine
WITH_HIDDEN = ("llama_gqa_tied", "qwen2_sliding", "qwen3")

SLIDING, FULL = "sliding_attention", "full_attention"


def rope_forms(family, theta, scaling, **overrides):
    """The legacy form (`rope_theta` + `rope_scaling`) and the two v5 forms (`rope_parameters`)."""
    legacy = {"rope_theta": theta, "rope_scaling": scaling}
    inside = {"rope_parameters": {"rope_theta": theta, **scaling}}
    beside = {"rope_theta": theta, "rope_parameters": scaling}
    drop = {"rope_theta": ..., "rope_scaling": ...}
    return [tiny.target_config(family, **drop | overrides | f) for f in (legacy, inside, beside)]


def target_cases():
    """Case name -> configs that mean the same model; the first one is the plainest."""
    one = tiny.target_config
    # Few frequencies fit into head_dim 16: theta 1e4 and 32 original positions put some of them
    # on either side of, and into, the bands of llama3 and yarn.
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 32
    linear = {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    options = {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
    oldest = one("llama", rope_theta=1e4, head_dim=16, rope_scaling={"type": "linear", "factor": 4})
    absent = ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias")
    llama_absent = ("num_key_value_heads", "mlp_bias", "rope_scaling")
    window = {"sliding_window": 5, "max_window_layers": 2, "use_sliding_window": True}
    mix = [SLIDING, FULL, SLIDING, FULL]
    by_count = one("qwen3", **window)
    by_type = one(
        "qwen3", **window | {"max_window_layers": 4, "layer_types": [FULL] * 2 + mix[::2]}
    )
    return {
        "llama": [one("llama", num_key_value_heads=4)],
        "llama_gqa_tied": [one("llama", tie_word_embeddings=True)],
        "llama_bias": [one("llama", attention_bias=True, mlp_bias=True)],
        "llama_head_dim": [one("llama", head_dim=16)],
        "llama_defaults": [one("llama", **dict.fromkeys(absent + llama_absent, ...))],
        "llama_llama3": rope_forms("llama", 1e4, llama3, head_dim=16),
        "llama_linear": [*rope_forms("llama", 1e4, linear, head_dim=16), oldest],
        "llama_yarn": rope_forms("llama", 1e4, yarn, head_dim=16),
        "llama_yarn_options": rope_forms("llama", 1e4, yarn | options, head_dim=16),
        "mistral": [one("mistral"), one("mistral", sliding_window=...)],
        "mistral_sliding": [one("mistral", sliding_window=5)],
        "qwen2_tied": [
            one("qwen2", tie_word_embeddings=True, **window | {"use_sliding_window": False})
        ],
        "qwen2_sliding": [one("qwen2", **window)],
        "qwen3": [one("qwen3")],
        "qwen3_tied": [one("qwen3", tie_word_embeddings=True)],
        "qwen3_bias": [one("qwen3", attention_bias=True)],
        "qwen3_defaults": [one("qwen3", **dict.fromkeys((*absent, "head_dim"), ...))],
        "qwen3_sliding": [by_count, by_type],
        "qwen3_mixed": [one("qwen3", layer_types=mix, **window)],
    }


def drafter_cases():
    """Case name -> configs that mean the same drafter; the first one is the published layout."""
    one = tiny.drafter_config
    ids = {"mask_token_id": tiny.MASK, "target_layer_ids": list(tiny.TAPS)}
    nested = one(
        block_size=...,
        dflash_config={"block_size": tiny.BLOCK, **ids},
        rope_theta=...,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )
    window = {"sliding_window": 6, "use_sliding_window": True}
    sliding = window | {"layer_types": [SLIDING] * 2}
    other = {
        "attention_bias": True,
        "block_size": 5,
        "dflash_config": ids | {"target_layer_ids": [0, 2, 1]},
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }
    return {
        "full": [one(), nested, one(dflash_config=..., **ids)],
        "full_causal": [one(is_causal=True)],
        "sliding": [one(**sliding), one(is_causal=True, **sliding)],
        "sliding_bidirectional": [one(is_causal=False, **sliding)],
        "mixed": [one(layer_types=[SLIDING, FULL], **window)],
        "one_layer_bias_yarn": [one(**other)],
    }


def generation_cases():
    """Case name -> (seed, target config, drafter config).

    Of six tokens even a random drafter guesses some, several in a row now and then. The seeds were
    searched for varied tokens, varied rounds and choices without near ties.
    """
    ids = {"mask_token_id": 5, "target_layer_ids": list(tiny.TAPS)}
    small = {"vocab_size": 6, "eos_token_id": ...}
    target = tiny.target_config("qwen3", **small)
    window = {"sliding_window": 6, "use_sliding_window": True, "layer_types": [SLIDING] * 2}
    drafter, sliding = (tiny.drafter_config(dflash_config=ids, **small, **w) for w in ({}, window))
    by_count = {"sliding_window": 5, "max_window_layers": 2, "use_sliding_window": True}
    sliding_target = tiny.target_config("qwen3", **small, **by_count)
    return {
        "full": (48, target, drafter),
        "sliding": (48, target, sliding),
        "sliding_both": (49, sliding_target, sliding),
    }


def load(cls, config, tensors):
    """`cls.from_pretrained` on a directory of the kit; refuses anything missing or unexpected."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        tiny.write(directory, config, tensors)
        kwargs = {"dtype": torch.float32, "output_loading_info": True}
        model, info = cls.from_pretrained(directory, attn_implementation="eager", **kwargs)
    wrong = {k: v for k, v in info.items() if v and k != "tied_keys"}
    if wrong:
        raise ValueError(f"the kit's manifest of {config['architectures']} is not exact: {wrong}")
    return model.eval()


def run_target(config, hidden):
    """Arrays of one target case."""
    import torch
    from transformers import AutoModelForCausalLM

    model = load(AutoModelForCausalLM, config, tiny.target_tensors(config))
    with torch.inference_mode():
        tokens = torch.from_numpy(TOKENS).long()
        out = model(tokens, output_hidden_states=hidden, use_cache=False)
        arrays = {"logits": out.logits}
        if hidden:
            arrays["hidden"] = torch.cat([out.hidden_states[l + 1] for l in tiny.TAPS], -1)
            arrays["last"] = out.hidden_states[-1]
    return {k: v.numpy() for k, v in arrays.items()}


def run_drafter(config):
    """Three rounds as in the loop of `dflash`: append context and block, crop to the context."""
    import torch
    from dflash.model import DFlashDraftModel, _crop_to, _make_cache

    model = load(DFlashDraftModel, config, tiny.drafter_tensors(config))
    embedding = torch.from_numpy(tiny.tensor("model.embed_tokens.weight", (tiny.VOCAB, 48)))
    features = tiny.tensor("features", (2, int(COMMITS.sum()), model.fc.in_features))
    cache, start, rounds = _make_cache(model.config), 0, []
    for anchors, new in zip(ANCHORS, COMMITS.tolist(), strict=True):
        context = torch.from_numpy(features[:, start : start + new])
        positions = torch.arange(start, start + new + model.block_size)
        start += new
        block = torch.full((2, model.block_size), model.mask_token_id)
        block[:, 0] = torch.from_numpy(anchors)
        with torch.inference_mode():
            hidden = model(
                position_ids=positions[None].expand(2, -1),
                noise_embedding=embedding[block],
                target_hidden=context,
                past_key_values=cache,
                use_cache=True,
            )
        _crop_to(cache, start)
        rounds.append(hidden.numpy())
    return {"hidden": np.stack(rounds)}


def gaps(logits):
    """Difference of the two best logits of each row [..., V]."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def decode(target, drafter, prompt, new=NEW):
    """New tokens, new tokens of each round, and the smallest gap among the choices that count."""
    import dflash.model
    import torch

    drafts, logits_of = [], drafter.compute_logits

    def recorded(hidden, head):
        drafts.append(logits_of(hidden, head))
        return drafts[-1]

    prompt = torch.from_numpy(prompt)[None].long()
    # The package reads its clock behind torch.cuda.synchronize, which a CPU build refuses.
    cpu_clock = mock.patch.object(dflash.model, "_cuda_time", time.perf_counter)
    with cpu_clock, mock.patch.object(drafter, "compute_logits", recorded):
        out = dflash.model.dflash_generate(drafter, target, prompt, new, None, return_stats=True)
    with torch.inference_mode():
        chosen = target(out.output_ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    tokens = out.output_ids[0, prompt.shape[1] :]
    if not torch.equal(chosen.argmax(-1), tokens):
        raise ValueError("not the target's own greedy tokens")
    # A round depends on its accepted drafts and the first rejected one, on nothing behind it.
    rows = [chosen, *(d[0, :n] for d, n in zip(drafts, out.acceptance_lengths, strict=False))]
    smallest = min(float(gaps(r).min()) for r in rows)
    return tokens.numpy(), out.acceptance_lengths, smallest


def make_generations():
    """Arrays by key of all generations; refuses near ties, which machines decide differently."""
    from dflash.model import DFlashDraftModel
    from transformers import AutoModelForCausalLM

    out = {"prompts": PROMPTS, "versions": versions()}
    for name, (seed, *configs) in generation_cases().items():
        target = load(AutoModelForCausalLM, configs[0], tiny.target_tensors(configs[0], seed))
        drafter = load(DFlashDraftModel, configs[1], tiny.drafter_tensors(configs[1], seed))
        runs = [decode(target, drafter, prompt[prompt >= 0]) for prompt in PROMPTS]
        gap = min(gap for _, _, gap in runs)
        if gap < MIN_GAP:
            raise ValueError(
                f"case {name}: a near tie ({gap:.1e}), choose another seed than {seed}"
            )
        emitted = [counts + [0] * (NEW - 1 - len(counts)) for _, counts, _ in runs]
        out |= {
            f"{name}/target": np.array(json.dumps(configs[0])),
            f"{name}/drafter": np.array(json.dumps(configs[1])),
            f"{name}/seed": np.int32(seed),
            f"{name}/tokens": np.stack([tokens for tokens, _, _ in runs]).astype(np.int32),
            f"{name}/emitted": np.array(emitted, np.int32),
            f"{name}/gap": np.float32(gap),
        }
    return out


def versions():
    """What made the file."""
    packages = ("torch", "transformers", "dflash", "numpy")
    return np.array(json.dumps({name: version(name) for name in packages}))


def make(cases, run):
    """Arrays by key of all cases; every config of a case must give the same bits."""
    out = {}
    for name, configs in cases.items():
        arrays, *others = [run(name, config) for config in configs]
        for config, other in zip(configs[1:], others, strict=True):
            if any(not np.array_equal(arrays[k], other[k]) for k in arrays):
                raise ValueError(f"case {name}: not the same model as the first config: {config}")
        out[f"{name}/configs"] = np.array(json.dumps(configs))
        out |= {f"{name}/{key}": value for key, value in arrays.items()}
    out["versions"] = versions()
    return out


def check(path, made):
    """Print the largest difference of each case; True when all are within TOLERANCE."""
    with np.load(path) as file:
        stored = dict(file)
    ok = stored.keys() == made.keys()
    if not ok:
        print(f"{path.name}: different keys: {sorted(stored.keys() ^ made.keys())}")
    for key in sorted(stored.keys() & made.keys()):
        old, new = stored[key], made[key]
        if key == "versions":
            print(f"{path.name}: stored {old}, here {new}")
        elif old.dtype.kind != "f":
            ok &= np.array_equal(old, new)
            if not np.array_equal(old, new):
                print(f"{path.name}: {key}: not equal")
        else:
            gap = float(np.abs(old - new).max()) if old.shape == new.shape else float("inf")
            ok &= gap < TOLERANCE
            print(f"{path.name}: {key}: {gap:.1e}{'' if gap < TOLERANCE else '  DIFFERS'}")
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, write nothing"
    )
    args = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    targets = make(target_cases(), lambda name, config: run_target(config, name in WITH_HIDDEN))
    drafters = make(drafter_cases(), lambda _, config: run_drafter(config))
    files = {
        HERE / "targets.npz": targets | {"tokens": TOKENS},
        HERE / "drafters.npz": drafters | {"anchors": ANCHORS, "commits": COMMITS},
        HERE / "generate.npz": make_generations(),
    }
    if args.check:
        return 0 if all([check(path, made) for path, made in files.items()]) else 1
    for path, made in files.items():
        np.savez_compressed(path, **made)
        print(f"{path.name}: {len(made)} arrays, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
