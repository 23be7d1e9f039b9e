"""Packing: equal to no packing, and unable to poison a run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from toys import BLOCK, VOCAB, toy_document, toy_model, toy_target

from ddtree.train.batch import IGNORE, BatchError, choose_anchors, pack, valid_anchors
from ddtree.train.estimate import block_embeddings
from ddtree.train.objective import (
    Vocabulary,
    block_loss,
    dpace_weights,
    position_weights,
    sample_vocabulary,
)

TARGET = toy_target()
EMBEDDING = TARGET.get_input_embeddings()
HEAD = TARGET.get_output_embeddings().weight


def plain_loss(model, document, anchors, decay=3.0):
    """One block at a time through the inference path, with autograd's own cross-entropy."""
    total = weight = torch.zeros(())
    for anchor in anchors.tolist():
        config = model.config
        context = model.hidden_norm(model.fc(document.features[:anchor]))[None]
        tokens = torch.full((1, BLOCK), config.mask_token_id)
        tokens[0, 0] = document.tokens[anchor]
        hidden = EMBEDDING(tokens)
        near = anchor + torch.arange(BLOCK)
        for layer in model.draft_layers:
            rotation = model._rotation(torch.arange(anchor), torch.float32)
            far = layer.self_attn.project_kv(context, rotation)

            def attend(queries, keys, values, far=far):
                k = torch.cat((far[0], keys), 1).repeat_interleave(2, 2).transpose(1, 2)
                v = torch.cat((far[1], values), 1).repeat_interleave(2, 2).transpose(1, 2)
                out = F.scaled_dot_product_attention(queries.transpose(1, 2), k, v)
                return out.transpose(1, 2).flatten(2)

            hidden = layer(hidden, model._rotation(near, torch.float32), attend)
        hidden = model.norm(hidden)[0, 1:]
        labels = document.tokens[anchor + 1 : anchor + BLOCK]
        nll = F.cross_entropy(hidden[: len(labels)] @ HEAD.t(), labels, reduction="none")
        weights = torch.exp(-torch.arange(len(labels)) / decay)
        total, weight = total + (nll * weights).sum(), weight + weights.sum()
    return total, weight


def packed_loss(model, documents, anchors, **options):
    batch = pack(documents, anchors, BLOCK)
    hidden = model(batch.context, block_embeddings(model, EMBEDDING, batch.roots))[:, 1:]
    options = {"vocabulary": Vocabulary(), "decay": 3.0, **options}
    return block_loss(hidden, batch.labels, HEAD, **options)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


shapes = st.lists(
    st.tuples(st.integers(3, 14), st.integers(1, 6), st.integers(0, 999)), min_size=1, max_size=4
)


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(0, 99))
def test_packed_loss_and_gradients_equal_unpacked(shapes, count, seed):
    model = toy_model(seed)
    generator = torch.Generator().manual_seed(seed)
    documents = [toy_document(TARGET, n, min(p, n - 2), s) for n, p, s in shapes]
    anchors = [choose_anchors(d, count, generator) for d in documents]
    parts = [plain_loss(model, d, a) for d, a in zip(documents, anchors, strict=True)]
    total, weight = sum(t for t, _ in parts), sum(w for _, w in parts)
    wanted = gradients(model, total)
    result = packed_loss(model, documents, anchors)
    torch.testing.assert_close(result.total, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.weight, weight)
    for name, grad in gradients(model, result.total).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


def test_another_document_cannot_change_a_loss():
    model = toy_model()
    first, second = (toy_document(TARGET, 12, 3, s) for s in (1, 2))
    other = toy_document(TARGET, 12, 3, 3)
    anchors = [torch.tensor([3, 7]), torch.tensor([4])]
    batches = [pack([first, d], anchors, BLOCK) for d in (second, other)]
    hidden = [model(b.context, block_embeddings(model, EMBEDDING, b.roots)) for b in batches]
    assert torch.equal(hidden[0][:2], hidden[1][:2])
    assert not torch.equal(hidden[0][2], hidden[1][2])


