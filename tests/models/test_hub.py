"""Loading by name, configs and what fits with what (cases D1-D8, D12, E3, E5)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax.models import drafter, drafter_hf, hub, info, storage, target, text
from specjax.types import Vocabulary

DTYPE_FREE = {"torch_dtype", "dtype"}


def write_target(directory, family="qwen3", tensors=None, **overrides):
    config = tiny.target_config(family, **overrides)
    return tiny.write(directory, config, tensors or tiny.target_tensors(config))


def write_drafter(directory, tensors=None, **overrides):
    config = tiny.drafter_config(**overrides)
    return tiny.write(directory, config, tensors or tiny.drafter_tensors(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hub.load_target(write_target(tmp_path_factory.mktemp("target")))


# -------------------------------------------------------------------------------- drafters
def test_flat_and_nested_drafter_configs_mean_the_same():  # case D1
    ids = {"target_layer_ids": [0, 2], "mask_token_id": 96}
    flat = tiny.drafter_config(rope_theta=1e7, block_size=16, dflash_config=..., **ids)
    nested = tiny.drafter_config(
        rope_theta=...,
        rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
        block_size=...,
        dflash_config=ids | {"block_size": 16},
    )
    one, two = drafter_hf.config_from_hf(flat), drafter_hf.config_from_hf(nested)
    assert one == two
    assert (one.block_size, one.layers.rope.theta) == (16, 1e7)
    both = nested | {"block_size": 8, "rope_theta": 1e6}
    root = drafter_hf.config_from_hf(both)
    assert (root.block_size, root.layers.rope.theta) == (8, 1e6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block_size": ...}, "block_size"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"dflash_config": {"mask_token_id": 96}}, "dflash_config.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id"),
        *(
            (
                {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": mask}},
                "mask_token_id",
            )
            for mask in (-1, 97, 197)
        ),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 96}}, "last of 4"),
        ({"dflash_config": {"target_layer_ids": [2, 2], "mask_token_id": 96}}, "none twice"),
        ({"dflash_config": {"target_layer_ids": [-1, 2], "mask_token_id": 96}}, "counted from 0"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"markov_rank": 256}, "markov_rank = 256"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "for 2 layers"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2}}, "'foo'"),
        ({"block_size": 1}, "block_size 1"),
    ],
)
def test_drafter_configs_that_cannot_be_trusted_are_refused(overrides, message):  # D1, D2, D6, E5
    with pytest.raises(ValueError, match=message):
        drafter_hf.config_from_hf(tiny.drafter_config(**overrides))


def test_num_target_layers_is_optional(model, tmp_path):  # case D2
    loaded = hub.load_drafter(write_drafter(tmp_path / "d", num_target_layers=...), model)
    assert loaded.config.num_target_layers is None


def test_drafter_tensors_are_exact(model, tmp_path):  # case D6
    config = tiny.drafter_config()
    tensors = tiny.drafter_tensors(config)
    renamed = {("fcc.weight" if n == "fc.weight" else n): a for n, a in tensors.items()}
    with pytest.raises(ValueError, match=r"missing fc.weight.*\n.*unexpected fcc.weight"):
        hub.load_drafter(write_drafter(tmp_path / "renamed", renamed), model)
    extra = tensors | {"layers.0.self_attn.g_proj.weight": np.zeros((4, 48), np.float32)}
    with pytest.raises(ValueError, match=r"unexpected layers.0.self_attn.g_proj.weight"):
        hub.load_drafter(write_drafter(tmp_path / "extra", extra), model)
    ids = {"target_layer_ids": [0, 1, 2], "mask_token_id": 96}
    with pytest.raises(ValueError, match=r"fc.weight reads 96 features, but 3 taps of 48"):
        hub.load_drafter(write_drafter(tmp_path / "taps", tensors, dflash_config=ids), model)


def test_permuted_taps_with_permuted_columns_are_the_same_drafter(model, tmp_path):
    config = tiny.drafter_config()
    tensors = tiny.drafter_tensors(config)
    fc = tensors["fc.weight"]
    swapped = tensors | {"fc.weight": np.concatenate([fc[:, 48:], fc[:, :48]], axis=1)}
    ids = {"target_layer_ids": [2, 0], "mask_token_id": 96}
    one = hub.load_drafter(write_drafter(tmp_path / "a", tensors), model)
    two = hub.load_drafter(write_drafter(tmp_path / "b", swapped, dflash_config=ids), model)
    tokens = jnp.arange(1, 9, dtype=jnp.int32).reshape(1, 1, 8)
    positions = jnp.arange(8, dtype=jnp.int32).reshape(1, 1, 8)
    fused = [
        drafter.fuse(
            loaded.config,
            loaded.params,
            target.forward(
                model.config, model.params, tokens, positions, taps=loaded.config.taps
            ).features,
        )
        for loaded in (one, two)
    ]
    np.testing.assert_allclose(fused[0], fused[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 64}, "hidden size 64"),
        ({"num_target_layers": 6}, "6 layers"),
        (
            {
                "vocab_size": 200,
                "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 150},
            },
            "150",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(overrides, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        hub.load_drafter(write_drafter(tmp_path / "d", **overrides), model)


def test_frozen_copies_must_be_the_targets_own(model, tmp_path):
    """DeepSpec files carry the target's embedding and head."""
    overrides = {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": ...,
        "target_layer_ids": [0, 2],
        "mask_token_id": 96,
        "block_size": 7,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "num_anchors": 512,
    }
    tensors = tiny.drafter_tensors(tiny.drafter_config(**overrides))
    own = {
        "embed_tokens.weight": np.asarray(model.params["embed"]),
        "lm_head.weight": np.asarray(model.params["head"]),
    }
    loaded = hub.load_drafter(write_drafter(tmp_path / "own", tensors | own, **overrides), model)
    assert (loaded.config.layout, loaded.config.num_drafts) == ("next", 7)
    assert set(loaded.params) == {"fc", "hidden_norm", "layers", "norm"}
    other = own | {"lm_head.weight": own["lm_head.weight"] + 1}
    with pytest.raises(ValueError, match=r"lm_head.weight is not the head of"):
        hub.load_drafter(write_drafter(tmp_path / "other", tensors | other, **overrides), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sample_from_anchor": True},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "use_sliding_window": True,
        },
        {"is_causal": True, "final_logit_softcapping": 20.0, "output_multiplier": 0.5},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_drafters_are_written_as_they_were_read(overrides, dtype, model, tmp_path):
    loaded = hub.load_drafter(write_drafter(tmp_path / "in", **overrides), model)
    hub.save_drafter(tmp_path / "out", loaded, dtype=dtype)
    again = hub.load_drafter(tmp_path / "out", model)
    assert again.config == loaded.config
    written = storage.open_checkpoint(tmp_path / "out")
    for name, array in tiny.drafter_tensors(tiny.drafter_config(**overrides)).items():
        np.testing.assert_array_equal(written.read(name), array.astype(dtype))
    config = storage.read_json(tmp_path / "out" / "config.json")
    assert config["dtype"] == dtype
    ids = config.get("dflash_config", config)["target_layer_ids"]
    assert ids == [0, 2]  # unshifted, case E3


