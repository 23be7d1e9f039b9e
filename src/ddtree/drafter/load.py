"""Drafters on disk, and a drafter bound to its target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import (
    CONFIG_FILE,
    DFlashConfig,
    DrafterError,
    check_fits_target,
    default_target_layer_ids,
    target_head_dim,
    target_rope_parameters,
)
from ddtree.drafter.model import ContextCache, DFlashDraftModel

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# For a target without: the drafter's own attention has rotary positions and its norms an epsilon.
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEFAULT_NORM_EPSILON = 1e-6


class Drafter:
    """A draft model with the embedding and the head it borrows from its target.

    Args:
        model: the draft model, on the target's device.
        target: transformers causal model; its embedding and head are used, not copied.
    """

    def __init__(self, model: DFlashDraftModel, target: Any) -> None:
        self.model = model
        self.config = model.config
        self._embedding = target.get_input_embeddings().weight
        self._head = target.get_output_embeddings()

    @property
    def block_size(self) -> int:
        """Slots of a block, the root included."""
        return self.config.block_size

    @property
    def mask_token_id(self) -> int:
        """Token whose embedding fills the slots to be predicted."""
        return self.config.mask_token_id

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target decoder layers whose outputs are the features, in this order."""
        return self.config.target_layer_ids

    def new_cache(self, batch: int, capacity: int) -> ContextCache:
        """A cache for `capacity` committed positions; the block's slots are added to it."""
        return self.model.new_cache(batch, capacity + self.block_size)

    def extend_context(self, cache: ContextCache, features: Tensor, positions: Tensor) -> None:
        """Commit context: `features` [B, T, K * H] at `positions` int64 [B, T] or [T]."""
        self.model.extend_context(cache, features.to(self.model.fc.weight.dtype), positions)

    def draft_logits(
        self, cache: ContextCache, root_tokens: Tensor, root_positions: Tensor
    ) -> Tensor:
        """Logits [B, b - 1, V] of the tokens after the root, from one pass over the block.

        Args:
            cache: holds every position before the root.
            root_tokens: int64 [B], the last committed token.
            root_positions: int64 [B], its position.
        """
        embeddings = self.embed_blocks(root_tokens)
        offsets = torch.arange(self.block_size, device=root_tokens.device)
        hidden = self.model.draft(cache, embeddings, root_positions[:, None] + offsets)
        return self._head(hidden[:, 1:].to(self._head.weight.dtype))

    def embed_blocks(self, root_tokens: Tensor) -> Tensor:
        """Embeddings [B, b, H] of ``[root, MASK, ..., MASK]`` for int64 [B] roots."""
        blocks = root_tokens.new_full((len(root_tokens), self.block_size), self.mask_token_id)
        blocks[:, 0] = root_tokens
        return F.embedding(blocks, self._embedding).to(self.model.fc.weight.dtype)


def load_drafter(
    path_or_hub_id: str | Path, *, target: Any, dtype: torch.dtype | None = None
) -> Drafter:
    """Load a z-lab DFlash checkpoint for a target.

    Args:
        path_or_hub_id: a folder, or a model id on the hub.
        target: transformers causal model the drafter was trained for.
        dtype: of the draft model; the target's when None.
    Raises:
        DrafterError: not a DFlash checkpoint, a variant of it, or one for another target.
    """
    folder = _resolve(path_or_hub_id)
    config = DFlashConfig.read(folder)
    embedding = target.get_input_embeddings().weight
    check_fits_target(config, _text_config(target), len(embedding))
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    weights = _read_weights(folder)
    dtype = dtype or embedding.dtype
    _fill(model, weights)
    return Drafter(model.to(embedding.device, dtype).eval().requires_grad_(False), target)


