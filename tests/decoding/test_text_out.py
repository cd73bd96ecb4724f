"""Text out of the loop: stop strings, streaming, log probabilities, seeds, request after request.

Covers B3, B6, B7, B8, B10, B11, B12, C5, C6, C7, E2 (the warning), F1, F6.
"""

import gc
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scripted import Scripted, script

import specjax
from specjax.models import hub, target

TEXT = "abcdef ghijk"


def counting(directory, ids, vocab=306, tokenizer=True, **overrides):
    """A target that says `ids` one after the other, from ids[0] on, and then ids[0] again."""
    successor = np.zeros(vocab, np.int64)
    for one, two in zip(ids, [*ids[1:], ids[0]], strict=True):
        successor[one] = two
    files = tiny.tokenizer_files() if tokenizer else None
    return hub.load_target(tiny.successor_target(directory, successor, files, **overrides))


def perfect(prompt, answer, vocab, K=7):
    return Scripted(K), script([prompt], [answer], K, vocab)


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


@pytest.fixture(scope="module")
def byte_ids(tmp_path_factory):
    """Ids of a text byte by byte, none merged: what a model may well emit."""
    directory = tmp_path_factory.mktemp("bytes")
    for name, content in tiny.tokenizer_files().items():
        (directory / name).write_text(content, encoding="utf-8")
    from tokenizers import pre_tokenizers

    from specjax.models.text import load_tokenizer

    tokenizer = load_tokenizer(directory)
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def ids(text):
        ((piece, _),) = pre.pre_tokenize_str(text)
        return [tokenizer.convert_tokens_to_ids(symbol) for symbol in piece]

    return ids


# ---------------------------------------------------------------------------------- stop strings
@pytest.mark.parametrize("stop", ["def", ["zzz", "def"], "f g", "abc"])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_stop_string_ends_text_ids_and_logprobs_together(byte_ids, tmp_path, stop, drafted):  # B3
    ids = byte_ids("X" + TEXT)
    model = counting(tmp_path, ids)
    prompt, answer = ids[:1], ids[1:]
    drafter = perfect(prompt, answer, 306) if drafted else None
    arguments = dict(drafter=drafter, max_new_tokens=len(answer), stop=stop, logprobs=True)
    out = specjax.generate(model, prompt, **arguments)
    found = stop[-1] if isinstance(stop, list) else stop
    at = TEXT.index(found)
    assert out.text == TEXT[:at]
    assert out.tokens == answer[: at + len(found)]
    assert out.finish_reason == "stop"
    assert len(out.logprobs) == len(out.tokens) == out.stats.new_tokens
    assert sum(out.stats.emitted) + 1 == len(out.tokens)
    streamed = "".join(p for _, p in specjax.generate(model, prompt, stream=True, **arguments))
    assert streamed == out.text


def test_the_stop_string_that_is_complete_first_wins(byte_ids, tmp_path):
    """However many tokens arrive at once, so with and without a drafter."""
    ids = byte_ids("X" + TEXT)
    model = counting(tmp_path, ids)
    for drafter in (None, perfect(ids[:1], ids[1:], 306)):
        out = specjax.generate(
            model, ids[:1], drafter=drafter, max_new_tokens=10, stop=["abc", "b"]
        )
        assert (out.text, out.tokens) == ("a", ids[1:3])


def test_a_stop_string_that_never_comes_changes_nothing(byte_ids, tmp_path):
    ids = byte_ids("X" + TEXT)
    model = counting(tmp_path, ids)
    out = specjax.generate(model, ids[:1], max_new_tokens=len(TEXT), stop="jkl")
    assert (out.text, out.finish_reason) == (TEXT, "length")


# ------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("length", [13, 12, 9])
@pytest.mark.parametrize("K", [1, 3, 7])
def test_streaming_never_breaks_a_character(byte_ids, tmp_path, K, length):  # B7
    text = "ďa😀世Ω!"
    ids = byte_ids("X" + text)
    assert len(set(ids)) == len(ids) == 14
    model = counting(tmp_path, ids)
    answer = ids[1 : 1 + length]
    arguments = dict(drafter=perfect(ids[:1], answer, 306, K), max_new_tokens=length)
    pieces = [p for _, p in specjax.generate(model, ids[:1], stream=True, **arguments)]
    whole = model.tokenizer.decode(answer)
    assert "".join(pieces) == whole == specjax.generate(model, ids[:1], **arguments).text
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    assert ("\ufffd" in pieces[-1]) == ("\ufffd" in whole)


def test_streams_of_a_batch_are_its_texts(stories):
    prompts = ["Once upon a time", "The dog", "Lily"]
    out = specjax.generate(stories, prompts, max_new_tokens=30)
    texts = ["", "", ""]
    for index, piece in specjax.generate(stories, prompts, max_new_tokens=30, stream=True):
        texts[index] += piece
    assert texts == out.text


