"""What a caller asked for, checked: prompts, limits, sampling values, drafter and rule.

Everything here runs on the host and raises before any compute.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.decoding.drafting import DFlash, Plain
from specjax.decoding.verify import check_rule
from specjax.models import hub
from specjax.models import reuse as reuse_methods
from specjax.models.hub import Target
from specjax.models.reuse import ReAnchor
from specjax.models.text import encode, render_chat
from specjax.types import Params, Reuse

# verify= -> (rule, how a drafter draws when the target samples)
RULES = {
    "match": ("match", "coupled"),
    "match-independent": ("match", "independent"),
    "token": ("token", "independent"),
    "block": ("block", "independent"),
}


def split(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether this is a single prompt, and the prompts as a list.

    Raises:
      ValueError: an empty list, or something that is no prompt.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise ValueError(f"prompts must be text, messages, ids or a list of them, not {prompts!r}")
    if isinstance(prompts[0], str | Sequence | np.ndarray):
        return False, list(prompts)
    return True, [prompts]  # messages, or ids


def token_ids(target: Target, prompt: Any, *, enable_thinking: bool) -> list[int]:
    """The ids of one prompt: text, chat messages, or ids as they are.

    Raises:
      ValueError: an empty prompt, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = encode(target.tokenizer, prompt)
        if not ids:
            raise ValueError("a prompt is empty and this tokenizer adds no BOS: give some text")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        ids = render_chat(target.tokenizer, prompt, enable_thinking=enable_thinking)
    else:
        ids = [_whole(i, "a token id") for i in prompt]
        if not ids:
            raise ValueError("a prompt is empty: give at least one token id")
    V = target.config.vocab_size
    wrong = [i for i in ids if not 0 <= i < V]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary (0 to {V - 1})")
    return ids


def limits(target: Target, prompts: list[list[int]], max_new_tokens: Any) -> list[int]:
    """New tokens allowed for each prompt.

    Raises:
      ValueError: not positive, not one per prompt, or beyond the target's context.
    """
    single = not isinstance(max_new_tokens, Sequence | np.ndarray)
    values = [max_new_tokens] * len(prompts) if single else max_new_tokens
    each = [_whole(value, "max_new_tokens") for value in values]
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} values of max_new_tokens for {len(prompts)} prompts")
    context = target.config.max_positions
    for ids, limit in zip(prompts, each, strict=True):
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {limit}")
        if len(ids) + limit > context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens {limit} exceed the {context} "
                f"positions of {target.name}: at most {context - len(ids)} new tokens fit"
            )
    return each


def network(
    target: Target,
    drafter: Any,
    num_draft: int | None,
    longest: int,
    reuse: Any = None,
    stop_below: float = 0.0,
) -> tuple[Any, Params]:
    """The drafter as the loop sees it, and its parameters.

    Args:
      target: what it drafts for.
      drafter: a loaded drafter, a `Drafter`, a pair of a `Drafter` and its parameters, or None.
      num_draft: drafts verified per round; None: all that it makes.
      longest: prompt and new tokens of the longest row.
      reuse, stop_below: as for `generate`.

    Raises:
      ValueError: a drafter of another target, more drafts than it makes, or a reuse of rejected
        states that it was not trained for.
      TypeError: no drafter at all.
    """
    if not isinstance(drafter, hub.Drafter) and reuse is not None:
        raise ValueError(f"reuse={reuse!r} needs a drafter from load_drafter, not {drafter!r}")
    if not isinstance(drafter, hub.Drafter) and stop_below:
        raise ValueError(f"stop_below={stop_below!r} needs a drafter with a verification head")
    if drafter is None:
        return Plain(), {}
    if isinstance(drafter, hub.Drafter):
        method = reuse_method(drafter, reuse)
        hub.check_fit(drafter.config, target.config, target.name)
        count = drafter.config.num_drafts if num_draft is None else num_draft
        if longest > drafter.config.max_positions:
            warnings.warn(
                f"{longest} tokens exceed the {drafter.config.max_positions} positions of "
                f"{drafter.name}: decoding without it",
                stacklevel=3,
            )
            return Plain(), {}
        # What is switched off is no part of the program: it shares the compile of plain DFlash.
        config, off = replace(drafter.config, reuse=None), set()
        if method != drafter.config.reuse:
            off.add("reuse")
        if not stop_below:
            config = replace(config, verification_head=False)
            off.add("verification_head")
        weights = {name: value for name, value in drafter.params.items() if name not in off}
        return DFlash(config, count, method, stop_below), weights
    made, params = drafter if isinstance(drafter, tuple) else (drafter, {})
    if not hasattr(made, "propose"):
        raise TypeError(f"{drafter!r} is no drafter: load one with load_drafter, or use NGram()")
    if num_draft is not None and num_draft != made.num_draft:
        raise ValueError(f"num_draft {num_draft}: this drafter is built for {made.num_draft}")
    return made, params