# ----------------------------------------------------------------- speculators, reduced vocabulary
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 96,
    "block_size": 8,
    "draft_vocab_size": 32,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}


def speculators(directory, model, drop=(), **tensors):
    inner = tiny.drafter_config(dflash_config=..., block_size=..., num_target_layers=...)
    config = SPECULATORS | {"transformer_layer_config": inner}
    kept = np.arange(1, 97, 3)
    body = tiny.drafter_tensors(tiny.drafter_config()) | {
        "lm_head.weight": np.asarray(model.params["head"])[kept] * 2,
        "embed_tokens.weight": np.asarray(model.params["embed"]),
        "d2t": kept - np.arange(32),
        "t2d": np.isin(np.arange(97), kept),
    }
    body = {name: value for name, value in (body | tensors).items() if name not in drop}
    storage.write_directory(directory, body, {"config.json": config})
    return kept


def test_a_reduced_vocabulary_is_mapped_and_its_head_kept(model, tmp_path):  # case D5
    kept = speculators(tmp_path / "d", model)
    loaded = hub.load_drafter(tmp_path / "d", model)
    assert loaded.config.taps == (0, 2)  # its ids count the embedding as 0
    np.testing.assert_array_equal(drafter.target_ids(loaded.params, jnp.arange(32)), kept)
    hidden = jnp.asarray(tiny.tensor("h", (1, 1, 8, 48)))
    vocabulary = target.vocabulary(model.params)
    logits = drafter.unembed(loaded.config, loaded.params, vocabulary, hidden)
    full = target.unembed(vocabulary, hidden)
    assert logits.shape == (1, 1, 8, 32)
    np.testing.assert_allclose(logits, 2 * full[..., kept], atol=1e-4, rtol=1e-5)