# --------------------------------------------------------------------------------------- logprobs
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_raw_logits(stories, temperature):  # B8
    prompt = stories.tokenizer("The dog").input_ids
    arguments = dict(max_new_tokens=30, temperature=temperature, logprobs=True)
    out = specjax.generate(stories, prompt, drafter=specjax.NGram(4), **arguments)
    text = jnp.asarray([*prompt, *out.tokens], jnp.int32)[None, None]
    positions = jnp.arange(text.shape[2], dtype=jnp.int32)[None, None]
    whole = target.forward(stories.config, stories.params, text, positions)
    logits = target.unembed(target.vocabulary(stories.params), whole.hidden[0, 0])
    want = jax.nn.log_softmax(logits, axis=-1)[len(prompt) - 1 : -1]
    want = want[jnp.arange(30), jnp.asarray(out.tokens)]
    np.testing.assert_allclose(out.logprobs, want, atol=1e-4)
    assert 0.0 not in out.logprobs
    assert out.logprobs == pytest.approx(
        specjax.generate(stories, prompt, **arguments).logprobs, abs=1e-4
    )


# ------------------------------------------------------------------------------------------ seeds
def test_seeds(stories):  # C6
    def text(seed, **more):
        return specjax.generate(
            stories, "The dog", max_new_tokens=40, temperature=1.0, seed=seed, **more
        ).text

    assert text(7) == text(7) == text(7, drafter=specjax.NGram(4))
    assert len({text(seed) for seed in range(20)}) > 10
    code = (
        "import specjax; t = specjax.load_target('stories260k');"
        "print(specjax.generate(t, 'The dog', max_new_tokens=40, temperature=1.0, seed=7).text)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == text(7) + "\n"


def test_prompts_of_a_call_have_noise_of_their_own(stories):
    out = specjax.generate(stories, ["The dog"] * 4, max_new_tokens=30, temperature=1.0)
    assert len(set(out.text)) == 4


def test_temperatures_per_prompt(stories):  # C7
    greedy = specjax.generate(stories, "The dog", max_new_tokens=30).tokens
    for tiny_heat in (0, 0.0, 1e-6):
        out = specjax.generate(stories, "The dog", max_new_tokens=30, temperature=tiny_heat)
        assert out.tokens == greedy
    mixed = specjax.generate(
        stories, ["The dog", "The dog"], max_new_tokens=30, temperature=[0.0, 1.0], logprobs=True
    )
    assert mixed.tokens[0] == greedy
    assert mixed.tokens[1] != greedy
    assert np.isfinite(mixed.logprobs).all()


def test_a_filter_that_is_off_is_off(stories):  # C5
    arguments = dict(max_new_tokens=20, temperature=1.0)
    want = specjax.generate(stories, "Lily", **arguments).tokens
    for off in (None, 0, -1, 512, 600):
        assert specjax.generate(stories, "Lily", top_k=off, **arguments).tokens == want
    one = specjax.generate(stories, "Lily", top_k=1, **arguments).tokens
    assert one == specjax.generate(stories, "Lily", max_new_tokens=20).tokens


# ----------------------------------------------------------------------------- request by request
def test_one_request_does_not_know_another(stories):  # F1
    long, short = "Once upon a time, there was a little girl named Lily. " * 3, "The"
    drafter = specjax.NGram(5)

    def run(prompt):
        return specjax.generate(stories, prompt, drafter=drafter, max_new_tokens=24).tokens

    first = [run(long), run(short)]
    with pytest.raises(ValueError, match="vocabulary"):
        specjax.generate(stories, [600], drafter=drafter)
    stream = specjax.generate(stories, long, drafter=drafter, max_new_tokens=24, stream=True)
    next(stream)
    stream.close()
    assert [run(long), run(short), run(long)] == [*first, first[0]]


def test_memory_and_compiles_do_not_grow(stories):  # F6
    from specjax.decoding.generate import compiles

    def held():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    sizes = []
    for call in range(50):
        prompt = [1, *range(3, 4 + call)]  # lengths within one bucket
        specjax.generate(stories, prompt, drafter=specjax.NGram(3), max_new_tokens=4 + call % 7)
        if call in (3, 49):
            sizes.append((held(), compiles()))
    assert sizes[0] == sizes[1]


def test_sampling_values_do_not_compile_again(stories):
    from specjax.decoding.generate import compiles

    def run(**values):
        specjax.generate(stories, "The", max_new_tokens=8, **values)
        return compiles()

    run(temperature=1.0)
    base = run(temperature=1.0, top_p=0.9)
    assert run(temperature=0.3, seed=4) == base
    assert run(temperature=0.5, top_p=0.3, top_k=7) == base


# --------------------------------------------------------------------------------------- requests
def test_the_result_has_the_shape_of_the_prompts(stories):
    one = specjax.generate(stories, "The dog", max_new_tokens=5)
    assert isinstance(one.text, str)
    many = specjax.generate(stories, ["The dog"], max_new_tokens=5)
    assert (many.text, many.tokens) == ([one.text], [one.tokens])
    ids = stories.tokenizer("The dog").input_ids
    assert specjax.generate(stories, ids, max_new_tokens=5).tokens == one.tokens
    assert specjax.generate(stories, [ids, ids], max_new_tokens=5).tokens == [one.tokens] * 2
    assert specjax.generate(stories, np.array(ids), max_new_tokens=5).tokens == one.tokens


def test_chat_messages_go_through_the_template(tmp_path):
    config = tiny.target_config("qwen3", vocab_size=320, eos_token_id=...)
    files = tiny.tokenizer_files()
    model = hub.load_target(
        tiny.write(tmp_path, config, tiny.target_tensors(config), tokenizer=files)
    )
    messages = [{"role": "user", "content": "ha ha"}]
    ids = model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    want = specjax.generate(model, ids, max_new_tokens=6)
    assert specjax.generate(model, messages, max_new_tokens=6).tokens == want.tokens
    both = specjax.generate(model, [messages, messages], max_new_tokens=6)
    assert both.tokens == [want.tokens] * 2


def test_defaults_come_from_the_generation_config(tmp_path):
    config = tiny.target_config("qwen3", eos_token_id=...)
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.8}
    directory = tiny.write(tmp_path, config, tiny.target_tensors(config), generation_config=sampled)
    model = hub.load_target(directory)
    default = specjax.generate(model, [3, 4], max_new_tokens=12, seed=3)
    explicit = specjax.generate(
        model, [3, 4], max_new_tokens=12, seed=3, temperature=0.9, top_k=20, top_p=0.8
    )
    assert default.tokens == explicit.tokens
    assert default.settings["mode"] == "sampled"
    greedy = specjax.generate(model, [3, 4], max_new_tokens=12, temperature=0.0)
    assert greedy.settings["mode"] == "greedy"


