"""The server drafts the trees the reference engine drafts."""

from __future__ import annotations

import json
import re

import pytest

from .conftest import ServerPool, TinyModels, tiny_requests

pytestmark = pytest.mark.timeout(600)


def test_rounds_equal_the_reference_engines(servers: ServerPool, tiny_models: TinyModels) -> None:
    """Same target, drafter and budget in fp32: same tokens in the same number of rounds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ddtree import generate
    from ddtree.drafter import load_drafter

    target = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_models.target, dtype=torch.float32
    ).eval()
    drafter = load_drafter(tiny_models.drafter, target=target)
    requests = tiny_requests(12, seed=21, max_new_tokens=64, ignore_eos=True, stop_token_ids=[])
    server = servers.get(*tiny_models.ddtree(33))
    server.flush()
    for request, answer in zip(requests, server.generate_all(requests), strict=True):
        reference = generate(
            target,
            drafter,
            torch.tensor([request["input_ids"]]),
            mode="ddtree",
            max_new_tokens=64,
            budget=32,
        )
        assert answer["output_ids"] == reference.tokens
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] == len(reference.accept_lengths)
        # The engine cuts the last round at the limit; the server counts what it accepted.
        beyond = meta["spec_num_correct_drafts"] - sum(n - 1 for n in reference.accept_lengths)
        assert 0 <= beyond < drafter.block_size


def test_the_first_tree_is_the_reference_engines(
    servers: ServerPool, tiny_models: TinyModels
) -> None:
    """Node by node, as the server logs it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ddtree.drafter import load_drafter
    from ddtree.engine import check_request, decode
    from ddtree.metrics import StageClock

    target = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_models.target, dtype=torch.float32
    ).eval()
    drafter = load_drafter(tiny_models.drafter, target=target)
    prompt = [5, 9, 3, 17, 8, 8, 20]
    server = servers.get(*tiny_models.ddtree(33), environment={"DDTREE_LOG_ROUNDS": "1"})
    logged = len(server.log.read_text(encoding="utf-8"))
    server.generate({"input_ids": prompt, "sampling_params": {"temperature": 0}})
    text = server.log.read_text(encoding="utf-8")[logged:]
    line = re.search(r"DDTREE rounds .* tokens (\[.*?\]), parents (\[.*?\])", text)
    assert line is not None, server.tail()
    tokens, parents = (json.loads(part) for part in line.groups())
    request = check_request(target, drafter, prompt, mode="ddtree", budget=32, max_new_tokens=16)
    rounds = decode(target, drafter, request, StageClock("cpu"))
    tree = next(r.tree for r in rounds if r.tree is not None)
    assert tokens == tree.tokens[0].tolist()
    assert parents == tree.parents[0].tolist()