def reuse_method(drafter: hub.Drafter, reuse: Any) -> Reuse | None:
    """The method that `generate(reuse=)` names, for this drafter.

    Raises:
      ValueError: an unknown name, or a method that the drafter was not trained for.
    """
    trained = drafter.config.reuse
    if reuse is None:
        return trained
    if reuse == "off":
        return None
    if isinstance(reuse, ReAnchor):
        return reuse
    if not isinstance(reuse, str) or reuse not in reuse_methods.NAMES:
        names = ", ".join(("off", *reuse_methods.NAMES))
        raise ValueError(f"reuse={reuse!r} is not one of {names}")
    if reuse == "reanchor":
        return ReAnchor()
    name = None if trained is None else reuse_methods.name_of(trained)
    if reuse != name:
        raise ValueError(
            f"reuse={reuse!r}: {drafter.name} was trained "
            + ("without any reuse of rejected states" if name is None else f"for {name!r}")
            + "; train one for it, or use reuse='reanchor', which needs no training"
        )
    return trained


def sampling_values(
    target: Target, temperature: Any, top_k: int | None, top_p: float | None, count: int
) -> dict[str, Any]:
    """Temperature of each prompt, top-k and top-p; defaults from generation_config.json."""
    default = target.generation_config
    sampled = default.get("do_sample", False)
    if temperature is None:
        temperature = default.get("temperature", 1.0) if sampled else 0.0
    if top_k is None:
        top_k = default.get("top_k", 0) if sampled else 0
    if top_p is None:
        top_p = default.get("top_p", 1.0) if sampled else 1.0
    each = np.asarray(temperature, np.float32)
    if each.ndim == 0:
        each = np.full(count, each)
    if each.shape != (count,):
        raise ValueError(f"{each.size} temperatures for {count} prompts")
    return {"temperature": each, "top_k": top_k, "top_p": top_p}


def rule(
    name: str, temperature: np.ndarray, network: Any = None, steady: bool = True
) -> tuple[str, str]:
    """The verification rule and the way drafts are drawn.

    "auto" takes block verification for drafts that are drawn from a law that the drafter hands
    over: it keeps the most of them (`experiments/objectives`, 5 to 6% more tokens a round than
    match with coupled drafts). It takes match for point masses, where all rules keep the same and
    match needs no law, and where the number of drafts follows the clock (`steady` is false): under
    match the text is that of the seed all the same.

    Raises:
      ValueError: an unknown rule.
    """
    if name == "auto":
        sampled = steady and (temperature > 0).any() and getattr(network, "hands_law", False)
        name = "block" if sampled else "match"
    if name not in RULES:
        raise ValueError(f"verify={name!r} is not one of auto, {', '.join(RULES)}")
    chosen, drafting = RULES[name]
    drafting = drafting if (temperature > 0).any() else "greedy"
    check_rule(chosen, drafting)
    return chosen, drafting


def stop_ids(target: Target, eos_token_id: Any) -> tuple[int, ...]:
    """The ids that end an answer: the argument, else the model's own."""
    if eos_token_id is None:
        return target.eos_token_ids
    single = not isinstance(eos_token_id, Sequence | np.ndarray)
    ids = [_whole(i, "eos_token_id") for i in ([eos_token_id] if single else eos_token_id)]
    wrong = [i for i in ids if not 0 <= i < target.config.vocab_size]
    if wrong:
        raise ValueError(f"eos_token_id {wrong[0]} is outside the vocabulary")
    return tuple(ids)


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None


def stop_strings(target: Target, stop: Any, stream: bool) -> tuple[str, ...]:
    """The strings that end an answer.

    Raises:
      ValueError: an empty string, or text wanted from a target without tokenizer.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if (stops or stream) and not target.has_tokenizer:
        raise ValueError(f"{target.name} has no tokenizer: stop strings and streaming need text")
    if "" in stops:
        raise ValueError("stop holds an empty string, which every text contains")
    return stops
