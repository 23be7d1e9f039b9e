"""A key/value cache whose rows can be picked: preallocated, filled in place, compacted in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [1, Hkv, capacity, D].

    `update` writes after the committed rows and does not commit what it wrote.
    """

    # All rows are kept for windowed layers too: the mask hides what is outside their window.
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def rows(states: Tensor) -> Tensor:
            return states.new_empty(*states.shape[:2], self.capacity, states.shape[3])

        self.keys, self.values = rows(key_states), rows(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move_to_front(self, rows: Tensor) -> None:
        """Copy uncommitted rows (int64 [R], counted from the first one) to the first R of them."""
        assert self.keys is not None
        assert self.values is not None
        front = slice(self.length, self.length + len(rows))
        self.keys[:, :, front] = self.keys.index_select(2, rows + self.length)
        self.values[:, :, front] = self.values.index_select(2, rows + self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    # The name of `get_max_length` before transformers 5.20.
    get_max_cache_shape = get_max_length


class RowCache(Cache):
    """One request's cache: `capacity` rows in each of `layers` layers."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[RowLayer(capacity) for _ in range(layers)])

    @property
    def length(self) -> int:
        """Committed rows."""
        return self.layers[0].length

    def commit(self, path: list[int], device: torch.device) -> None:
        """Keep the rows of these nodes (indices into the last forward's tokens), in this order."""
        moved = None
        if path != list(range(len(path))):
            moved = torch.tensor(path, device=device)
        for layer in self.layers:
            if moved is not None:
                layer.move_to_front(moved)
            layer.length += len(path)
