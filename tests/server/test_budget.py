"""`DDTREE_BUDGET=auto`: widths change from round to round, and the text does not.

The controller would settle on one or two arms, so here every round takes one at random; what the
controller chooses is tested in `tests/test_budget.py` and on the default model.
"""

from __future__ import annotations

from typing import Any

import pytest

from . import test_requests
from .conftest import (
    ANY_WIDTH,
    Server,
    ServerPool,
    TinyModels,
    outcome,
    rounds_by_arm,
    tiny_requests,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def any_width(servers: ServerPool, tiny_models: TinyModels) -> Server:
    arguments = tiny_models.ddtree(33, "--page-size", "16", "--enable-metrics")
    return servers.get(*arguments, environment=ANY_WIDTH)


@pytest.fixture(scope="module")
def plain(servers: ServerPool, tiny_models: TinyModels) -> Server:
    return servers.get(*tiny_models.exact_plain())


def test_text_is_plain_decodings_whatever_the_widths(
    any_width: Server, plain_answers: dict[str, list[Any]]
) -> None:
    requests = tiny_requests(40)
    answers = any_width.generate_all(requests[:16])
    assert [outcome(a) for a in answers] == plain_answers["greedy"][:16]
    answers = any_width.generate_all(requests, at_once=16, seed=1)
    assert [outcome(a) for a in answers] == plain_answers["greedy"]
    assert rounds_by_arm(any_width).keys() == {
        *("plain", "chain8", "tree5", "tree9", "tree17", "tree33")
    }


def test_drafts_are_as_good_after_plain_rounds(any_width: Server) -> None:
    """The drafter's K/V holds what plain rounds committed: from the cache and afresh alike."""
    prompt = [5, 9, 4, 17, 3, 8] * 8
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    any_width.flush()
    first = any_width.generate({"input_ids": prompt, "sampling_params": sampling})
    follow_up = {"input_ids": prompt + first["output_ids"], "sampling_params": sampling}
    warm = any_width.generate(follow_up)
    assert warm["meta_info"]["cached_tokens"] >= 128
    any_width.flush()
    cold = any_width.generate(follow_up)
    assert outcome(warm) == outcome(cold)


def test_sampling_keeps_its_distribution(plain: Server, any_width: Server) -> None:
    test_requests.test_sampled_tokens_have_the_plain_servers_distribution(
        plain, any_width, {"temperature": 1.2, "top_p": 0.7}
    )


def test_penalties_see_the_path(plain: Server, any_width: Server) -> None:
    test_requests.test_penalties_see_the_path_to_the_node(
        plain, any_width, {"frequency_penalty": -0.4, "presence_penalty": 0.5}
    )


def test_log_probabilities(plain: Server, any_width: Server) -> None:
    test_requests.test_log_probabilities_of_accepted_nodes(plain, any_width)
