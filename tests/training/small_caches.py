"""Small feature caches of tiny targets."""

import numpy as np
import tiny

from specjax.models import hub
from specjax.training.data import Documents
from specjax.training.features import FeatureCache


def load(directory, family="llama", seed=0, **overrides):
    config = tiny.target_config(family, **overrides)
    tensors = tiny.target_tensors(config, seed)
    return hub.load_target(tiny.write(directory, config, tensors), dtype="float32")


def text(length, seed):
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)


def documents(*texts):
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return Documents(np.concatenate(texts), starts, np.ones(len(texts), np.int32), {})


SOURCES = [documents(*[text(9 + n, n) for n in range(20)]), documents(text(40, 50), text(3, 51))]
TOKENS = sum(len(one.tokens) for one in SOURCES)


def build(target, directory, taps=tiny.TAPS, sources=SOURCES, **more):
    more = {"final_hidden": True, "rows": 2, "chunk": 16, "progress": False} | more
    return FeatureCache.build(target, taps, sources, directory, **more)


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}
