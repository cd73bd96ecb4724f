"""Exported drafters in the packages that others use: `dflash` 0.1.0 and `speculators` 0.9.0.

A drafter is loaded from its z-lab layout by `dflash` (torch), which must generate the same tokens
in the same rounds as this library, and from its speculators layout by `speculators`, whose hidden
states and drafts must be the same at every anchor of a text. Run it in the environment of
`make parity`:

    python tests/golden/check_published.py                    # the packaged drafter, a random one
    python tests/golden/check_published.py runs/NAME/drafter  # another one for the same target
"""

import argparse
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from make_goldens import decode  # noqa: E402
from published import load_speculator  # noqa: E402

import specjax  # noqa: E402
from specjax.models import drafter as backbone  # noqa: E402
from specjax.models import drafter_hf, hub, params  # noqa: E402
from specjax.models import target as networks  # noqa: E402
from specjax.models.layers import as_context  # noqa: E402
from specjax.training import export  # noqa: E402
from specjax.types import Block, KVCache  # noqa: E402

PROMPTS = HERE.parents[1] / "experiments" / "prompts" / "stories.jsonl"
PACKAGED = "stories260k-dflash"
MIN_GAP = 1e-4  # closer choices fall on either side by rounding
TOLERANCE = 1e-5


def random_drafter(target, layout="fill"):
    """Two layers of random weights in the target's shapes.

    With this mask token, a common syllable, some of its guesses are right.
    """
    shapes = hub.read_json(target.directory / "config.json")
    depth = target.config.layers.num_layers
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": depth,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 411, "target_layer_ids": [0, depth // 2, depth - 2]},
    }
    config = drafter_hf.config_from_hf(shapes | own, layout=layout)
    weights = params.init(backbone.table(config), jax.random.key(0))
    weights = jax.tree.map(lambda w: 4 * w if w.ndim > 1 else w, weights)
    return hub.Drafter(f"random ({layout})", Path(), config, weights)


# -------------------------------------------------------------------------------------- dflash
def check_generations(target, drafter, directory, model, prompts, new):
    """Tokens and rounds of `dflash` against ours; False where they differ without a near tie."""
    from dflash.model import DFlashDraftModel

    theirs, info = DFlashDraftModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {k: v for k, v in info.items() if v and k != "tied_keys"}
    if wrong:
        print(f"  dflash does not load {directory} exactly: {wrong}")
        return False
    emitted, equal, ties = [], 0, 0
    for prompt in prompts:
        ids = target.tokenizer(prompt).input_ids
        tokens, counts, gap = decode(model, theirs.eval(), np.asarray(ids), new)
        out = specjax.generate(target, ids, drafter=drafter, max_new_tokens=new, eos_token_id=())
        # dflash shortens the blocks that would pass the limit, ours are whole: other drafts.
        before = np.cumsum(counts) - counts
        whole = int((new - before >= drafter.config.block_size).sum())
        if out.tokens == tokens.tolist() and out.stats.emitted[:whole] == counts[:whole]:
            equal += 1
            emitted += counts[:whole]
        else:
            ties += gap < MIN_GAP
            kind = "other rounds" if out.tokens == tokens.tolist() else "other tokens"
            print(f"  dflash: {kind} (smallest gap of two choices {gap:.0e}): {prompt}")
    print(
        f"  dflash: tokens and rounds equal for {equal} of {len(prompts)} prompts, "
        f"{len(emitted)} rounds, acceptance length {np.mean(emitted or [0]):.3f}, "
        f"rounds by new tokens {np.bincount(emitted or [0])[1:].tolist()}"
    )
    return equal + ties == len(prompts) and equal > ties


