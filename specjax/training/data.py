"""Training text: a target's own answers to prompts, with where each prompt ends.

A document is one prompt (a chat rendered up to the answer) and the answer that the target gave,
its end-of-text id included. Answers are made with the library's own batched `generate`; a run
that was interrupted goes on where it stopped and ends with the same files.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.hub import Target
from specjax.models.storage import write_file, write_json
from specjax.models.text import template_fingerprint
from specjax.training.answering import answer_all, dialogues
from specjax.training.identity import fingerprint
from specjax.training.partial import Partial, check_equal

ANSWERS, MANIFEST, PARTIAL = "answers.npz", "manifest.json", "answers.partial.jsonl"


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents one after another, in the order of their prompts and turns.

    Attributes:
      tokens: [n] int32.
      starts: [documents + 1] int64, where each begins; the last entry is n.
      prompt_lengths: [documents] int32, at least 1 and below the document's own length.
      manifest: how they were made, with counts.
    """

    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    manifest: Mapping[str, Any]

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.prompt_lengths)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        """The tokens [length] int32 of one document, and how many of them are its prompt."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        tokens = self.tokens[self.starts[index] : self.starts[index + 1]]
        return tokens, int(self.prompt_lengths[index])

    @property
    def supervised(self) -> np.ndarray:
        """[n] bool: the tokens of answers."""
        lengths = np.diff(self.starts)
        within = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], lengths)
        return within >= np.repeat(self.prompt_lengths, lengths)

    def occurring(self, vocab_size: int) -> np.ndarray:
        """Every id that occurs, prompts included: sorted, unique, int32.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        ids = np.unique(self.tokens)
        if ids.size and (ids[0] < 0 or ids[-1] >= vocab_size):
            raise ValueError(f"token id {ids[-1]} is outside the vocabulary of {vocab_size}")
        return ids.astype(np.int32)


def answer(
    target: Target,
    prompts: Sequence[Sequence[Any]] | int,
    directory: str | Path,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 48,
    limit: int | None = None,
    progress: bool = True,
) -> Documents:
    """Lets the target answer prompts and keeps the answers in `directory`.

    A directory that is complete is loaded, one that is not is continued: finished answers are
    appended to a file batch by batch. Which noise an answer gets depends on the settings alone,
    so that an interrupted run ends with the same file as one that was not.

    Args:
      target: the model.
      prompts: a list of turns each, as `evaluation.read_prompts` gives, every turn a text,
        messages or ids; or a number of texts that a base model begins with its BOS.
      directory: where `answers.npz` and `manifest.json` go.
      max_new_tokens: per answer.
      temperature, top_k, top_p, seed: how the answers are drawn; generation_config.json has no say.
      batch_size: answers made together. The loop compiles once per batch size and text bucket.
      limit: answer the first so many prompts only.
      progress: show a bar on stderr.

    Returns:
      One document per turn. A later turn whose history leaves no room in the target's context is
      left out with all behind it, and counted in the manifest.

    Raises:
      ValueError: prompts that cannot be answered as asked, or a directory with other settings.
    """
    asked = answer_settings(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        limit=limit,
    )
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        documents = load(directory)
        check_equal(f"{directory} holds", documents.manifest, asked)
        (directory / PARTIAL).unlink(missing_ok=True)
        return documents
    turns = dialogues(target, prompts, limit)
    partial = Partial(directory / PARTIAL, asked)
    left_out = answer_all(target, turns, partial, asked, progress)
    return _finish(directory, target, partial, asked | {"left_out_turns": left_out})


