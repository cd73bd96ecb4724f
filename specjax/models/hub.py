"""Targets and drafters by name: packaged, local directory, GGUF file or hub id."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import drafter, drafter_hf, packaged, params, target
from specjax.models.storage import Checkpoint, open_checkpoint, read_json, write_directory
from specjax.models.text import has_tokenizer, load_tokenizer, template_fingerprint
from specjax.types import Array, Params, Vocabulary

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
REDUCED = ("t2d", "d2t")  # speculators: which target ids the reduced vocabulary holds
DRAFT_IDS = "draft_ids.json"  # the tokens that a drafter proposes, where it is not all of them


@dataclass(frozen=True, eq=False)
class Target:
    """A frozen language model, loaded."""

    name: str
    directory: Path
    config: target.TargetConfig
    params: Params
    eos_token_ids: tuple[int, ...]
    generation_config: Mapping[str, Any]

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can go in and out; token ids always can."""
        return has_tokenizer(self.directory)

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the directory; ValueError where it has none."""
        return load_tokenizer(self.directory)


@dataclass(frozen=True, eq=False)
class Drafter:
    """A block-diffusion drafter, loaded."""

    name: str
    directory: Path
    config: drafter.DrafterConfig
    params: Params


def load_target(
    name: str | Path,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    check_finite: bool = False,
) -> Target:
    """Loads a target.

    Args:
      name: a packaged name ("stories260k", "smollm2-135m"), a local directory in the Hugging Face
        layout, a .gguf file, or a hub id ("org/model").
      dtype: of the parameters; "auto" is float32 on CPU, where XLA's bfloat16 products are several
        times slower, and bfloat16 on TPU and GPU.
      mesh: places the parameters by their logical axes; each shard reads its own slice.
      check_finite: refuse NaN and infinite weights.

    Raises:
      FileNotFoundError: nothing under that name, or an incomplete checkpoint.
      ValueError: what the checkpoint asks for is not supported, or its tensors do not fit.
    """
    directory = resolve(name)
    config = target.config_from_hf(read_json(directory / "config.json"))
    checkpoint = open_checkpoint(directory)
    if config.tied:
        _check_tied(checkpoint)
    loaded = params.load(
        target.table(config),
        checkpoint,
        dtype=resolve_dtype(dtype),
        mesh=mesh,
        ignore=carries_no_parameter(config),
        check_finite=check_finite,
    )
    generation = _optional_json(directory / "generation_config.json")
    return Target(str(name), directory, config, loaded, eos_token_ids(directory), generation)


def load_drafter(
    name: str | Path,
    target: Target,
    *,
    layout: drafter.Layout | None = None,
) -> Drafter:
    """Loads a drafter for `target` from any published layout, in the target's dtype.

    Args:
      name: a local directory or a hub id.
      target: the model it drafts for; its embedding and head are used, never copied.
      layout: overrides which position a slot predicts ("fill" or "next").

    Raises:
      FileNotFoundError: nothing under that name, or an incomplete checkpoint.
      ValueError: an unsupported checkpoint, or one that does not fit the target.
    """
    directory = resolve(name)
    config = drafter_hf.config_from_hf(read_json(directory / "config.json"), layout=layout)
    check_fit(config, target.config, target.name)
    checkpoint = open_checkpoint(directory)
    _check_fc(config, checkpoint)
    dtype = target.params["embed"].dtype
    mesh = getattr(target.params["embed"].sharding, "mesh", None)
    extra = {*drafter_hf.TARGET_COPIES, *(REDUCED if config.draft_vocab_size else ())}
    loaded = params.load(
        drafter.table(config), checkpoint, dtype=dtype, mesh=mesh, ignore=extra.__contains__
    )
    _check_copies(config, checkpoint, target)
    if config.draft_vocab_size is not None:
        loaded["target_ids"] = _target_ids(config, config.draft_vocab_size, checkpoint, mesh)
    elif (directory / DRAFT_IDS).exists():
        ids = draft_ids(directory, config.vocab_size)
        if len(ids) < config.vocab_size:
            loaded = drafter.restrict(loaded, _vocabulary(target), _replicated(ids, mesh))
    if config.template is not None and target.has_tokenizer:
        _warn_template(config.template, target)
    return Drafter(str(name), directory, config, loaded)


def save_drafter(directory: str | Path, loaded: Drafter, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes a drafter in its published layout, whole or not at all.

    Raises:
      FileExistsError: the directory exists and is not empty.
      ValueError: a reduced vocabulary.
    """
    write_directory(directory, *drafter_contents(loaded, dtype))


