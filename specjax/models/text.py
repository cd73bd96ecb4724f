"""Prompts to token ids: plain text, chat messages and the chat template's fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def has_tokenizer(directory: Path) -> bool:
    """Whether a model directory holds a tokenizer."""
    return (directory / "tokenizer_config.json").exists()


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a model directory.

    Raises:
      ValueError: the directory holds none.
    """
    if not has_tokenizer(directory):
        raise ValueError(f"{directory} holds no tokenizer: pass token ids instead of text")
    with _quiet_import():
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def tokenizer_fingerprint(directory: Path) -> str | None:
    """Names a tokenizer by its files; None where a directory holds none."""
    if not has_tokenizer(directory):
        return None
    digest = hashlib.sha256()
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
    for name in (*names, "tokenizer_config.json", "chat_template.jinja"):
        file = directory / name
        content = file.read_bytes() if file.exists() else b""
        digest.update(name.encode() + len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def token_ids(encoded: Any) -> list[int]:
    """A flat list of ids from what tokenizers return: a list, an array, or a mapping of them.

    transformers 5 gives a mapping (a UserDict, not a dict) where version 4 gave a list.

    Raises:
      ValueError: anything that is not one sequence of ids.
    """
    if isinstance(encoded, Mapping) or hasattr(encoded, "input_ids"):
        encoded = encoded["input_ids"]
    ids = np.asarray(encoded)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"expected one sequence of token ids, got shape {ids.shape}, {ids.dtype}")
    return [int(i) for i in ids]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text, with the special tokens the tokenizer itself adds (a BOS or none)."""
    # Not verbose: transformers would warn of long texts, which callers refuse in better words.
    return token_ids(tokenizer(text, verbose=False))


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, enable_thinking: bool = False
) -> list[int]:
    """Ids of a conversation up to where the assistant answers, by the model's own template.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: pass text or token ids instead")
    return token_ids(
        tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
            return_dict=False,
        )
    )


def template_fingerprint(tokenizer: Any, *, enable_thinking: bool = False) -> str:
    """Names what a drafter was trained on: the template's hash and the thinking flag."""
    digest = hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()[:16]
    return f"{digest} thinking={'on' if enable_thinking else 'off'}"


@contextmanager
def _quiet_import() -> Iterator[None]:
    """transformers says at import that it misses PyTorch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