def test_a_reduced_head_without_a_sound_map_is_refused(model, tmp_path):  # case D5
    speculators(tmp_path / "none", model, drop=("d2t",))
    with pytest.raises(ValueError, match="needs the map d2t"):
        hub.load_drafter(tmp_path / "none", model)
    speculators(tmp_path / "far", model, d2t=np.full(32, 96))
    with pytest.raises(ValueError, match="d2t maps outside"):
        hub.load_drafter(tmp_path / "far", model)
    speculators(tmp_path / "nohead", model, drop=("lm_head.weight",))
    with pytest.raises(ValueError, match=r"missing lm_head.weight \[32, 48\]"):
        hub.load_drafter(tmp_path / "nohead", model)


def test_padded_rows_of_the_vocabulary_are_rows_like_any_other(tmp_path):  # case D5
    """V = 97 padded to 128: the head has 128 rows for plain decoding and for drafting alike."""
    padded = hub.load_target(write_target(tmp_path / "t", vocab_size=128))
    loaded = hub.load_drafter(write_drafter(tmp_path / "d"), padded)
    hidden = jnp.asarray(tiny.tensor("h", (1, 1, 8, 48)))
    vocabulary = target.vocabulary(padded.params)
    np.testing.assert_array_equal(
        drafter.unembed(loaded.config, loaded.params, vocabulary, hidden),
        target.unembed(vocabulary, hidden),
    )


