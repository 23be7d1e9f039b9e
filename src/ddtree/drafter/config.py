"""The description of a DFlash drafter: z-lab's ``config.json``, in and out.

One file serves three readers: this project, the ``dflash`` package (through transformers'
Qwen3Config) and SGLang's DFLASH. What a checkpoint asks for and this drafter cannot do is
refused by name, because a drafter run with half of its parts is silently bad, not wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "DFlashDraftModel"
CONFIG_FILE = "config.json"
# What a drafter's head makes of the block's hidden states; see `drafter_kind`.
PLAIN, SELECTOR, DOMINO = "DFlash", "DFlash2", "Domino"
_KIND_OF_ARCHITECTURE = {
    ARCHITECTURE: PLAIN,
    "DFlash2DraftModel": SELECTOR,
    "DFlash2BeamDraftModel": SELECTOR,
    "MiniMaxDFlash2DraftModel": SELECTOR,
    "LiLiCorrDraftModel": "LiLiCorr",
}
_SELECTOR_PARTS = {
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
}
_DOMINO_PARTS = {"projector_type", "gru_hidden_dim", "emb_dim", "shift_label"}
# dflash_config entries a plain drafter understands, and entries that change nothing at the
# value given. Anything else names a part (candidate selector, convolution, GRU, ...) that a
# plain DFlash drafter does not have.
_UNDERSTOOD = {"mask_token_id", "mask_token", "target_layer_ids", "block_size"}
_NEUTRAL = {
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "attention_value_scale": 1.0,
    "pure_draft_prefix_len": 1,
}
_STATIC_ROPE = {"default", "linear", "yarn", "llama3"}


class DrafterError(ValueError):
    """A drafter cannot be used: the message names the value, the limit and the fix."""


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a DFlash drafter and its bond with one target.

    Attributes:
        target_layer_ids: target decoder layers whose outputs the drafter reads
            (transformers ``hidden_states[i + 1]``).
        mask_token_id: token whose embedding fills the slots to be predicted.
        block_size: slots of one block, the root included; horizon + 1.
        num_target_layers: decoder layers of the target this drafter was trained for.
        layer_types: per layer ``full_attention`` or ``sliding_attention``.
        is_causal: attention inside a block; None means causal in sliding layers only.
        kind: of head, see `drafter_kind`.
        rope_parameters: transformers' dictionary (``rope_type``, ``rope_theta``, ...).
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope_parameters: Mapping[str, Any]
    kind: str = PLAIN
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    is_causal: bool | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            full = ("full_attention",) * self.num_hidden_layers
            object.__setattr__(self, "layer_types", full)
        _check_shape(self)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return float(self.rope_parameters["rope_theta"])

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], kinds: Collection[str] = (PLAIN,)) -> DFlashConfig:
        """Read z-lab's dictionary.

        Args:
            raw: of ``config.json``.
            kinds: the kinds of head that the caller can run.
        Raises:
            DrafterError: another kind, a missing key, or a part that this kind does not have.
        """
        draft = raw.get("dflash_config") or {}
        kind = drafter_kind(raw)
        _refuse_other_kinds(raw, kind, kinds)
        _refuse_foreign_parts(draft, kind)
        layer_ids = draft.get("target_layer_ids", raw.get("target_layer_ids"))
        if layer_ids is None:
            layer_ids = default_target_layer_ids(
                _need(raw, "num_target_layers"), _need(raw, "num_hidden_layers")
            )
        mask_id = draft.get("mask_token_id", raw.get("mask_token_id"))
        if mask_id is None:
            raise DrafterError(
                "dflash_config.mask_token_id is missing; add the id it was trained with"
            )
        heads = _need(raw, "num_attention_heads")
        return cls(
            hidden_size=_need(raw, "hidden_size"),
            num_hidden_layers=_need(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or _need(raw, "hidden_size") // heads,
            intermediate_size=_need(raw, "intermediate_size"),
            vocab_size=_need(raw, "vocab_size"),
            block_size=draft.get("block_size", raw.get("block_size", 16)),
            num_target_layers=_need(raw, "num_target_layers"),
            target_layer_ids=tuple(layer_ids),
            mask_token_id=mask_id,
            rope_parameters=read_rope_parameters(raw),
            kind=kind,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=raw.get("max_position_embeddings", 32768),
            attention_bias=raw.get("attention_bias", False),
            sliding_window=raw.get("sliding_window"),
            layer_types=tuple(raw.get("layer_types") or ()),
            is_causal=raw.get("is_causal"),
        )

    @classmethod
    def read(cls, folder: str | Path, kinds: Collection[str] = (PLAIN,)) -> DFlashConfig:
        """Read ``config.json`` of a checkpoint folder."""
        path = Path(folder) / CONFIG_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DrafterError(
                f"{folder} is no drafter checkpoint: {CONFIG_FILE} is missing"
            ) from None
        except json.JSONDecodeError as error:
            raise DrafterError(f"{path} is not valid JSON ({error}); download it again") from None
        return cls.from_dict(raw, kinds)

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """z-lab's dictionary; `dtype` names the stored weights' type."""
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            # Both spellings: transformers 5 reads the first, older readers the second.
            "rope_parameters": dict(self.rope_parameters),
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": self.sliding_window is not None,
            "vocab_size": self.vocab_size,
        }
        if self.is_causal is not None:
            raw["is_causal"] = self.is_causal
        return raw


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """z-lab's default: spread evenly between layer 1 and the target's last but two."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def read_rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from transformers 5 (``rope_parameters``) or older keys."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = _need(raw, "rope_theta")
    return rope