def test_a_drafter_that_is_too_short_steps_aside(stories):  # B10
    from test_loop import dflash

    config = tiny.target_config("qwen3", eos_token_id=...)
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        model = hub.load_target(tiny.write(directory, config, tiny.target_tensors(config)))
    made = dflash(model)
    short = hub.Drafter(
        "short",
        made.directory,
        type(made.config)(**{**vars(made.config), "max_positions": 32}),
        made.params,
    )
    prompt = list(range(40))
    want = specjax.generate(model, prompt, max_new_tokens=10).tokens
    with pytest.warns(UserWarning, match="50 tokens exceed the 32 positions of short"):
        out = specjax.generate(model, prompt, drafter=short, max_new_tokens=10)
    assert out.tokens == want
    assert out.settings["num_draft"] == 0


def test_a_useless_drafter_is_pointed_out(stories):  # E2
    prompt = stories.tokenizer("The dog").input_ids
    answer = specjax.generate(stories, prompt, max_new_tokens=40).tokens
    wrong = (Scripted(3), script([prompt], [answer], 0, 512))
    with pytest.warns(UserWarning, match=r"acceptance length 1\.00 over 39 rounds"):
        specjax.generate(stories, prompt, drafter=wrong, max_new_tokens=40)
    right = (Scripted(3), script([prompt], [answer], 1, 512))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specjax.generate(stories, prompt, drafter=right, max_new_tokens=40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts must be"),
        ({"prompts": ""}, None),  # this tokenizer adds a BOS
        ({"prompts": [[]]}, "a prompt is empty"),
        ({"prompts": "x" * 2000}, "exceed the 512 positions"),
        ({"prompts": [512]}, "token id 512"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": [1.0, 0.0]}, "2 temperatures for 1 prompts"),
        ({"top_k": -2}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": [3, 4]}, "2 values of max_new_tokens for 1 prompts"),
        ({"verify": "blocks"}, "verify='blocks'"),
        ({"reuse": "carryover"}, "needs a drafter from load_drafter"),
        ({"num_draft": 3}, "without a drafter"),
        ({"stop": ""}, "empty string"),
        ({"batch_size": 0}, "batch_size"),
        ({"eos_token_id": 512}, "eos_token_id 512"),
        ({"min_new_tokens": 6}, "min_new_tokens is not supported"),  # B12
        ({"repetition_penalty": 1.1}, "repetition_penalty is not supported"),  # B12
    ],
)
def test_bad_requests_are_refused_before_any_compute(stories, arguments, message):
    call = {"prompts": "The dog", "max_new_tokens": 4} | arguments
    if message is None:
        specjax.generate(stories, **call)
        return
    with pytest.raises(ValueError, match=message):
        specjax.generate(stories, **call)


def test_something_that_is_no_drafter_is_refused(stories):
    with pytest.raises(TypeError, match="is no drafter"):
        specjax.generate(stories, "The dog", drafter=42)