# -------------------------------------------------------------------------------- targets
def numpy_logits(tensors, tokens, tied):
    """An independent forward of a 1-layer Llama without attention to others: one token."""
    x = tensors["model.embed_tokens.weight"][tokens]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    layer = "model.layers.0."
    y = norm(x, f"{layer}input_layernorm.weight")
    v = y @ tensors[f"{layer}self_attn.v_proj.weight"].T  # a row that sees itself only
    v = np.repeat(v.reshape(len(tokens), 2, 12), 2, axis=1).reshape(len(tokens), 48)
    x = x + v @ tensors[f"{layer}self_attn.o_proj.weight"].T
    y = norm(x, f"{layer}post_attention_layernorm.weight")
    gate, up = (y @ tensors[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{layer}mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return norm(x, "model.norm.weight") @ tensors[head].T


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_honoured_both_ways(tied, tmp_path):  # case D7
    config = tiny.target_config("llama", num_hidden_layers=1, tie_word_embeddings=tied)
    tensors = tiny.target_tensors(config)
    loaded = hub.load_target(tiny.write(tmp_path / "m", config, tensors))
    tokens = np.arange(1, 65, dtype=np.int32)
    single = jnp.asarray(tokens).reshape(64, 1, 1)
    out = target.forward(loaded.config, loaded.params, single, jnp.zeros_like(single))
    got = target.unembed(target.vocabulary(loaded.params), out.hidden)[:, 0, 0]
    want = numpy_logits({n: a.astype(np.float64) for n, a in tensors.items()}, tokens, tied)
    np.testing.assert_allclose(got, want, atol=1e-4)
    shifted = want - want.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    perplexity = np.exp(-logp[np.arange(63), tokens[1:]].mean())
    assert abs(perplexity - tiny.VOCAB) > 1


def test_a_tied_config_takes_an_equal_head_and_refuses_another(tmp_path):  # case D7
    config = tiny.target_config("llama", tie_word_embeddings=True)
    tensors = tiny.target_tensors(config)
    embed = tensors["model.embed_tokens.weight"]
    loaded = hub.load_target(
        tiny.write(tmp_path / "a", config, tensors | {"lm_head.weight": embed})
    )
    assert "head" not in loaded.params
    other = tensors | {"lm_head.weight": embed + 1}
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        hub.load_target(tiny.write(tmp_path / "b", config, other))


def test_head_dim_is_explicit_or_the_family_default():  # case D8
    explicit = target.table(target.config_from_hf(tiny.target_config("qwen3")))["layers"][0]
    assert explicit["attention"]["q"]["weight"].published_shape == (64, 48)
    assert explicit["attention"]["k"]["weight"].published_shape == (32, 48)
    assert explicit["attention"]["q_norm"].shape == (16,)
    absent = target.config_from_hf(tiny.target_config("qwen3", head_dim=...))
    assert absent.layers.head_dim == 128
    assert target.config_from_hf(tiny.target_config("llama")).layers.head_dim == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"hidden_size": ...}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "multiple of key/value heads"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_targets_that_are_not_supported_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        target.config_from_hf(tiny.target_config("qwen3", **overrides))


def test_every_end_of_text_id_is_found(tmp_path):  # case B6
    config = tiny.target_config("qwen3", eos_token_id=5)
    directory = tiny.write(
        tmp_path / "a",
        config,
        tiny.target_tensors(config),
        generation_config={"eos_token_id": [5, 7]},
    )
    assert hub.load_target(directory).eos_token_ids == (5, 7)
    assert hub.load_target(write_target(tmp_path / "b", eos_token_id=5)).eos_token_ids == (5,)
    bare = tiny.target_config("qwen3", eos_token_id=..., vocab_size=320)
    files = tiny.tokenizer_files()
    tiny.write(tmp_path / "c", bare, tiny.target_tensors(bare), tokenizer=files)
    assert hub.load_target(tmp_path / "c").eos_token_ids == (302,)
    assert hub.load_target(write_target(tmp_path / "d", eos_token_id=...)).eos_token_ids == ()


def test_names_that_lead_nowhere_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no packaged name \(stories260k, "):
        hub.load_target("nothing")
    with pytest.raises(FileNotFoundError, match="make smollm2"):
        hub.load_target("smollm2-135m")
    with pytest.raises(ValueError, match="float8"):
        hub.load_target("stories260k", dtype="float8_e4m3fn")


# ---------------------------------------------------------------------------- shapes of real ones
REAL_TARGETS = {"hidden_size": 4096, "num_hidden_layers": 36}
REAL_DRAFTERS = {
    # name: (config as published, tensors, parameters in millions)
    "Qwen3-4B-DFlash-b16": ((2560, 9728, 36, [1, 9, 17, 25, 33], 151669, 151936, 1e6), 58, 537.4),
    "Qwen3-8B-DFlash-b16": ((4096, 12288, 36, [1, 9, 17, 25, 33], 151669, 151936, 1e6), 58, 1049.0),
    "Qwen3.6-27B-DFlash": ((5120, 17408, 64, [1, 16, 31, 46, 61], 248070, 248320, 1e7), 58, None),
}


def published(name):
    (hidden, mlp, depth, taps, mask, vocab, theta), *_ = REAL_DRAFTERS[name]
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 16,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": depth,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    own = {"target_layer_ids": taps, "mask_token_id": mask}
    if name == "Qwen3.6-27B-DFlash":  # flat layout, four sliding layers and a full one
        sliding = ["sliding_attention"] * 4 + ["full_attention"]
        window = {"use_sliding_window": True, "sliding_window": 2048, "layer_types": sliding}
        return config | own | window | {"max_position_embeddings": 262144}
    return config | {"dflash_config": own}


@pytest.mark.parametrize("name", REAL_DRAFTERS)
def test_published_drafters_load_by_shape(name):
    import jax

    from specjax.models import params
    from specjax.types import Block, KVCache

    _, tensors, millions = REAL_DRAFTERS[name]
    raw = json.loads(json.dumps(published(name)))
    config = drafter_hf.config_from_hf(raw)
    table = drafter.table(config)
    expected = tiny.drafter_shapes(raw)
    assert {p.hf: p.published_shape for p in params.leaves(table)} == expected
    assert len(expected) == tensors
    if millions:
        assert params.count(table) / 1e6 == pytest.approx(millions, abs=0.6)
    assert (config.layout, config.num_drafts) == ("fill", 15)
    windows = (2048,) * 4 + (None,) if "3.6" in name else (None,) * 5
    assert config.layers.windows == windows
    assert config.causal == tuple(window is not None for window in windows)

    E, V = config.layers.hidden_size, config.vocab_size
    shape = jax.ShapeDtypeStruct
    weights = params.abstract(table, jnp.bfloat16)
    words = Vocabulary(*(shape((V, E), jnp.bfloat16) for _ in range(2)))
    rows = tuple(shape((1, 8, 512, 128), jnp.bfloat16) for _ in range(5))
    cache = KVCache(rows, rows, shape((1,), jnp.int32))
    block = jax.eval_shape(
        lambda a, p: drafter.draft_block(config, a, p),
        shape((1,), jnp.int32),
        shape((1,), jnp.int32),
    )
    assert isinstance(block, Block)
    hidden = jax.eval_shape(
        lambda *args: drafter.forward(config, *args), weights, words, block, cache
    )
    assert (hidden.shape, hidden.dtype) == ((1, 1, 16, E), jnp.bfloat16)
    logits = jax.eval_shape(lambda *args: drafter.unembed(config, *args), weights, words, hidden)
    assert (logits.shape, logits.dtype) == ((1, 1, 16, V), jnp.float32)


# -------------------------------------------------------------------------------------- templates
def test_a_template_of_another_training_is_warned_about(tmp_path):  # case D12
    config = tiny.target_config("qwen3", vocab_size=320)
    files = tiny.tokenizer_files()
    model = hub.load_target(
        tiny.write(tmp_path / "t", config, tiny.target_tensors(config), tokenizer=files)
    )
    trained = text.template_fingerprint(model.tokenizer, enable_thinking=False)
    assert trained.endswith("thinking=off")
    assert trained != text.template_fingerprint(model.tokenizer, enable_thinking=True)
    same = write_drafter(tmp_path / "same", vocab_size=320, specjax={"template": trained})
    loaded = hub.load_drafter(same, model)
    hub.save_drafter(tmp_path / "kept", loaded)
    assert hub.load_drafter(tmp_path / "kept", model).config.template == trained
    other = write_drafter(
        tmp_path / "other", vocab_size=320, specjax={"template": "0123456789abcdef thinking=on"}
    )
    with pytest.warns(UserWarning, match="0123456789abcdef thinking=on"):
        hub.load_drafter(other, model)


# ------------------------------------------------------------------------- tokens that are drafted
def test_a_drafter_may_propose_some_tokens_only(model, tmp_path):
    """The file beside the checkpoint picks rows of the target's own head, and is written again."""
    directory = write_drafter(tmp_path / "d")
    free = hub.load_drafter(directory, model)
    kept = list(range(1, 97, 3))
    (directory / hub.DRAFT_IDS).write_text(json.dumps({"draft_ids": kept}))
    loaded = hub.load_drafter(directory, model)
    hidden = jnp.asarray(tiny.tensor("h", (1, 1, 8, 48)))
    vocabulary = target.vocabulary(model.params)
    full = drafter.unembed(free.config, free.params, vocabulary, hidden)
    some = drafter.unembed(loaded.config, loaded.params, vocabulary, hidden)
    np.testing.assert_allclose(some, full[..., jnp.asarray(kept)], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(drafter.target_ids(loaded.params, jnp.arange(32)), kept)
    hub.save_drafter(tmp_path / "again", loaded, dtype=jnp.float32)
    again = hub.load_drafter(tmp_path / "again", model)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, again.params)
    own = drafter.unrestricted(loaded.config, loaded.params)
    assert jax.tree.structure(own) == jax.tree.structure(free.params)
    (directory / hub.DRAFT_IDS).write_text(json.dumps({"draft_ids": list(range(97))}))
    assert "target_ids" not in hub.load_drafter(directory, model).params  # all: as without a file


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [0, 97], [-1, 4], ["a"], None, [True]])
def test_draft_ids_that_are_no_tokens_are_refused(ids, model, tmp_path):
    directory = write_drafter(tmp_path / "d")
    (directory / hub.DRAFT_IDS).write_text(json.dumps({"draft_ids": ids}))
    for read in (lambda: hub.load_drafter(directory, model), lambda: info.describe(directory)):
        with pytest.raises(ValueError, match="must hold draft_ids, ascending tokens"):
            read()