def drafter_contents(loaded: Drafter, dtype: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the files of a drafter's directory in its published layout."""
    config = loaded.config
    own = drafter.unrestricted(config, loaded.params)
    files: dict[str, Any] = {"config.json": drafter_hf.config_to_hf(config)}
    files["config.json"]["dtype"] = jnp.dtype(dtype).name
    if "target_ids" in loaded.params:
        ids = np.asarray(loaded.params["target_ids"]).tolist()
        files[DRAFT_IDS] = json.dumps({"draft_ids": ids}) + "\n"
    return params.save(drafter.table(config), own, dtype), files


def save_target(directory: str | Path, loaded: Target, *, dtype: Any = None) -> None:
    """Writes a target in the layout it was read from: its config and tokenizer files, unchanged
    but for the dtype, and its tensors; whole or not at all."""
    config = read_json(loaded.directory / "config.json")
    dtype = loaded.params["embed"].dtype if dtype is None else dtype
    config |= {"torch_dtype": jnp.dtype(dtype).name}
    files: dict[str, Any] = {
        file.name: file.read_bytes()
        for file in loaded.directory.iterdir()
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in file.name
    }
    tensors = params.save(target.table(loaded.config), loaded.params, dtype)
    write_directory(directory, tensors, files | {"config.json": config})


def resolve(name: str | Path) -> Path:
    """The directory behind a name, converted or downloaded into the cache where needed."""
    found = packaged.resolve(str(name))
    if found is not None:
        return found
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path)
    if HUB_ID.fullmatch(str(name)) and path.suffix != ".gguf":
        return _downloaded(str(name))
    raise FileNotFoundError(
        f"{name!s} is no directory, no .gguf file, no hub id (org/model) and no packaged name "
        f"({', '.join(packaged.PACKAGED)})"
    )


