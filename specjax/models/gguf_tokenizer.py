"""The tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

Two kinds: byte-level BPE ("gpt2": merges are stored) and SentencePiece BPE ("llama": scores are
stored). What a file leaves unsaid follows llama.cpp (`src/llama-vocab.cpp`), which defines the
format; a pre-tokenizer that is not known here is refused, since a wrong split gives wrong ids.
transformers' own GGUF reader is not used: it has no `smollm` split and moves between releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama-v3", "llama3")
_SPLITS = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
    **dict.fromkeys(_LLAMA3, (pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),)),
}


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens, None where the file names none."""

    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    end_of_turn: tuple[int, ...]  # further ids that end an answer (eot, eom)


def tokenizer_files(
    metadata: Mapping[str, Any], vocab_size: int, context: int
) -> tuple[dict[str, Any], SpecialIds]:
    """Translates the `tokenizer.*` metadata of a GGUF file.

    Args:
      metadata: key -> value, arrays as lists.
      vocab_size: rows of the embedding, which the vocabulary must match.
      context: longest text in tokens, stated in the tokenizer's config.

    Returns:
      The files by name, and the special ids.

    Raises:
      ValueError: a missing key, an unknown tokenizer or pre-tokenizer, ids out of range, or a
        vocabulary of another size.
    """
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, the embedding {vocab_size} rows"
        )
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds a token twice")
    kind = _required(metadata, "tokenizer.ggml.model")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    for name in ("token_type", "scores"):
        found = len(metadata.get(f"tokenizer.ggml.{name}", tokens))
        if found != len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} has {found} entries for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        scores = _required(metadata, "tokenizer.ggml.scores")
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer = sentencepiece_bpe(tokens, scores, types, prefix=prefix)
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    add_special_tokens(tokenizer, tokens, types)
    ids = _special_ids(metadata, kind, len(tokens))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata))
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    add_ends(tokenizer, ids.bos if add_bos else None, ids.eos if add_eos else None)
    if add_bos and ids.bos is None:
        raise ValueError("the tokenizer prepends BOS, but tokenizer.ggml.bos_token_id is missing")
    if add_eos and ids.eos is None:
        raise ValueError("the tokenizer appends EOS, but tokenizer.ggml.eos_token_id is missing")
    names = {
        f"{name}_token": None if token_id is None else tokens[token_id]
        for name, token_id in [
            ("bos", ids.bos),
            ("eos", ids.eos),
            ("unk", ids.unk),
            ("pad", ids.pad),
        ]
    }
    config = tokenizer_config(names, add_bos=add_bos, add_eos=add_eos, context=context)
    config |= _chat_templates(metadata)
    return {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": config}, ids


def tokenizer_config(
    names: Mapping[str, str | None], *, add_bos: bool, add_eos: bool, context: int
) -> dict[str, Any]:
    """`tokenizer_config.json` for a complete `tokenizer.json`; `names` has `bos_token`, ..."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": bool(add_bos),
        "add_eos_token": bool(add_eos),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    space: str = "▁",
    prefix: bool = True,
) -> Tokenizer:
    """SentencePiece BPE: join the neighbours whose union has the best score, leftmost first.

    Bytes without a token become `<0xNN>`. The merge list ranks every pair by its union's score.
    It equals joining by score unless two unequal pairs with one union overlap in a text, which
    needs a periodic text and a token of unequal periods.

    Args:
      tokens, scores, types: one entry an id.
      space: how the vocabulary spells a space.
      prefix: a space is put before the text.
    """
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unk = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(tokens, scores, types),
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalize: list[Any] = [normalizers.Prepend(space)] if prefix else []
    decode: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space != " ":
        normalize.append(normalizers.Replace(" ", space))
        decode.insert(0, decoders.Replace(space, " "))
    if prefix:
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalize)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Keeps control tokens (special) and user-defined tokens whole wherever they are written."""
    for wanted, special in [(CONTROL, True), (USER_DEFINED, False)]:
        chosen = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=special) for token in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def add_ends(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes encoding put the given ids around the text; None puts nothing there."""
    special = [(tokenizer.id_to_token(i), i) for i in (bos, eos) if i is not None]
    if not special:
        return
    before = [] if bos is None else [tokenizer.id_to_token(bos)]
    after = [] if eos is None else [tokenizer.id_to_token(eos)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1"]
        + [f"{token}:1" for token in after],
        special_tokens=special,
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = _required(metadata, "tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_SPLITS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    llama3 = pre in _LLAMA3
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama3)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_SPLITS[pre], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    plain = [
        (token, score)
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    ]
    known = {token for token, _ in plain}
    return [
        (token[:cut], token[cut:])
        for token, _ in sorted(plain, key=lambda item: -item[1])
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """llama.cpp's default: SentencePiece and Llama 3 prepend BOS, other byte-level ones do not."""
    return metadata["tokenizer.ggml.model"] == "llama" or metadata["tokenizer.ggml.pre"] in _LLAMA3


def _special_ids(metadata: Mapping[str, Any], kind: str, vocab_size: int) -> SpecialIds:
    # A SentencePiece file that names none means these (llama.cpp); a byte-level one means none.
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    ids = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ids[name] = metadata.get(key, defaults.get(name))
        if ids[name] is not None and not 0 <= ids[name] < vocab_size:
            raise ValueError(f"{key} = {ids[name]} is outside the vocabulary of {vocab_size}")
    more = [ids[name] for name in ("eot", "eom") if ids[name] not in (None, ids["eos"])]
    return SpecialIds(ids["bos"], ids["eos"], ids["unknown"], ids["padding"], tuple(more))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix)
    named = {
        key.removeprefix(prefix + "."): value
        for key, value in metadata.items()
        if key.startswith(prefix + ".")
    }
    if not named:
        return {} if default is None else {"chat_template": default}
    if default is not None:
        named = {"default": default} | named
    return {"chat_template": [{"name": n, "template": t} for n, t in named.items()]}


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"{key} is missing")
    return metadata[key]