def test_context_at_and_after_the_anchor_is_never_seen():
    model = toy_model()
    document = toy_document(TARGET, 12, 3, 1)
    anchors = torch.tensor([5, 9])
    batch = pack([document], [anchors], BLOCK)
    before = model(batch.context, block_embeddings(model, EMBEDDING, batch.roots))
    document.features[5:] += 100.0
    batch = pack([document], [anchors], BLOCK)
    after = model(batch.context, block_embeddings(model, EMBEDDING, batch.roots))
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_anchors_have_a_label_a_context_and_features():
    document = toy_document(TARGET, 10, 4, 0)
    assert valid_anchors(document).tolist() == [4, 5, 6, 7, 8]  # 9, the last, has no label
    assert valid_anchors(document.cut(6)).tolist() == [4]
    assert valid_anchors(toy_document(TARGET, 4, 0, 0)).tolist() == [1, 2]  # 0 has no context
    assert valid_anchors(toy_document(TARGET, 5, 4, 0)).tolist() == []
    assert valid_anchors(toy_document(TARGET, 1, 1, 0)).tolist() == []


def test_labels_end_with_their_document():
    first, second = toy_document(TARGET, 6, 2, 0), toy_document(TARGET, 9, 2, 1)
    batch = pack([first, second], [torch.tensor([3]), torch.tensor([2])], BLOCK)
    assert batch.labels[0].tolist() == [*first.tokens[4:6].tolist(), IGNORE]
    assert batch.labels[1].tolist() == second.tokens[3:6].tolist()
    assert batch.context.positions.tolist() == [0, 1, 2, 0, 1]  # positions start again


def test_documents_without_an_anchor_are_left_out():
    good, short = toy_document(TARGET, 8, 3, 0), toy_document(TARGET, 4, 3, 1)
    anchors = [valid_anchors(short), valid_anchors(good)]
    batch = pack([short, good], anchors, BLOCK)
    assert batch.context.blocks == [4]
    with pytest.raises(BatchError, match="none of the documents has a valid anchor"):
        pack([short], [valid_anchors(short)], BLOCK)


def test_loss_and_gradients_stay_finite_with_huge_features():
    model = toy_model()
    document = toy_document(TARGET, 9, 1, 0)
    document.features[0] *= 1e6  # the first token of many models is such an outlier
    result = packed_loss(model, [document], [valid_anchors(document)])
    assert torch.isfinite(result.total)
    assert all(torch.isfinite(g).all() for g in gradients(model, result.total).values())


def test_sampled_vocabulary_estimates_the_full_softmax():
    torch.manual_seed(0)
    head = torch.randn(4000, 16) * 0.5
    hidden, labels = torch.randn(40, 3, 16), torch.randint(0, 4000, (40, 3))
    labels[0, 2] = IGNORE
    full = block_loss(hidden, labels, head, vocabulary=Vocabulary(), decay=3.0)
    estimates = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        vocabulary = sample_vocabulary(labels, torch.arange(100), 800, 4000, generator)
        assert torch.isin(labels[labels != IGNORE], vocabulary.ids).all()
        sampled = block_loss(hidden, labels, head, vocabulary=vocabulary, decay=3.0)
        assert torch.equal(sampled.weight, full.weight)
        estimates.append(sampled.total)
    torch.testing.assert_close(torch.stack(estimates).mean(), full.total, rtol=0.01, atol=0)


def test_chunked_loss_equals_one_chunk(monkeypatch):
    from ddtree.train import objective

    torch.manual_seed(0)
    hidden = torch.randn(9, 3, 16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (9, 3))
    head = torch.randn(VOCAB, 16)

    def run():
        hidden.grad = None
        result = block_loss(
            hidden, labels, head, vocabulary=Vocabulary(), decay=2.0, dpace_alpha=0.5
        )
        result.total.backward()
        return result.total.detach(), hidden.grad.clone()

    whole = run()
    monkeypatch.setattr(objective, "_CHUNK_ELEMENTS", 2 * 3 * VOCAB)
    for chunked, wanted in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, wanted)


def test_dpace_weights_are_the_derivative_of_expected_length():
    log_p = torch.log(torch.tensor([[0.9, 0.5, 0.8], [0.2, 0.7, 0.6]])).requires_grad_()
    expected = log_p.exp().cumprod(1).sum()
    (gradient,) = torch.autograd.grad(expected, log_p)
    labels = torch.zeros(2, 3, dtype=torch.long)
    torch.testing.assert_close(dpace_weights(-log_p.detach(), labels, alpha=0.0), gradient)


def test_position_weights_decay_and_skip_missing_labels():
    labels = torch.tensor([[5, 6, IGNORE]])
    wanted = torch.tensor([[1.0, torch.exp(torch.tensor(-0.5)).item(), 0.0]])
    torch.testing.assert_close(position_weights(labels, decay=2.0), wanted)
