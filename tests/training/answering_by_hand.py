"""Prompts, settings and targets of the tests of answers, and kills between two batches."""

import pytest
import tiny

import specjax
from specjax.training import answering, data

TEXTS = [
    "Once upon a time",
    "The dog",
    "Lily saw a big",
    "Tom",
    "A cat sat on",
    "He",
    "One day, she",
]
GREEDY = {"max_new_tokens": 12, "batch_size": 3, "progress": False}
SAMPLED = GREEDY | {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}
SEVERAL = [["hi", "and?", "no"], ["what is 12"], ["ok", "ha ha"]]


def chatty_target(directory):
    """A tiny random target with a chat template and a context of 128."""
    config = tiny.target_config(
        "qwen3", vocab_size=306, eos_token_id=302, max_position_embeddings=128
    )
    tensors = tiny.target_tensors(config)
    tiny.write(directory, config, tensors, tokenizer=tiny.tokenizer_files())
    return specjax.load_target(directory)


def files(directory):
    """Everything in a directory, byte for byte."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prompts():
    return [[text] for text in TEXTS]


class Killed(BaseException):
    """What a kill is to the code: it ends there."""


def killed_after(monkeypatch, calls):
    """Lets so many batches through; the next one is killed."""
    real, left = answering.generate, [calls]

    def generate(*arguments, **more):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(*arguments, **more)

    monkeypatch.setattr(answering, "generate", generate)


def kill(target, asked, directory, settings, calls):
    """A run that is killed after so many batches; returns the unfinished file, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, calls)
        with pytest.raises(Killed):
            data.answer(target, asked, directory, **settings)
    path = directory / data.PARTIAL
    return path.read_bytes() if path.exists() else b""
