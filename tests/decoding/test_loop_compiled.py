"""What the compiled loop does with rows, memory and devices, whatever the tokens are.

Rows in different phases (case A5), 1,000 rounds, host transfers, donation, and a mesh.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scripted import Scripted, script

import specjax
from specjax.decoding import loop
from specjax.decoding.drafting import DFlash
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights
from specjax.models import hub

STATES = frozenset({"features", "final_hidden", "argmax", "certainty", "draft_hidden"})
VOCAB = tiny.VOCAB


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories of a tiny qwen3 and of a DFlash drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    config = tiny.target_config("qwen3", eos_token_id=..., max_position_embeddings=4096)
    made = tiny.drafter_config(max_position_embeddings=4096)
    return (
        tiny.write(root / "target", config, tiny.target_tensors(config, 0)),
        tiny.write(root / "drafter", made, tiny.drafter_tensors(made)),
    )


@pytest.fixture(scope="module")
def pair(checkpoints):
    loaded = hub.load_target(checkpoints[0])
    return loaded, hub.load_drafter(checkpoints[1], loaded)


@dataclass(frozen=True)
class Probe(DFlash):
    """DFlash that keeps everything of the rejected rows and uses nothing."""

    keeps: frozenset = STATES


def prefilled(loaded, drafter, weights, prompts, limits, keys, temperature=0.0, capacity=256):
    """What `step` and the drivers take: decoder, weights, sampling, stops, state."""
    B = len(prompts)
    decoder, both = Decoder(loaded.config, drafter), Weights(loaded.params, weights)
    sampling = make_sampling(
        temperature,
        0,
        1.0,
        batch=B,
        vocab_size=VOCAB,
        drafting="coupled" if temperature else "greedy",
    )
    padded = np.zeros((B, 64), np.int32)
    for b, prompt in enumerate(prompts):
        padded[b, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    stops, limits = jnp.array([-1], jnp.int32), jnp.asarray(limits, jnp.int32)
    state, _ = loop.prefill(
        decoder, both, sampling, stops, jnp.asarray(padded), lengths, limits, keys, capacity, 64
    )
    return decoder, both, sampling, stops, state


# ---------------------------------------------------------------------------------------- rows
@dataclass(frozen=True)
class Remembering(Scripted):
    """A scripted drafter whose wrong drafts depend on every rejected state of the round before."""

    keeps: frozenset = STATES - {"draft_hidden"}
    taps: tuple = (0, 2)

    def propose(self, params, vocabulary, draft, tokens, length, rejected, key, sampling):
        proposal, draft = super().propose(
            params, vocabulary, draft, tokens, length, rejected, key, sampling
        )
        slot = jnp.arange(self.num_draft, dtype=jnp.int32)[None]
        valid = slot < rejected.count[:, None]
        memory = rejected.tokens + rejected.argmax + (1e3 * rejected.certainty).astype(jnp.int32)
        for states in (rejected.features, rejected.final_hidden):
            memory += jnp.sum((states > 0).astype(jnp.int32), axis=-1)
        shift = jnp.sum(jnp.where(valid, memory, 0), axis=1) % (VOCAB - 1)
        wrong = slot >= params["right"][:, None]
        shifted = (proposal.tokens + shift[:, None]) % VOCAB
        return replace(proposal, tokens=jnp.where(wrong, shifted, proposal.tokens)), draft


# Right drafts, rounds run alone, limit, and the round in which the row stops inside a block.
PHASES = {
    "just prefilled": (3, 0, 60),
    "fully accepted": (7, 2, 60),
    "rejected at 0": (0, 2, 60),
    "rejected at 4": (4, 3, 60),
    "stops inside a block": (7, 1, 14),
    "finished": (7, 2, 5),
}
ROWS = [[10], [3, 1, 4, 1, 5], [7, 7, 8], [20, 30], [9] * 12, [40, 41]]


def row_of(tree, b):
    return jax.tree.map(lambda x: x[b : b + 1], tree)


def live(state, b):
    """Everything of a row that a later round may read; what is behind it may hold anything."""
    n, count, fresh = int(state.length[b]), int(state.rejected.count[b]), int(state.fresh[b])
    out = {"tokens": state.tokens[b, :n], "key": jax.random.key_data(state.key[b])}
    for name in ("length", "limit", "done", "round"):
        out[name] = getattr(state, name)[b]
    for layer, (k, v) in enumerate(zip(state.target.k, state.target.v, strict=True)):
        out[f"keys {layer}"], out[f"values {layer}"] = k[b, :, : n - 1], v[b, :, : n - 1]
    for name in ("tokens", "features", "final_hidden", "argmax", "certainty"):
        out[f"rejected {name}"] = getattr(state.rejected, name)[b, :count]
    for name in ("rounds", "proposed", "accepted", "histogram"):
        out[name] = getattr(state.stats, name)[b]
    if not state.done[b]:  # nobody drafts for a finished row
        out["features"] = state.features[b, :fresh]
    return {name: np.asarray(x) for name, x in out.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_in_different_phases_do_not_see_each_other(pair, temperature):
    loaded, _ = pair
    n = len(ROWS)
    how = {"temperature": temperature, "seed": 2} if temperature else {"temperature": 0}
    answers = specjax.generate(loaded, ROWS, max_new_tokens=80, eos_token_id=[], **how).tokens
    right, rounds, limits = zip(*PHASES.values(), strict=True)
    weights = script(ROWS, answers, right, VOCAB)
    keys = row_keys(2, jnp.arange(n))
    decoder, both, sampling, stops, start = prefilled(
        loaded, Remembering(num_draft=7), weights, ROWS, limits, keys, temperature
    )
    log = []  # the state of all rows after every round
    for _ in range(max(rounds) + 1):
        log.append(jax.tree.map(jnp.copy, start))
        start, _ = loop.run_rounds(decoder, both, sampling, stops, start, 1)
    mixed = jax.tree.map(
        lambda *rows: jnp.concatenate(rows), *(row_of(log[r], b) for b, r in enumerate(rounds))
    )
    assert mixed.done.tolist() == [False] * 5 + [True]
    assert mixed.rejected.count.tolist() == [0, 0, 7, 3, 0, 0]

    def after(rows, width, state):
        """The state after three more rounds, and what these emitted."""
        part = both._replace(drafter=weights | {k: weights[k][rows] for k in ("script", "right")})
        heat = replace(sampling, temperature=sampling.temperature[:width])
        emitted = []
        for _ in range(3):
            state, info = loop.run_rounds(decoder, part, heat, stops, state, 1)
            emitted.append(np.array(info.emitted[0]))
        return state, np.array(emitted)

    together, emitted = after(slice(None), n, jax.tree.map(jnp.copy, mixed))
    assert emitted[:, :3].T.tolist() == [[4, 4, 4], [8, 8, 8], [1, 1, 1]]
    assert emitted[:, 4:].T.tolist() == [[5, 0, 0], [0, 0, 0]]
    for b in range(n):
        alone = replace(jax.tree.map(jnp.copy, mixed), done=mixed.done | (jnp.arange(n) != b))
        same_width, _ = after(slice(None), n, alone)
        one, _ = after(slice(b, b + 1), 1, jax.tree.map(jnp.copy, row_of(mixed, b)))
        wide, narrow = live(same_width, b), live(one, 0)
        for name, values in live(together, b).items():
            np.testing.assert_array_equal(values, wide[name], err_msg=name)
            if values.dtype.kind == "f":  # another width may round differently
                np.testing.assert_allclose(values, narrow[name], atol=1e-4, err_msg=name)
            else:
                np.testing.assert_array_equal(values, narrow[name], err_msg=name)


# ---------------------------------------------------------------------------- memory, transfers
def probing(pair, limit=1900, capacity=2048, temperature=1.0, B=1):
    loaded, drafter = pair
    probe = Probe(drafter.config, drafter.config.num_drafts)
    keys = row_keys(0, jnp.arange(B))
    return prefilled(
        loaded, probe, drafter.params, ROWS[:B], [limit] * B, keys, temperature, capacity
    )


def held(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_thousand_rounds_hold_what_the_first_held(pair):
    decoder, weights, sampling, stops, state = probing(pair, limit=3900, capacity=4096)
    shapes, size = jax.tree.map(lambda x: (x.shape, x.dtype), state), held(state)
    compiled, alive = loop.run_rounds._cache_size(), []
    for _ in range(20):
        state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 50)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
        assert held(state) == size
        alive.append(held(jax.live_arrays()))
    assert len(set(alive)) == 1
    assert loop.run_rounds._cache_size() == compiled + 1
    assert state.stats.rounds.tolist() == [1000]
    assert not state.done.any()
    assert int(state.stats.accepted[0]) > 0


def test_nothing_is_transferred_inside_a_chunk(pair, monkeypatch):
    """No argument comes from the host, and the program itself calls nothing there."""
    decoder, weights, sampling, stops, state = probing(pair)
    state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 8)
    with jax.transfer_guard("disallow"):
        state, log = loop.run_rounds(decoder, weights, sampling, stops, state, 8)
        jax.block_until_ready(log)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            loop.run_rounds(decoder, weights, sampling, np.array([-1], np.int32), state, 8)

    def calls_the_host(logs):
        probe = replace(decoder.drafter, keeps=frozenset({"features"} if logs else ()))
        if logs:
            step = loop.step
            monkeypatch.setattr(loop, "step", lambda *a: (jax.debug.print("round"), step(*a))[1])
        lowered = loop.run_rounds.lower(
            replace(decoder, drafter=probe), weights, sampling, stops, kept_by(probe, state), 8
        )
        text = lowered.as_text()
        return any(word in text for word in ("callback", "infeed", "outfeed", "send", "recv"))

    assert not calls_the_host(False)
    assert calls_the_host(True)


def kept_by(drafter, state):
    """The state with the rejected buffers that this drafter keeps."""
    empty = {name: getattr(state.rejected, name)[:, :0] for name in STATES - drafter.keeps}
    empty |= {} if drafter.keeps else {"tokens": state.rejected.tokens[:, :0]}
    return replace(state, rejected=replace(state.rejected, **empty))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "B"), [(0.0, 1), (1.0, 3)])
def test_caches_are_updated_in_place(pair, temperature, B):
    """Donated state: outputs alias the caches, and temporaries are far below one layer of one."""
    decoder, weights, sampling, stops, state = probing(pair, 60, 4096, temperature, B)
    caches, layer = held((state.target, state.draft)), state.target.k[0].nbytes
    memory = (
        loop.run_rounds.lower(decoder, weights, sampling, stops, state, 8)
        .compile()
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < layer
    copied = jax.jit(loop.run_rounds.__wrapped__, static_argnums=(0, 5))
    memory = copied.lower(decoder, weights, sampling, stops, state, 8).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 0


# ---------------------------------------------------------------------------------------- mesh
@pytest.mark.slow
def test_the_loop_on_a_mesh_decodes_the_same(checkpoints, pair):
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    loaded = hub.load_target(checkpoints[0], mesh=mesh)
    drafter = hub.load_drafter(checkpoints[1], loaded)
    assert len(loaded.params["embed"].sharding.device_set) == 2
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(drafter.params))
    for how in (
        {},
        {"temperature": 1.0, "verify": "match"},
        {"temperature": 0.8, "verify": "token"},
    ):
        one, two = (
            specjax.generate(
                target, ROWS[:3], drafter=made, max_new_tokens=24, eos_token_id=[], **how
            )
            for target, made in (pair, (loaded, drafter))
        )
        assert one.tokens == two.tokens
        assert [s.accepted for s in one.stats] == [s.accepted for s in two.stats]
