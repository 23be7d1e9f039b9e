"""The target model as the rounds need it: a forward over a tree, features, and row commits."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from ddtree.cpu_linear import pack_linears
from ddtree.engine.cache import RowCache
from ddtree.mask import tree_attention_mask
from ddtree.tree import DraftTree

# Attention implementations that read an arbitrary mask, and the form they read it in.
_MASKED_ATTENTION = ("sdpa", "eager")
_ROW_LAYERS = {"full_attention", "sliding_attention"}
# Layers whose state is one tensor that every token overwrites (gated DeltaNet, KDA, Mamba2).
_STATE_LAYERS = {"linear_attention"}
# Layers of their own, in some families, that no token's neighbours have a part in.
_TOKENWISE_LAYERS = {"mlp", "moe"}


class EngineError(ValueError):
    """A request or a model the reference engine cannot serve; the message says what to change."""


@dataclass(frozen=True)
class TargetOutput:
    """One forward: `logits` [1, n, V] and, when asked for, `features` [1, n, K * H]."""

    logits: Tensor
    features: Tensor | None


class Target:
    """One request's view of a transformers causal model, with its own preallocated cache.

    Args:
        model: a causal language model with attention layers only.
        capacity: cache rows: prompt, new tokens and one tree.
        feature_layers: decoder layers whose outputs the drafter reads.
    Raises:
        EngineError: the model has layers of an unknown kind or an attention without arbitrary
            masks.
    """

    def __init__(self, model: nn.Module, capacity: int, feature_layers: tuple[int, ...]) -> None:
        self.model = model
        self.config: Any = check_target(model)
        self.feature_layers = feature_layers
        self.cache: Any = self._new_cache(capacity)
        self.device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        layer_types = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        self._layer_types = layer_types
        self._window = self.config.sliding_window if "sliding_attention" in layer_types else None
        # transformers renamed the argument in 5.20.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def _new_cache(self, capacity: int) -> Any:
        return RowCache(self.config.num_hidden_layers, capacity)

    def prefill(self, input_ids: Tensor) -> TargetOutput:
        """Run the prompt (int64 [1, P]) and commit it; logits of its last position only."""
        length = input_ids.shape[1]
        positions = torch.arange(length, device=self.device)[None]
        mask = None
        if self._window is not None:
            chain = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril()
            mask = self._mask(chain, positions, committed=0)
        out = self._forward(input_ids, positions, mask, logits_to_keep=1)
        self.cache.commit(list(range(length)), self.device)
        return out

    def verify(self, tree: DraftTree) -> TargetOutput:
        """Run one tree (batch 1) over the committed rows; commits nothing."""
        committed = self.cache.length
        prefix = torch.tensor([committed], device=self.device)
        mask = None
        if tree.width > 1 or self._window is not None:
            mask = self._mask(tree.visibility(), tree.depths, committed)
        return self._forward(tree.tokens, tree.positions(prefix), mask)

    def commit(self, path: list[int]) -> None:
        """Keep the key/value rows of the accepted nodes, root first."""
        self.cache.commit(path, self.device)

    def _mask(self, visibility: Tensor, depths: Tensor, committed: int) -> Any:
        prefix = torch.tensor([committed], device=self.device)

        def mask(window: int | None) -> Tensor:
            seen = tree_attention_mask(visibility, depths, prefix, committed, window=window)
            if self.config._attn_implementation == "eager":
                lowest = torch.finfo(self._dtype).min
                zeros = torch.zeros(seen.shape, dtype=self._dtype, device=self.device)
                seen = zeros.masked_fill_(~seen, lowest)
            return seen[:, None]

        if self._window is None:
            return mask(None)
        windows = {"full_attention": None, "sliding_attention": self._window}
        return {kind: mask(windows[kind]) for kind in self._layer_types}

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Any, logits_to_keep: int = 0
    ) -> TargetOutput:
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            output_hidden_states=bool(self.feature_layers),
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: self.cache},
        )
        features = None
        if self.feature_layers:
            states = getattr(out, "hidden_states", None)
            if states is None or len(states) <= max(self.feature_layers) + 1:
                raise EngineError(
                    f"the target {type(self.model).__name__} returns no hidden states of its "
                    f"layers, which a DFlash drafter reads; use a target whose forward supports "
                    f"output_hidden_states"
                )
            # hidden_states[0] is the embedding, so layer i's output is entry i + 1.
            features = torch.cat([states[layer + 1] for layer in self.feature_layers], dim=-1)
        return TargetOutput(out.logits, features)


class RecurrentTarget(Target):
    """A target with recurrent layers: the whole state is kept per node.

    A recurrent state cannot be masked, so a node is run alone, from a copy of its parent's state:
    slow, and exactly the forward that plain decoding makes after the same tokens.
    """

    _states: list[Any]

    def _new_cache(self, capacity: int) -> Any:
        self.length = 0
        return DynamicCache(config=self.config)

    def prefill(self, input_ids: Tensor) -> TargetOutput:
        self.length = input_ids.shape[1]
        positions = torch.arange(self.length, device=self.device)[None]
        return self._forward(input_ids, positions, None, logits_to_keep=1)

    def verify(self, tree: DraftTree) -> TargetOutput:
        committed, self._states, outputs = self.cache, [], []
        prefix = torch.tensor([self.length], device=self.device)
        positions, parents = tree.positions(prefix), tree.parents[0].tolist()
        for node in range(int(tree.valid[0].sum())):
            parent = committed if node == 0 else self._states[parents[node]]
            self.cache = copy.deepcopy(parent)
            one = slice(node, node + 1)
            outputs.append(self._forward(tree.tokens[:, one], positions[:, one], None))
            self._states.append(self.cache)
        missing = (0, 0, 0, tree.width - len(outputs))
        features = None
        if self.feature_layers:
            kept = [out.features for out in outputs if out.features is not None]
            features = pad(torch.cat(kept, dim=1), missing)
        return TargetOutput(
            pad(torch.cat([out.logits for out in outputs], dim=1), missing), features
        )

    def commit(self, path: list[int]) -> None:
        """Keep the state of the last accepted node."""
        self.cache, self._states = self._states[path[-1]], []
        self.length += len(path)


def open_target(model: nn.Module, capacity: int, feature_layers: tuple[int, ...]) -> Target:
    """The `Target` that suits a model's layers."""
    layers = set(getattr(check_target(model), "layer_types", None) or ())
    kind = RecurrentTarget if layers & _STATE_LAYERS else Target
    return kind(model, capacity, feature_layers)


