"""The Triton kernels agree with the torch builder, under Triton's interpreter where no GPU is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddtree import tree as dd
from ddtree.tree import build_tree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
FIELDS = ("tokens", "parents", "depths", "valid")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already inside the interpreter")
def test_kernels_under_the_interpreter() -> None:
    """Run this file's other tests in a process that interprets Triton."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(dd.__file__).parents[1]),
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside the interpreter")


def logits_of(kind: str, shape: tuple[int, int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(shape, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "holes":
        logits[torch.rand(shape, generator=generator) < 0.6] = -torch.inf
        logits[0, -1] = -torch.inf
    elif kind == "poisoned":
        logits[0, 0, 1], logits[1, -1, 0] = float("nan"), torch.inf
    return logits


@needs_triton
@interpreted
@pytest.mark.parametrize("vocab", [32, 96, 4096, 4128, 9984])
@pytest.mark.parametrize("kind", ["normal", "holes", "poisoned"])
def test_vocabulary_pass(kind: str, vocab: int) -> None:
    from ddtree import tree_cuda

    rows = logits_of(kind, (2, 3, vocab)).view(-1, vocab)
    ours, theirs = tree_cuda.vocabulary_pass(rows, 32), dd._vocabulary_pass(rows)
    good = theirs[2].isfinite() & theirs[1].isfinite()
    assert torch.equal(good, ours[2].isfinite() & ours[1].isfinite())
    rows_good = good[:, 0]
    assert torch.equal(ours[0][rows_good], theirs[0][rows_good])
    assert torch.equal(ours[1][rows_good], theirs[1][rows_good])
    torch.testing.assert_close(ours[2][rows_good], theirs[2][rows_good], rtol=1e-6, atol=1e-6)


@needs_triton
@interpreted
def test_a_row_of_the_pass_does_not_depend_on_its_batch() -> None:
    from ddtree import tree_cuda

    rows = logits_of("normal", (1, 5, 9984))[0].bfloat16()
    whole = tree_cuda.vocabulary_pass(rows, 32)
    alone = tree_cuda.vocabulary_pass(rows[3:4], 32)
    assert all(torch.equal(a[3:4], b) for a, b in zip(whole, alone, strict=True))


@needs_triton
@interpreted
@pytest.mark.parametrize("kind", ["normal", "ties", "holes", "poisoned"])
@pytest.mark.parametrize(
    ("vocab", "budget", "chain_seed"), [(5, 20, False), (70, 3, True), (300, 24, False)]
)
def test_trees(
    kind: str, vocab: int, budget: int, chain_seed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search gives the same keys bit for bit, the whole build the same trees."""
    from ddtree import tree_cuda

    logits, roots = logits_of(kind, (2, 3, vocab)), torch.arange(2)
    top = dd.top_tokens(logits, min(budget, vocab))
    expected = dd.tree_of_tokens(top, roots, budget, chain_seed=chain_seed)
    monkeypatch.setattr(dd, "_triton_kernels", lambda device: tree_cuda)
    searched = dd.tree_of_tokens(top, roots, budget, chain_seed=chain_seed)
    assert all(torch.equal(getattr(searched, f), getattr(expected, f)) for f in FIELDS)
    assert torch.equal(searched.scores, expected.scores)
    built = build_tree(logits, roots, budget, chain_seed=chain_seed)
    built.check()
    torch.testing.assert_close(built.scores, expected.scores, rtol=1e-6, atol=1e-5)
    if kind == "normal":  # elsewhere rounding may swap equal scores
        assert all(torch.equal(getattr(built, f), getattr(expected, f)) for f in FIELDS)