def save_drafter(
    model: DFlashDraftModel,
    config: DFlashConfig,
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `config.json` and `model.safetensors` in z-lab's format."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(config.to_dict(str(dtype).removeprefix("torch.")), indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def load_weights(model: DFlashDraftModel, folder: str | Path) -> None:
    """Replace a model's weights by those of a checkpoint of the same shape.

    Raises:
        DrafterError: the checkpoint is of another shape, or reads other layers of the target.
    """
    theirs, ours = DFlashConfig.read(folder), model.config
    for name in ("num_hidden_layers", "target_layer_ids", "mask_token_id"):
        if getattr(theirs, name) != getattr(ours, name):
            raise DrafterError(
                f"{folder} has {name} {getattr(theirs, name)}, wanted is {getattr(ours, name)}"
            )
    weights = _read_weights(Path(folder))
    _fill(model, {n: w.to(model.fc.weight.dtype) for n, w in weights.items()})


def config_for_target(target: Any, **choices: Any) -> DFlashConfig:
    """A drafter's configuration with the target's widths.

    Args:
        choices: fields of `DFlashConfig` to set; `num_hidden_layers`, `block_size` and
            `mask_token_id` have no default.
    """
    theirs = _text_config(target)
    heads = theirs.num_attention_heads
    values: dict[str, Any] = {
        "hidden_size": theirs.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": target_head_dim(theirs),
        "intermediate_size": theirs.intermediate_size,
        "vocab_size": theirs.vocab_size,
        "num_target_layers": theirs.num_hidden_layers,
        "rope_parameters": target_rope_parameters(theirs) or _DEFAULT_ROPE,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", _DEFAULT_NORM_EPSILON),
        "max_position_embeddings": theirs.max_position_embeddings,
    }
    values.update(choices)
    if "target_layer_ids" not in values:
        ids = default_target_layer_ids(theirs.num_hidden_layers, values["num_hidden_layers"])
        values["target_layer_ids"] = tuple(ids)
    return DFlashConfig(**values)


def random_drafter(
    target: Any, *, block_size: int = 8, num_layers: int = 2, seed: int = 0
) -> Drafter:
    """An untrained drafter for tests and demonstrations; its tau is near 1.

    The mask token is the last id of the vocabulary.
    """
    config = config_for_target(
        target,
        num_hidden_layers=num_layers,
        block_size=block_size,
        mask_token_id=_text_config(target).vocab_size - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DFlashDraftModel(config)
    embedding = target.get_input_embeddings().weight
    model = model.to(embedding.device, embedding.dtype).eval().requires_grad_(False)
    return Drafter(model, target)


def _text_config(target: Any) -> Any:
    return target.config.get_text_config()


def _resolve(path_or_hub_id: str | Path) -> Path:
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.is_absolute() or str(path_or_hub_id).count("/") != 1:
        raise DrafterError(f"drafter {path_or_hub_id} is neither a folder nor a hub id owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DrafterError(
            f"drafter {path_or_hub_id} is no folder here and the hub did not yield it ({error})"
        ) from None


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise DrafterError(f"{folder} lacks {', '.join(absent)}; download the checkpoint again")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise DrafterError(
            f"the weights in {folder} are damaged ({error}); download the checkpoint again"
        ) from None


def _fill(model: DFlashDraftModel, weights: Mapping[str, Tensor]) -> None:
    expected = model.state_dict()
    missing, extra = (
        sorted(expected.keys() - weights.keys()),
        sorted(weights.keys() - expected.keys()),
    )
    if missing or extra:
        raise DrafterError(
            f"the checkpoint's weights are not those of its config.json: missing {missing[:3]}, "
            f"unexpected {extra[:3]} (at most three each); it may be another variant of DFlash"
        )
    wrong = [n for n, t in weights.items() if t.shape != expected[n].shape]
    if wrong:
        name = wrong[0]
        raise DrafterError(
            f"{name} has shape {list(weights[name].shape)}, "
            f"config.json implies {list(expected[name].shape)}"
        )
    model.load_state_dict(dict(weights), assign=True)