def check_target(model: nn.Module) -> Any:
    """The target's text configuration, if this engine can serve it.

    Raises:
        EngineError: see `Target`.
    """
    config = getattr(model, "config", None)
    if config is None or getattr(model, "get_output_embeddings", None) is None:
        raise EngineError(
            f"the target is a {type(model).__name__}; load it with "
            f"transformers.AutoModelForCausalLM"
        )
    config = config.get_text_config()
    served = _ROW_LAYERS | _STATE_LAYERS | _TOKENWISE_LAYERS
    other = set(getattr(config, "layer_types", None) or []) - served
    if other:
        raise EngineError(
            f"the target has {', '.join(sorted(other))} layers; the reference engine serves "
            f"targets with full, sliding-window and linear attention only"
        )
    attention = config._attn_implementation
    if attention not in _MASKED_ATTENTION:
        raise EngineError(
            f"the target's attention is {attention}, which takes no tree mask; load it with "
            f"attn_implementation='sdpa'"
        )
    return config


def default_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bf16 where the device multiplies it at full speed, else fp32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if supported else torch.float32


def load_target(
    path_or_hub_id: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[Any, Any]:
    """A transformers causal model ready for `generate`, and its tokenizer.

    On a CPU its linear layers are packed (see `ddtree.cpu_linear`), so it cannot be trained.

    Raises:
        EngineError: it cannot be loaded; the message carries the reason.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id)
        model = AutoModelForCausalLM.from_pretrained(
            path_or_hub_id, dtype=dtype or default_dtype(device), attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(
            f"the target {path_or_hub_id} cannot be loaded ({reason}); name a folder or a hub id "
            f"of a causal language model"
        ) from None
    model = model.to(device).eval()
    pack_linears(model)
    return model, tokenizer