# --------------------------------------------------------------------------------- speculators
def check_states(target, drafter, directory, model, prompt, new):
    """Hidden states and drafts of `speculators` against ours, at anchors all over one text."""
    theirs = load_speculator(directory)
    embedding = theirs.embed_tokens.weight.detach().numpy()
    if not np.array_equal(embedding, np.asarray(target.params["embed"])):
        print("  speculators has another embedding than the target's")
        return False
    ids = target.tokenizer(prompt).input_ids
    ids = ids + specjax.generate(target, ids, max_new_tokens=new, eos_token_id=()).tokens
    at = np.arange(1, len(ids) - drafter.config.block_size, 5)
    wanted = speculator_states(theirs, model, ids, at)
    got = own_states(target, drafter, ids, at)
    first = drafter.config.first_slot  # the slot of an anchor predicts nothing in layout "fill"
    scale = max(1.0, float(np.abs(wanted[0]).max()))  # float32 rounds by size
    gap = float(np.abs(got[0] - wanted[0])[:, first:].max()) / scale
    best = np.sort(wanted[1], -1)
    clear = (best[..., -1] - best[..., -2] > MIN_GAP)[:, first:]
    same = (got[1].argmax(-1) == wanted[1].argmax(-1))[:, first:] | ~clear
    print(
        f"  speculators: {len(at)} anchors, largest difference of hidden states {gap:.1e} of "
        f"{scale:.1f}, "
        f"drafts equal: {int(same.sum())} of {same.size}, nearly tied: {int((~clear).sum())}"
    )
    return gap < TOLERANCE and bool(same.all())


@torch.inference_mode()
def speculator_states(theirs, model, ids, at):
    """Hidden states and logits of every slot of every block, by the package's training pass."""
    from speculators.models.dflash import core

    tokens = torch.tensor([ids])
    out = model(tokens, output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[i] for i in theirs.target_layer_ids], -1)
    anchors = (torch.from_numpy(at), torch.ones(len(at), dtype=torch.bool))
    with mock.patch.object(core, "select_anchors", return_value=anchors):
        hidden, logits, *_ = theirs._backbone_forward(
            features,
            tokens,
            torch.ones_like(tokens),
            out.hidden_states[-1],
            torch.zeros_like(tokens),
            max_anchors=len(at),
        )
    shape = (len(at), theirs.block_size, -1)
    return hidden.reshape(shape).numpy(), logits.reshape(shape).numpy()


def own_states(target, drafter, ids, at):
    """The same by this library: one packed pass over all anchors."""
    tokens = jnp.asarray(ids, jnp.int32)[None, None]
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None, None]
    config, weights = drafter.config, drafter.params
    out = networks.forward(target.config, target.params, tokens, positions, taps=config.taps)
    fused = backbone.fuse(config, weights, out.features)
    k, v = backbone.context_rows(config, weights, fused, positions)
    length = jnp.full((1,), len(ids), jnp.int32)
    context = KVCache(tuple(map(as_context, k)), tuple(map(as_context, v)), length)
    rows = jnp.asarray(at, jnp.int32)
    block = backbone.draft_block(config, tokens[0, 0, rows], rows)
    one = Block(*(x.reshape(1, len(at), -1) for x in (block.tokens, block.positions)), rows[None])
    vocabulary = networks.vocabulary(target.params)
    hidden = backbone.forward(config, weights, vocabulary, one, context)
    logits = backbone.unembed(config, weights, vocabulary, hidden)
    return np.asarray(hidden[0]), np.asarray(logits[0])


def check(target, drafter, directory, model, prompts, new):
    """Both packages; `directory` holds the layout of z-lab or DeepSpec."""
    print(f"{drafter.name} for {target.name}")
    good = True
    if drafter.config.layout == "fill":  # the other one is not known to `dflash`
        good = check_generations(target, drafter, directory, model, prompts, new)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "drafter")
        names = {"target": target, "verifier": str(target.directory)}
        export.export(drafter, out, layout="speculators", dtype="float32", **names)
        return check_states(target, drafter, out, model, prompts[0], new) and good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="*", help=f"directories; default: {PACKAGED}, if there")
    parser.add_argument("--target", default="stories260k")
    parser.add_argument("--prompts", default=PROMPTS)
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "acceptance length")  # what random weights are meant to do

    target = specjax.load_target(args.target, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        target.directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [turns[0] for turns in specjax.evaluation.read_prompts(args.prompts, args.limit)]
    names = args.drafters
    if not names and hub.resolve(PACKAGED).is_dir():
        names = [PACKAGED]
    results = []
    for name in names:
        drafter = specjax.load_drafter(name, target)
        directory = hub.resolve(name)
        results.append(check(target, drafter, directory, model, prompts, args.tokens))
    if not args.drafters:
        for layout in ("fill", "next"):
            with tempfile.TemporaryDirectory() as folder:
                made = random_drafter(target, layout)
                directory = Path(folder, "drafter")
                export.export(made, directory, target=target)
                drafter = replace(specjax.load_drafter(directory, target), name=made.name)
                results.append(check(target, drafter, directory, model, prompts, args.tokens))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
