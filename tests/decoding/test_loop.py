"""Whatever the drafter, the rule and the batch: the tokens of plain decoding, float32, exactly."""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scripted import Scripted, script

import specjax
from specjax.decoding import loop
from specjax.decoding.drafting import DFlash, NGram, Plain
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.models import drafter_hf, hub, params, target
from specjax.models.drafter import table

PROMPTS = [[10], [3, 1, 4, 1, 5, 9, 2], [7, 7, 8, 20, 30, 40, 50, 60, 70, 80, 90, 11, 12]]
SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 0.7, "seed": 3},
    "hot": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7},
}


# Seeds whose greedy paths have no near tie and are not a few tokens in a circle.
SEEDS = {"llama": 3, "qwen3": 0, "sliding": 3}


def load(directory, config, seed):
    return hub.load_target(tiny.write(directory, config, tiny.target_tensors(config, seed)))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Tiny targets of two families, one with sliding layers; no end-of-text id of their own."""
    sliding = {
        "sliding_window": 5,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    configs = {
        "llama": tiny.target_config("llama", eos_token_id=...),
        "qwen3": tiny.target_config("qwen3", eos_token_id=...),
        "sliding": tiny.target_config("qwen3", eos_token_id=..., **sliding),
    }
    return {
        name: load(tmp_path_factory.mktemp(name), config, SEEDS[name])
        for name, config in configs.items()
    } | {"stories": specjax.load_target("stories260k")}


@pytest.fixture(scope="module")
def plain(targets):
    """Plain decoding of the prompts, once for every target and setting."""
    made = {}

    def get(name, setting, n=40):
        key = name, setting, n
        if key not in made:
            made[key] = specjax.generate(
                targets[name], PROMPTS, max_new_tokens=n, eos_token_id=[], **SETTINGS[setting]
            ).tokens
        return made[key]

    return get


def dflash(loaded, **overrides):
    """A DFlash drafter with random weights for a tiny target."""
    width = loaded.config.layers.hidden_size
    vocab = loaded.config.vocab_size
    ids = {"target_layer_ids": [0, 2], "mask_token_id": 16}
    config = drafter_hf.config_from_hf(
        tiny.drafter_config(
            hidden_size=width,
            vocab_size=vocab,
            num_target_layers=loaded.config.layers.num_layers,
            dflash_config=ids,
            max_position_embeddings=512,
            **overrides,
        )
    )
    return hub.Drafter(
        "random", loaded.directory, config, params.init(table(config), jax.random.key(1))
    )


forward = jax.jit(target.forward, static_argnums=0, static_argnames="taps")


def whole(loaded, ids, taps=()):
    """One uncached pass over a text, padded so that all texts share a compile: hidden [n, E],
    features [n, F], keys per layer [G, n, D]."""
    tokens = np.zeros((1, 1, 128), np.int32)
    tokens[0, 0, : len(ids)] = ids
    positions = jnp.arange(128, dtype=jnp.int32)[None, None]
    out = forward(loaded.config, loaded.params, jnp.asarray(tokens), positions, taps=taps)
    n = len(ids)
    return out.hidden[0, 0, :n], out.features[0, 0, :n], [k[0, :, :n] for k in out.k]


def unequal(got, want):
    return [b for b, (one, two) in enumerate(zip(got, want, strict=True)) if one != two]


def slow_unless(fast, *axes):
    """Every combination of the axes; those outside `fast` are marked slow."""
    return [
        pytest.param(*combination, marks=() if fast(*combination) else pytest.mark.slow)
        for combination in itertools.product(*axes)
    ]


# ------------------------------------------------------------------------------------- parity
@pytest.mark.parametrize(
    ("name", "setting", "K"),
    slow_unless(
        lambda name, setting, K: (name == "llama" and K == 7) or (setting == "filtered" and K == 4),
        ["llama", "sliding", "stories"],
        SETTINGS,
        [1, 4, 7, 15],
    ),
)
def test_scripted_drafts_change_nothing_but_the_rounds(targets, plain, name, setting, K):  # A1, A5
    want = plain(name, setting)
    vocab = targets[name].config.vocab_size
    for right in ([K] * 3, [0] * 3, [0, K // 2, K]):  # perfect, wrong, another k in every row
        weights = script(PROMPTS, want, right, vocab)
        out = specjax.generate(
            targets[name],
            PROMPTS,
            drafter=(Scripted(K), weights),
            max_new_tokens=40,
            eos_token_id=[],
            **SETTINGS[setting],
        )
        assert not unequal(out.tokens, want)
        for stats, k in zip(out.stats, right, strict=True):  # case F7
            assert stats.rounds == -(-39 // (k + 1))
            assert stats.accepted[:-1] == [k] * (stats.rounds - 1)
            assert sum(stats.emitted) + 1 == stats.new_tokens == 40


@pytest.mark.parametrize(
    ("name", "setting"),
    slow_unless(lambda name, setting: name == "stories", ["llama", "stories"], SETTINGS),
)
def test_prompt_lookup_changes_nothing_but_the_rounds(targets, plain, name, setting):
    out = specjax.generate(
        targets[name],
        PROMPTS,
        drafter=NGram(5),
        max_new_tokens=40,
        eos_token_id=[],
        **SETTINGS[setting],
    )
    assert not unequal(out.tokens, plain(name, setting))
    if setting == "greedy":
        assert sum(s.rounds for s in out.stats) < 3 * 39  # it does find something


SLIDING = {
    "sliding_window": 6,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"] * 2,
}


KINDS = {
    "fill": {},
    "next": {"sample_from_anchor": True},
    "sliding": SLIDING,
    "short": {"num_draft": 3},
}


@pytest.mark.parametrize(
    ("kind", "setting", "verify"),
    slow_unless(
        lambda kind, setting, verify: (
            verify == "match" and (setting == "filtered" or kind == "next")
        ),
        KINDS,
        SETTINGS,
        ["match", "match-independent"],
    ),
)
def test_dflash_changes_nothing_but_the_rounds(targets, plain, kind, setting, verify):
    loaded, overrides = targets["qwen3"], dict(KINDS[kind])
    num_draft = overrides.pop("num_draft", None)
    out = specjax.generate(
        loaded,
        PROMPTS,
        drafter=dflash(loaded, **overrides),
        num_draft=num_draft,
        verify=verify,
        max_new_tokens=40,
        eos_token_id=[],
        **SETTINGS[setting],
    )
    assert not unequal(out.tokens, plain("qwen3", setting))
    assert out.settings["num_draft"] == {"fill": 7, "next": 8, "sliding": 7, "short": 3}[kind]


def test_a_row_alone_equals_the_row_in_a_batch(targets):
    for setting in SETTINGS.values():
        together = specjax.generate(targets["llama"], PROMPTS, max_new_tokens=20, **setting)
        by_two = specjax.generate(
            targets["llama"], PROMPTS, max_new_tokens=20, batch_size=2, **setting
        )
        assert together.tokens == by_two.tokens
        first = specjax.generate(targets["llama"], PROMPTS[0], max_new_tokens=20, **setting)
        assert first.tokens == together.tokens[0]


def test_the_token_rule_keeps_greedy_decoding(targets, plain):
    loaded = targets["qwen3"]
    out = specjax.generate(
        loaded, PROMPTS, drafter=dflash(loaded), verify="token", max_new_tokens=40, eos_token_id=[]
    )
    assert not unequal(out.tokens, plain("qwen3", "greedy"))
    sampled = specjax.generate(
        loaded, PROMPTS, drafter=dflash(loaded), verify="token", temperature=1.0, eos_token_id=[]
    )
    assert all(len(tokens) == 128 for tokens in sampled.tokens)
    assert sampled.settings["drafting"] == "independent"


# ------------------------------------------------------------------------------ stops, limits
@pytest.mark.parametrize("offset", range(1, 17))
def test_a_stop_anywhere_in_a_block_ends_the_row_there(targets, plain, offset):  # case B1
    answer = plain("llama", "greedy")[1]
    n = offset
    stop = answer[n - 1]
    n = answer.index(stop) + 1  # it may come earlier too
    weights = script(PROMPTS[1:2], [answer], 15, 97)
    out = specjax.generate(
        targets["llama"],
        PROMPTS[1],
        drafter=(Scripted(15), weights),
        max_new_tokens=40,
        eos_token_id=stop,
    )
    assert out.tokens == answer[:n]
    assert out.finish_reason == "stop"
    assert sum(out.stats.emitted) + 1 == n


@pytest.mark.parametrize("cap", range(1, 18))
def test_the_limit_is_exact_whatever_the_block(targets, plain, cap):  # case B2
    answer = plain("llama", "greedy")[1]
    weights = script(PROMPTS[1:2], [answer], 15, 97)
    out = specjax.generate(
        targets["llama"],
        PROMPTS[1],
        drafter=(Scripted(15), weights),
        max_new_tokens=cap,
        eos_token_id=[],
    )
    assert out.tokens == answer[:cap]
    assert out.finish_reason == "length"
    assert out.stats.rounds == -(-(cap - 1) // 16)
    assert out.stats.tau == (None if cap == 1 else (cap - 1) / out.stats.rounds)


def test_a_stop_before_the_limit_in_one_block_wins(targets, plain):  # case B2
    answer = plain("llama", "greedy")[1]
    at = next(i for i in range(2, 12) if answer[i] not in answer[:i])
    weights = script(PROMPTS[1:2], [answer], 15, 97)
    for cap, reason in ((at + 1, "stop"), (at + 3, "stop"), (at, "length")):
        out = specjax.generate(
            targets["llama"],
            PROMPTS[1],
            drafter=(Scripted(15), weights),
            max_new_tokens=cap,
            eos_token_id=answer[at],
        )
        assert (out.tokens, out.finish_reason) == (answer[: min(cap, at + 1)], reason)


@pytest.mark.parametrize("as_stop", [True, False])
def test_the_mask_id_is_a_token_like_any_other(targets, plain, as_stop):  # cases B4, B5
    loaded, want = targets["qwen3"], plain("qwen3", "greedy")
    emitted = want[0][5]
    unused = next(i for i in range(97) if all(i not in row for row in want))
    mask = unused if as_stop else emitted
    made = dflash(loaded)
    made = hub.Drafter("m", made.directory, replace(made.config, mask_token_id=mask), made.params)
    out = specjax.generate(
        loaded,
        PROMPTS,
        drafter=made,
        max_new_tokens=40,
        eos_token_id=[unused] if as_stop else [],
    )
    assert not unequal(out.tokens, want)


def test_rows_with_their_own_limits_and_stops(targets, plain):  # case A5
    want = plain("llama", "greedy")
    weights = script(PROMPTS, want, [0, 3, 7], 97)
    stop = want[2][9]
    limits = [5, 31, 40]
    out = specjax.generate(
        targets["llama"],
        PROMPTS,
        drafter=(Scripted(7), weights),
        max_new_tokens=limits,
        eos_token_id=stop,
    )
    for tokens, reason, full, limit in zip(
        out.tokens, out.finish_reason, want, limits, strict=True
    ):
        end = full.index(stop) + 1 if stop in full[:limit] else limit
        assert tokens == full[:end]
        assert reason == ("stop" if stop in full[:limit] else "length")


# --------------------------------------------------------------------------------------- state
@dataclass(frozen=True)
class Probe(DFlash):
    """DFlash that keeps everything of the rejected rows and uses nothing."""

    keeps: frozenset = frozenset(
        {"features", "final_hidden", "argmax", "certainty", "draft_hidden"}
    )


def started(loaded, drafter, weights, prompts, limit=60, rule="match", temperature=0.0):
    B = len(prompts)
    decoder = loop.Decoder(loaded.config, drafter, rule)
    both = loop.Weights(loaded.params, weights)
    sampling = make_sampling(
        temperature,
        0,
        1.0,
        batch=B,
        vocab_size=loaded.config.vocab_size,
        drafting="coupled" if temperature else "greedy",
    )
    padded = np.zeros((B, 128), np.int32)
    for b, prompt in enumerate(prompts):
        padded[b, : len(prompt)] = prompt
    stops = jnp.array([-1], jnp.int32)
    state, info = loop.prefill(
        decoder,
        both,
        sampling,
        stops,
        jnp.asarray(padded),
        jnp.asarray([len(p) for p in prompts], jnp.int32),
        jnp.full((B,), limit, jnp.int32),
        row_keys(0, jnp.arange(B)),
        128 + 64,
        64,
    )
    return decoder, both, sampling, stops, state, info


@pytest.mark.parametrize("layout", ["fill", "next"])
def test_every_row_of_the_rejected_buffer(targets, layout):
    """After each round: tokens, positions and states against independent passes (case F4)."""
    loaded = targets["qwen3"]
    made = dflash(loaded, sample_from_anchor=layout == "next")
    probe = Probe(made.config, made.config.num_drafts)
    decoder, weights, sampling, stops, state, _ = started(loaded, probe, made.params, PROMPTS)
    step = jax.jit(loop.step, static_argnums=0)
    drafting = jax.jit(loop.draft, static_argnums=0)
    rejections = 0
    assert state.rejected.count.tolist() == [0, 0, 0]
    for _ in range(6):
        before = state
        proposal, _ = drafting(decoder, weights, sampling, before)
        state, info = step(decoder, weights, sampling, stops, before)
        for b in range(3):
            m, start = int(info.accepted[b]), int(before.length[b])
            count = int(state.rejected.count[b])
            assert count == proposal.tokens.shape[1] - m
            drafted = proposal.tokens[b].tolist()
            assert state.rejected.tokens[b, :count].tolist() == drafted[m:]
            # The target, run once over the committed text and the whole proposal.
            text = [*before.tokens[b, :start].tolist(), *drafted]
            hidden, features, _ = whole(loaded, text, probe.taps)
            # Row r stands for position a' + r; a' = start + m holds the first rejected draft.
            at = slice(start + m, start + m + count)
            close = dict(atol=1e-5, rtol=1e-5)
            got = state.rejected
            np.testing.assert_allclose(got.features[b, :count], features[at], **close)
            np.testing.assert_allclose(got.final_hidden[b, :count], hidden[at], **close)
            logits = target.unembed(target.vocabulary(loaded.params), hidden[at])
            assert got.argmax[b, :count].tolist() == jnp.argmax(logits, -1).tolist()
            highest = jax.nn.softmax(logits, -1).max(-1)
            np.testing.assert_allclose(got.certainty[b, :count], highest, **close)
            np.testing.assert_allclose(got.draft_hidden[b, :count], proposal.hidden[b, m:], **close)
            rejections += count
    assert rejections > 0


def test_nothing_is_kept_that_nobody_reads(targets):
    loaded = targets["qwen3"]
    made = dflash(loaded)
    *_, state, _ = started(loaded, DFlash(made.config, 7), made.params, PROMPTS)
    kept = state.rejected
    assert {array.size for array in jax.tree.leaves(replace(kept, count=kept.tokens))} == {0}


@pytest.mark.parametrize("right", [0, 2, 7])
def test_the_state_after_a_round_is_that_of_a_fresh_prefill(targets, plain, right):  # A3
    loaded, want = targets["sliding"], plain("sliding", "greedy")
    scripts = script(PROMPTS, want, right, 97)
    decoder, weights, sampling, stops, state, _ = started(loaded, Scripted(7), scripts, PROMPTS)
    for _ in range(4):
        state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 1)
        for b, prompt in enumerate(PROMPTS):
            n = int(state.length[b])
            text = [*prompt, *want[b]][:n]
            assert state.tokens[b, :n].tolist() == text
            assert int(state.target.length[b]) == n - 1
            _, _, keys = whole(loaded, text)
            for cached, fresh in zip(state.target.k, keys, strict=True):
                np.testing.assert_allclose(
                    cached[b, :, : n - 1], fresh[:, : n - 1], atol=1e-5, rtol=1e-5
                )


def test_dead_rows_are_never_read(targets, plain):  # cases F3, F5, F8
    loaded, want = targets["qwen3"], plain("qwen3", "greedy")
    made = dflash(loaded)
    decoder, weights, sampling, stops, state, info = started(
        loaded, DFlash(made.config, 7), made.params, PROMPTS, limit=40
    )

    def poisoned(cache):
        def fill(rows):
            dead = jnp.arange(rows.shape[2])[None, :] >= cache.length[:, None]
            return jnp.where(dead[:, None, :, None], 1e4, rows)

        return replace(cache, k=tuple(map(fill, cache.k)), v=tuple(map(fill, cache.v)))

    tokens = [[int(info.tokens[b, 0])] for b in range(3)]
    while not bool(state.done.all()):
        state = replace(state, target=poisoned(state.target), draft=poisoned(state.draft))
        state, log = loop.run_rounds(decoder, weights, sampling, stops, state, 1)
        for b in range(3):
            tokens[b] += log.tokens[0, b, : int(log.emitted[0, b])].tolist()
        # The drafter's context is exactly the committed rows, less the fresh ones (case F4).
        assert state.draft.length.tolist() == (state.target.length - state.fresh).tolist()
    assert not unequal(tokens, want)


def test_finished_rows_stay_as_they_are(targets, plain):  # case F8
    loaded, want = targets["llama"], plain("llama", "greedy")
    scripts = script(PROMPTS, want, [0, 7, 0], 97)
    decoder, weights, sampling, stops, state, _ = started(
        loaded, Scripted(7), scripts, PROMPTS, limit=17
    )
    state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 2)
    assert state.done.tolist() == [False, True, False]
    n = int(state.length[1])
    frozen = [np.array(rows[1, :, : n - 1]) for rows in (*state.target.k, *state.target.v)]
    rounds = int(state.stats.rounds[1])
    state = loop.run(decoder, weights, sampling, stops, state)
    assert state.done.all()
    assert (int(state.length[1]), int(state.stats.rounds[1])) == (n, rounds)
    for before, rows in zip(frozen, (*state.target.k, *state.target.v), strict=True):
        np.testing.assert_array_equal(before, rows[1, :, : n - 1])


def test_shapes_stay_over_many_rounds_and_one_compile_serves_them(targets):
    loaded = targets["stories"]
    decoder, weights, sampling, stops, state, _ = started(
        loaded, NGram(3), {}, PROMPTS[:1], limit=100
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    compiled = loop.run_rounds._cache_size()
    for _ in range(20):
        state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 5)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    assert loop.run_rounds._cache_size() == compiled + 1


def test_plain_decoding_equals_whole_passes(targets, plain):
    """The baseline itself, against argmaxes of uncached whole-text passes."""
    for name in SEEDS:
        loaded = targets[name]
        for prompt, answer in zip(PROMPTS, plain(name, "greedy"), strict=True):
            hidden, _, _ = whole(loaded, [*prompt, *answer])
            logits = target.unembed(target.vocabulary(loaded.params), hidden)[len(prompt) - 1 : -1]
            assert jnp.argmax(logits, -1).tolist() == answer
            # Exact equality is only a fair demand where no two logits nearly tie.
            best = jax.lax.top_k(logits, 2)[0]
            assert float((best[:, 0] - best[:, 1]).min()) > 1e-3


def test_plain_is_a_drafter_with_nothing_to_say():
    assert Plain() == Plain()
    assert hash(NGram(3)) == hash(NGram(3))
    assert NGram(3) != NGram(4)