def target_rope_parameters(config: Any) -> dict[str, Any] | None:
    """Rotary parameters of a transformers (text) config, None for a target without any."""
    raw = {**config.to_dict(), "rope_theta": getattr(config, "rope_theta", None)}
    parameters = raw.get("rope_parameters") or {}
    if raw["rope_theta"] is None and "rope_theta" not in parameters:
        return None
    return read_rope_parameters(raw)


def target_head_dim(config: Any) -> int:
    """Head size of a transformers (text) config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_fits_target(drafter: DFlashConfig, target: Any, rows: int) -> None:
    """Refuse a drafter that was not made for this target.

    Args:
        target: its transformers (text) config.
        rows: of its embedding.
    Raises:
        DrafterError: hidden size, layers, head size, rotary base or vocabulary differ.
    """
    pairs: dict[str, tuple[float, float]] = {
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "num_target_layers": (drafter.num_target_layers, target.num_hidden_layers),
    }
    # Heads of latent attention have sizes that a drafter's have not.
    if getattr(target, "kv_lora_rank", None) is None:
        pairs["head_dim"] = (drafter.head_dim, target_head_dim(target))
    rope = target_rope_parameters(target)
    if rope is not None:
        pairs["rope_theta"] = (drafter.rope_theta, float(rope["rope_theta"]))
    for name, (ours, wanted) in pairs.items():
        if ours != wanted:
            raise DrafterError(
                f"the drafter has {name} {ours} and the target {wanted}; "
                "use a drafter trained for this target"
            )
    if drafter.mask_token_id >= rows:
        raise DrafterError(
            f"mask_token_id {drafter.mask_token_id} is outside the target's vocabulary of {rows}; "
            "use a drafter trained for this target"
        )


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise DrafterError(f"the drafter's config.json lacks {key}; it is not a DFlash checkpoint")
    return raw[key]


def drafter_kind(raw: Mapping[str, Any]) -> str:
    """What a drafter checkpoint is, from its architecture and the parts it names.

    ``DFlash`` (independent distributions), ``DFlash2`` (a selector scores a token given the one
    before it), ``Domino`` (a recurrent network reads the drafted prefix), ``LiLiCorr``, or the name
    of an architecture that is none of them. z-lab's Domino keeps DFlash's architecture.
    """
    draft = raw.get("dflash_config") or {}
    projector = draft.get("projector_type", raw.get("projector_type"))
    if projector == "domino" or draft.get("gru_hidden_dim"):
        return DOMINO
    if any(key.startswith("lilicorr_") and value for key, value in draft.items()):
        return "LiLiCorr"
    if draft.get("selector_rank") or draft.get("conv_kernel_size"):
        return SELECTOR
    if projector not in (None, "dflash"):
        return str(projector)
    names: Sequence[str] = raw.get("architectures") or ["no named architecture"]
    return _KIND_OF_ARCHITECTURE.get(names[0], names[0])


def _refuse_other_kinds(raw: Mapping[str, Any], kind: str, kinds: Collection[str]) -> None:
    if kind not in kinds:
        raise DrafterError(
            f"the checkpoint (architectures {raw.get('architectures')}) is a {kind} drafter, and "
            f"only {' and '.join(kinds)} can be run here; running it as plain DFlash would accept "
            f"next to nothing"
        )
    if kind == SELECTOR and not (raw.get("dflash_config") or {}).get("selector_rank"):
        raise DrafterError(
            "the checkpoint has DFlash2's convolutions and no selector (dflash_config.selector_"
            "rank); use a complete DFlash2 checkpoint"
        )
    architecture = (raw.get("architectures") or [None])[0]
    wanted = PLAIN if kind == DOMINO else kind  # whose architecture Domino keeps
    if _KIND_OF_ARCHITECTURE.get(architecture) != wanted:
        raise DrafterError(
            f"the checkpoint names the parts of a {kind} drafter and the architecture "
            f"{architecture}, which would be loaded without them; correct its architectures"
        )


def _refuse_foreign_parts(draft: Mapping[str, Any], kind: str) -> None:
    parts = {SELECTOR: _SELECTOR_PARTS, DOMINO: _DOMINO_PARTS}
    known = _UNDERSTOOD | parts.get(kind, set())
    for key, value in draft.items():
        if key in known or value is None or value is False or value == _NEUTRAL.get(key):
            continue
        if key == "projector_type" and value == "dflash":
            continue
        raise DrafterError(
            f"dflash_config.{key}={value!r} marks a variant of {kind} that cannot be run; "
            f"use a checkpoint without it"
        )


def _check_shape(config: DFlashConfig) -> None:
    if config.block_size < 2:
        raise DrafterError(f"block_size is {config.block_size}; a block needs 2 or more slots")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DrafterError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of "
            f"{config.vocab_size}; name an id that has an embedding row"
        )
    ids, layers = list(config.target_layer_ids), config.num_target_layers
    if not ids or any(not 0 <= i < layers for i in ids):
        raise DrafterError(
            f"target_layer_ids {ids} must be layers of the target, 0 to {layers - 1}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise DrafterError(
            f"{config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key/value heads evenly"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        raise DrafterError(
            f"layer_types names {len(config.layer_types)} layers, "
            f"num_hidden_layers is {config.num_hidden_layers}"
        )
    _check_attention(config)


def _check_attention(config: DFlashConfig) -> None:
    unknown = set(config.layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise DrafterError(f"layer types {sorted(unknown)} are unknown to DFlash")
    if "sliding_attention" in config.layer_types and not config.sliding_window:
        raise DrafterError("sliding_attention layers need sliding_window to be set")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE:
        raise DrafterError(
            f"rope_type {rope_type!r} is not supported; it must be one of {sorted(_STATIC_ROPE)}"
        )