def resolve_dtype(dtype: Any) -> np.dtype:
    """The dtype itself, or the device's own for "auto"."""
    if isinstance(dtype, str) and dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    resolved = jnp.dtype(dtype)
    if resolved not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype {dtype!r} is not one of float32, bfloat16, float16, 'auto'")
    return resolved


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every end-of-text id: generation_config.json, else config.json, else the tokenizer's."""
    for file in ("generation_config.json", "config.json"):
        ids = _optional_json(directory / file).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    token = _optional_json(directory / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return ()
    added = _optional_json(directory / "tokenizer.json").get("added_tokens", [])
    return tuple(entry["id"] for entry in added if entry["content"] == token)


def carries_no_parameter(config: target.TargetConfig) -> Callable[[str], bool]:
    """Names of tensors that published targets may carry beside their parameters: frequencies that
    follow from the config, and a tied head (which must equal the embedding)."""
    return lambda name: (
        name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")
    )


def check_fit(config: drafter.DrafterConfig, model: target.TargetConfig, name: str) -> None:
    """Raises ValueError unless the drafter can read this target's states and vocabulary."""
    E, depth = model.layers.hidden_size, model.layers.num_layers
    if config.layers.hidden_size != E or config.target_hidden_size != E:
        raise ValueError(
            f"the drafter has hidden size {config.layers.hidden_size} and reads states of "
            f"{config.target_hidden_size}; {name} has {E}: it belongs to another target"
        )
    if config.num_target_layers not in (None, depth):
        raise ValueError(
            f"the drafter was trained for a target of {config.num_target_layers} layers; "
            f"{name} has {depth}"
        )
    target.check_taps(config.taps, depth)
    if config.mask_token_id >= model.vocab_size:
        raise ValueError(
            f"mask_token_id {config.mask_token_id} is not a row of the embedding of {name} "
            f"(0 to {model.vocab_size - 1})"
        )
    if config.draft_vocab_size is not None and config.vocab_size != model.vocab_size:
        raise ValueError(
            f"the drafter maps its reduced vocabulary to {config.vocab_size} ids; {name} has "
            f"{model.vocab_size}"
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    if "lm_head.weight" not in checkpoint.tensors:
        return
    head, embed = checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")
    if not np.array_equal(head, embed):
        raise ValueError(
            f"{checkpoint.directory}: config.json ties the head to the embedding, yet a different "
            "lm_head.weight is there; set tie_word_embeddings to false or remove the tensor"
        )


def _check_fc(config: drafter.DrafterConfig, checkpoint: Checkpoint) -> None:
    fc = checkpoint.tensors.get("fc.weight")
    width = len(config.taps) * config.target_hidden_size
    if fc is not None and fc.shape[-1] != width:
        raise ValueError(
            f"{checkpoint.directory}: fc.weight reads {fc.shape[-1]} features, but "
            f"{len(config.taps)} taps of {config.target_hidden_size} channels give {width}: "
            "target_layer_ids do not belong to these weights"
        )


def _check_copies(config: drafter.DrafterConfig, checkpoint: Checkpoint, loaded: Target) -> None:
    """Frozen copies of target tensors must be this target's, or the drafter is another's."""
    vocabulary = _vocabulary(loaded)
    for name, field in drafter_hf.TARGET_COPIES.items():
        if name not in checkpoint.tensors or (config.draft_vocab_size and field == "head"):
            continue
        own: Array = getattr(vocabulary, field)
        copy = checkpoint.read(name)
        # Both sides go through both dtypes: either may be the coarser one.
        mine = np.asarray(own).astype(copy.dtype)
        if copy.shape != own.shape or not np.array_equal(
            copy.astype(own.dtype).astype(copy.dtype), mine
        ):
            raise ValueError(
                f"{checkpoint.directory}: {name} is not the {field} of {loaded.name}: the drafter "
                "belongs to another target (or to a fine-tuned one)"
            )


def _vocabulary(loaded: Target) -> Vocabulary:
    return target.vocabulary(loaded.params)


def _target_ids(
    config: drafter.DrafterConfig, rows: int, checkpoint: Checkpoint, mesh: Mesh | None
) -> Array:
    """The target id of each of the `rows` ids of a reduced vocabulary."""
    if "d2t" not in checkpoint.tensors:
        raise ValueError(
            f"{checkpoint.directory}: a head of {rows} rows needs the map d2t from its ids to the "
            "target's"
        )
    offsets = checkpoint.read("d2t")  # target id minus draft id
    if offsets.shape != (rows,):
        raise ValueError(f"{checkpoint.directory}: d2t has shape {offsets.shape}, not ({rows},)")
    ids = (np.arange(rows) + offsets).astype(np.int32)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(
            f"{checkpoint.directory}: d2t maps outside the vocabulary of {config.vocab_size}"
        )
    return _replicated(ids, mesh)


def draft_ids(directory: Path, vocab_size: int) -> np.ndarray:
    """The ids in a drafter's DRAFT_IDS, checked."""
    file = directory / DRAFT_IDS
    ids: Any = read_json(file).get("draft_ids")
    whole = isinstance(ids, list) and bool(ids) and all(type(token) is int for token in ids)
    if not whole or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(
            f"{file} must hold draft_ids, ascending tokens of the target (0 to {vocab_size - 1}); "
            "remove the file to let the drafter propose any token"
        )
    return np.asarray(ids, np.int32)


def _replicated(values: np.ndarray, mesh: Mesh | None) -> Array:
    if mesh is None:
        return jnp.asarray(values)
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec()))


def _warn_template(trained: str, loaded: Target) -> None:
    flag = trained.endswith("thinking=on")
    present = template_fingerprint(loaded.tokenizer, enable_thinking=flag)
    if present != trained:
        warnings.warn(
            f"the drafter was trained with chat template {trained}, {loaded.name} has {present}: "
            "expect a lower acceptance",
            stacklevel=3,
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _converted(path: Path) -> Path:
    from specjax.models.gguf import convert_gguf

    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    directory = packaged.cache_dir() / "gguf" / f"{path.stem}-{key}"
    if not directory.exists():
        convert_gguf(path, directory)
    return directory


def _downloaded(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"there is no directory {repo} here, it is not in the local hub cache, and the hub "
            "cannot be reached (offline, or HF_HUB_OFFLINE is set): download it where there is a "
            "connection, or pass a local directory"
        ) from None
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"{repo} could not be downloaded from the hub: {error}") from None