def answer_settings(
    target: Target,
    prompts: Sequence[Sequence[Any]] | int,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 48,
    limit: int | None = None,
) -> dict[str, Any]:
    """What decides the answers of a call of `answer`: the first line of its unfinished file.

    Raises:
      ValueError: a value that no call can have.
    """
    whole = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "limit": limit}
    for name, value in whole.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and {2**32 - 1}, not {seed}")
    if isinstance(prompts, int):
        if prompts > 1 and temperature == 0:
            raise ValueError(
                f"{prompts} texts at temperature 0 are all the same: set a temperature"
            )
        count = prompts if limit is None else min(prompts, limit)
        digest = f"{count} texts"
    else:
        said = json.dumps(list(prompts[:limit]), default=_plain, ensure_ascii=False)
        digest = f"{len(prompts[:limit])} prompts {hashlib.sha256(said.encode()).hexdigest()[:16]}"
    return {
        "target": target.name,
        "fingerprint": fingerprint(target),
        "template": template_fingerprint(target.tokenizer) if target.has_tokenizer else None,
        "eos_token_ids": list(target.eos_token_ids),
        "prompts": digest,
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "top_k": top_k,
        "top_p": float(top_p),
        "seed": seed,
        "batch_size": batch_size,
    }


def load(directory: str | Path) -> Documents:
    """The documents of a finished `answer`.

    Raises:
      FileNotFoundError: nothing there, or not finished.
      ValueError: a file that was cut short or changed.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).exists():
        if (directory / PARTIAL).exists():
            raise FileNotFoundError(
                f"{directory} is not finished: make its answers again with the same settings, "
                "which continues"
            )
        raise FileNotFoundError(f"{directory} holds no answers: {MANIFEST} is missing")
    remedy = f"copy it again, or remove {directory} and make the answers again"
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        expected = (manifest["sha256"], manifest["documents"], manifest["tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory / MANIFEST} is damaged ({type(error).__name__}: {error}): {remedy}"
        ) from None
    if not (directory / ANSWERS).exists():
        raise FileNotFoundError(f"{directory / ANSWERS} is missing: {remedy}")
    data = (directory / ANSWERS).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != expected[0]:
        raise ValueError(
            f"{directory / ANSWERS} was cut short or changed ({len(data)} bytes, sha256 {found}, "
            f"expected {expected[0]}): {remedy}"
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        tokens, starts = arrays["tokens"].astype(np.int32), arrays["starts"].astype(np.int64)
        prompt_lengths = arrays["prompt_lengths"].astype(np.int32)
    if (len(prompt_lengths), len(tokens)) != expected[1:]:
        raise ValueError(
            f"{directory}: {len(prompt_lengths)} documents of {len(tokens)} tokens, "
            f"{MANIFEST} says {expected[1]} of {expected[2]}: {remedy}"
        )
    return Documents(tokens, starts, prompt_lengths, manifest)


def _plain(value: Any) -> Any:
    """JSON of ids in arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise ValueError(f"a turn must be text, messages or ids, not {value!r}")


def _finish(
    directory: Path, target: Target, partial: Partial, manifest: dict[str, Any]
) -> Documents:
    """Writes the token file, then the manifest that says it is complete."""
    answers = partial.answers
    texts = [[*one.prompt, *one.answer] for one in answers]
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    prompt_lengths = np.asarray([len(one.prompt) for one in answers], np.int32)
    small = target.config.vocab_size <= np.iinfo(np.uint16).max + 1
    data = io.BytesIO()
    np.savez_compressed(
        data,
        tokens=tokens.astype(np.uint16 if small else np.int32),
        starts=starts,
        prompt_lengths=prompt_lengths,
    )
    manifest = manifest | {
        "documents": len(answers),
        "tokens": len(tokens),
        "answer_tokens": len(tokens) - int(prompt_lengths.sum()),
        # For people: answers are used with the target in any dtype, though near ties may differ.
        "computed_in": str(target.params["embed"].dtype),
        "sha256": hashlib.sha256(data.getbuffer()).hexdigest(),
    }
    write_file(directory / ANSWERS, data.getvalue())
    write_json(directory / MANIFEST, manifest)
    partial.remove()
    return Documents(tokens, starts, prompt_lengths, manifest)
