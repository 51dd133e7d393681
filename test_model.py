"""
All tests: pytest

Attention against oracles of plain loops, in output and in every gradient; then properties, the GPT, the tasks against
independent parsers, training, and the command lines. What is parametrised over ATTENTIONS picks up a new one by itself.
"""

import cmath
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as eval_script
import model as model_script
import tasks as tasks_script
import train as train_script
from model import (ATTENTIONS, GPT, GPTConfig, alibi_attention, causal_mask, cope_attention, fox_attention, nope_attention,
                   rope_attention, tra_attention, tra_blocked, tra_plain)
from tasks import TASKS, make_task

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)        # tiny models: more threads only cost


# Attention functions against loops. An oracle gives the logit of a query-key pair, or None where the key is not seen.

def oracle_rope(q, k, i, j, theta):
    """Pairs as complex numbers, turned by position times speed."""
    half = len(q) // 2
    total = 0
    for d in range(half):
        turn = cmath.exp(1j * (i - j) * theta ** (-2 * d / len(q)))
        # real part of (a turned by i) times the conjugate of (b turned by j)
        re = q[d] * k[d] + q[half + d] * k[half + d]
        im = q[half + d] * k[d] - q[d] * k[half + d]
        total = total + re * turn.real - im * turn.imag
    return total / math.sqrt(len(q))


def dot(a, b):
    return sum(a[d] * b[d] for d in range(len(a))) / math.sqrt(len(a))


def oracle_row(name, q, k, i, h, H, extra):
    """Logits of query q at position i over keys k[0..i], None for a key that leaves the softmax."""
    scores = [dot(q, k[j]) for j in range(i + 1)]
    if name == "nope":
        return scores
    if name == "rope":
        return [oracle_rope(q, k[j], i, j, extra) for j in range(i + 1)]
    if name == "alibi":
        return [scores[j] - 2 ** (-8 * (h + 1) / H) * (i - j) for j in range(i + 1)]
    if name == "fox":
        return [scores[j] + sum(extra[l] for l in range(j + 1, i + 1)) for j in range(i + 1)]
    if name == "cope":
        logits = []
        for j in range(i + 1):
            p = sum(1 / (1 + torch.exp(-scores[l])) for l in range(j, i + 1))
            p = torch.minimum(p, torch.tensor(float(extra.size(1) - 1), dtype=p.dtype))
            low, high = math.floor(p.item()), math.ceil(p.item())
            at = lambda n: sum(q[d] * extra[d, n] for d in range(len(q)))
            logits.append(scores[j] + at(low) * (1 - (p - low)) + at(high) * (p - low))
        return logits
    f, sparse, contextual = extra
    relevant = [bool(s > 0) for s in scores]
    logits = []
    for j in range(i + 1):
        n = sum(1 for l in range(j, i + 1) if relevant[l] or not contextual)
        logits.append(scores[j] + f * n if relevant[j] or not sparse else None)
    return logits


def oracle(name, q, k, v, extra):
    B, H, T, D = q.shape
    S = k.size(2)
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                i = S - T + t
                if name.startswith("tra"):
                    here = (extra[0][b, h, t], *extra[1:])
                else:
                    here = extra[b, h] if name == "fox" else extra
                logits = oracle_row(name.split("-")[0], q[b, h, t], k[b, h], i, h, H, here)
                kept = [j for j in range(i + 1) if logits[j] is not None]
                top = max((logits[j].item() for j in kept), default=0.0)
                e = {j: torch.exp(logits[j] - top) for j in kept}
                rows.append(sum((e[j] / sum(e.values()) * v[b, h, j] for j in kept), torch.zeros(v.size(-1), dtype=v.dtype)))
    return torch.stack(rows).view(B, H, T, -1)


def case(name, T, S, seed=0, B=2, H=2, D=4, dtype=torch.float64):
    """Random inputs: the function to test, and its tensors as leaves with gradients: q, k, v and what else it takes."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    q, k, v = rand(B, H, T, D), rand(B, H, S, D), rand(B, H, S, D)
    if name.startswith("tra"):
        q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
        flags = ("no-sparse" not in name, "no-contextual" not in name)
        more, call = [F.logsigmoid(rand(B, H, T))], lambda q, k, v, f: tra_attention(q, k, v, f, *flags)
        extra = lambda f: (f, *flags)
    elif name == "fox":
        more, call, extra = [F.logsigmoid(rand(B, H, S))], fox_attention, lambda f: f
    elif name == "cope":
        more, call, extra = [rand(D, 6)], cope_attention, lambda e: e       # npos 6: some positions are clamped
    elif name == "rope":
        more, call, extra = [], lambda q, k, v: rope_attention(q, k, v, 100.0), lambda: 100.0
    else:
        more, call, extra = [], {"nope": nope_attention, "alibi": alibi_attention}[name], lambda: None
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, *more)]
    return call, leaves, extra


VARIANTS = ["tra", "tra-no-sparse", "tra-no-contextual", "tra-no-sparse-no-contextual", "rope", "cope", "nope", "alibi", "fox"]


@pytest.mark.parametrize("T, S", [(7, 7), (3, 8), (1, 6), (1, 1)])
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_equals_loops_in_output_and_gradients(name, T, S):
    call, leaves, extra = case(name, T, S)
    out = call(*leaves)
    want = oracle(name, *leaves[:3], extra(*leaves[3:]))
    torch.testing.assert_close(out, want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves, allow_unused=True)):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_every_attention_has_an_oracle():
    assert {name.split("-")[0] for name in VARIANTS} >= {"tra", "rope", "cope", "nope", "alibi", "fox"}


@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_inputs_are_computed_in_float32(name):
    call, leaves, _ = case(name, 40, 40, dtype=torch.bfloat16, D=8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*leaves)
    assert out.dtype == torch.bfloat16
    with torch.no_grad():
        want = call(*[t.float() for t in leaves])
    torch.testing.assert_close(out.float(), want, atol=0.03, rtol=0.02)


def test_counts_are_exact_past_256_kept_keys_under_autocast():
    S, f = 1200, -0.01
    q, k = torch.ones(1, 1, 1, 1), torch.full((1, 1, S, 1), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = tra_attention(q, k, torch.eye(S)[None, None], torch.full((1, 1, 1), f)).flatten()
    n = torch.arange(S, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(weights.double(), (f * n).softmax(0), rtol=1e-4, atol=0)


# Properties

@pytest.mark.parametrize("sparse, contextual", [(True, True), (True, False)])
def test_a_row_that_keeps_nothing_is_exactly_zero_with_finite_gradients(sparse, contextual):
    q = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]).view(1, 1, 3, 2).requires_grad_()
    k = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]).view(1, 1, 3, 2).requires_grad_()
    v = torch.randn(1, 1, 3, 2, requires_grad=True)
    f = torch.tensor([[[-0.5, -1e4, -0.1]]], requires_grad=True)
    out = tra_attention(q, k, v, f, sparse, contextual)
    assert torch.equal(out[0, 0, 0], torch.zeros(2))                    # its only key scores -1
    torch.testing.assert_close(out[0, 0, 1], v[0, 0, 0])                # keeps key 0 alone, however much it forgets
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, 1])
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, f))
    assert torch.equal(q.grad[0, 0, 0], torch.zeros(2)) and f.grad[0, 0, 0] == 0


def insert(t, at, new):
    return torch.cat((t[..., :at, :], new, t[..., at:, :]), dim=-2)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_irrelevant_keys_are_invisible_to_tra_and_to_no_other(at):
    """One query, 6 keys; put in 5 more whose scores are negative."""
    g = torch.Generator().manual_seed(3)
    q = F.rms_norm(torch.randn(1, 1, 1, 8, generator=g), (8,))
    k = F.rms_norm(torch.randn(1, 1, 6, 8, generator=g), (8,))
    v, f = torch.randn(1, 1, 6, 8, generator=g), torch.full((1, 1, 1), -0.3)
    assert ((q @ k.mT) > 0).sum() >= 2
    extra = F.rms_norm(torch.randn(1, 1, 5, 8, generator=g), (8,))
    extra = torch.where((q @ extra.mT).mT > 0, -extra, extra)
    k2, v2 = insert(k, at, extra), insert(v, at, torch.randn(1, 1, 5, 8, generator=g))
    torch.testing.assert_close(tra_attention(q, k2, v2, f), tra_attention(q, k, v, f), rtol=1e-5, atol=1e-6)
    pos_emb = torch.randn(8, 64, generator=g)
    others = {
        "rope": lambda k, v: rope_attention(q, k, v, 100.0),
        "alibi": lambda k, v: alibi_attention(q, k, v),
        "cope": lambda k, v: cope_attention(q, k, v, pos_emb),
        "no-sparse": lambda k, v: tra_attention(q, k, v, f, sparse=False),
    }
    if at:      # keys older than all the others leave the distances alone
        others["no-contextual"] = lambda k, v: tra_attention(q, k, v, f, contextual=False)
        if at == 6:     # newer than all: one constant for the row, which cancels
            others.pop("no-contextual")
    for name, call in others.items():
        assert (call(k2, v2) - call(k, v)).abs().max() > 1e-3, name


def test_both_ablations_and_no_forgetting_give_nope():
    call, (q, k, v, f), _ = case("tra", 6, 9)
    torch.testing.assert_close(tra_attention(q, k, v, torch.zeros_like(f), sparse=False, contextual=False), nope_attention(q, k, v))


def test_both_ablations_and_a_fixed_gate_give_alibi():
    call, (q, k, v), _ = case("alibi", 6, 9)
    f = torch.tensor([-2.0 ** -4, -2.0 ** -8], dtype=q.dtype).view(1, 2, 1).expand(2, 2, 6)
    torch.testing.assert_close(tra_attention(q, k, v, f, sparse=False, contextual=False), alibi_attention(q, k, v))


def test_fox_without_forgetting_and_cope_without_positions_give_nope():
    call, (q, k, v), _ = case("nope", 6, 9)
    torch.testing.assert_close(fox_attention(q, k, v, torch.zeros(2, 2, 9, dtype=q.dtype)), nope_attention(q, k, v))
    torch.testing.assert_close(cope_attention(q, k, v, torch.zeros(4, 8, dtype=q.dtype)), nope_attention(q, k, v))


def test_rope_depends_on_relative_positions_only():
    """Without the oldest key every position is one less; the weights of the others keep their ratios."""
    call, (q, k, v), _ = case("rope", 4, 9)
    eye = torch.eye(9, dtype=q.dtype).expand(2, 2, 9, 9)
    full = rope_attention(q, k, eye, 100.0)[..., 1:]
    less = rope_attention(q, k[..., 1:, :], eye[..., 1:, 1:], 100.0)
    torch.testing.assert_close(full / full.sum(-1, keepdim=True), less)


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_falls_on_the_weights_and_keeps_their_mean(name):
    if name not in ("tra", "cope", "rope", "nope", "alibi", "fox"):
        pytest.skip("the ablations share TRA's code")
    call, leaves, _ = case(name, 1, 50, B=400, H=1, dtype=torch.float32)
    fn = {"tra": tra_attention, "cope": cope_attention, "rope": rope_attention, "nope": nope_attention,
          "alibi": alibi_attention, "fox": fox_attention}[name]
    more = [100.0] if name == "rope" else leaves[3:]
    v = torch.ones_like(leaves[2])
    torch.manual_seed(0)
    with torch.no_grad():
        out = fn(*leaves[:2], v, *more, dropout_p=0.25)
    assert out[:, 0, 0, 0].std() > 0.05 and abs(out[:, 0, 0, 0].mean() - 1) < 0.05


# The GPT

def tiny(attn, **kwargs):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(attn=attn, vocab_size=11, n_layer=2, n_head=2, n_embd=16) | kwargs))
    for p in model.parameters():        # so that nothing rests on a zero or a one of the initialisation
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_the_future_changes_nothing(attn):
    model = tiny(attn)
    idx = torch.randint(0, 11, (2, 20))
    changed = torch.cat((idx[:, :12], (idx[:, 12:] + 1) % 11), dim=1)
    with torch.no_grad():
        a, b = model(idx)[0], model(changed)[0]
    assert torch.equal(a[:, :12], b[:, :12])
    assert (a[:, 12:] - b[:, 12:]).abs().min(-1).values.max() > 0


@pytest.mark.parametrize("attn", ATTENTIONS)
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 1, 6], [17]])
def test_cached_logits_equal_full_logits(attn, chunks):
    model = tiny(attn).double()
    idx = torch.randint(0, 11, (2, 17))
    cache = [{} for _ in model.blocks]
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0])


@pytest.mark.parametrize("attn", ATTENTIONS)
@pytest.mark.parametrize("T", [1, 2, 300])
def test_any_length(attn, T):
    model = tiny(attn)
    logits, loss = model(torch.randint(0, 11, (1, T)), torch.randint(0, 11, (1, T)))
    loss.backward()
    assert logits.shape == (1, T, 11) and logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_bfloat16_autocast_trains_as_float32_does(attn):
    """A dozen steps each way, from the same weights on the same batch, fall together."""
    def losses(dtype):
        model = tiny(attn, dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        idx = torch.randint(0, 11, (8, 24), generator=torch.Generator().manual_seed(0))
        out = []
        for _ in range(12):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out
    full, half = losses(torch.float32), losses(torch.bfloat16)
    assert full[-1] < full[0] - 0.3
    assert max(abs(a - b) for a, b in zip(full, half)) < 0.1


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_generate(attn):
    """Greedy generation with the cache is argmax over full passes; sampling obeys the seed, top-k and the mode."""
    model = tiny(attn).double().train()
    idx = torch.randint(0, 11, (2, 5))
    out = model.generate(idx, 8, temperature=0)
    assert model.training and out.shape == (2, 13) and torch.equal(out[:, :5], idx)
    assert torch.equal(model.generate(idx, 8, top_k=1), out)
    model.eval()
    for t in range(5, 13):
        assert torch.equal(model(out[:, :t])[0][:, -1].argmax(-1), out[:, t])
    torch.manual_seed(1)
    a = model.generate(idx, 30, temperature=5.0)
    torch.manual_seed(1)
    assert torch.equal(a, model.generate(idx, 30, temperature=5.0, top_k=99))
    assert not torch.equal(a, model.generate(idx, 30, temperature=5.0))


def test_loss_only_where_scored():
    model = tiny("tra")
    idx = torch.randint(0, 11, (2, 9))
    targets = torch.full_like(idx, -1)
    targets[0, 3], targets[1, 7] = 4, 2
    logits, loss = model(idx, targets)
    want = -(logits.log_softmax(-1)[0, 3, 4] + logits.log_softmax(-1)[1, 7, 2]) / 2
    torch.testing.assert_close(loss, want)


def test_architecture_is_as_described():
    config = GPTConfig(attn="tra", vocab_size=11, n_layer=3, n_head=4, n_embd=32)
    shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    assert shapes["embed.weight"] == shapes["head.weight"] == (11, 32)
    assert shapes["blocks.0.attn.qkv.weight"] == (96, 32) and "blocks.0.attn.qkv.bias" not in shapes
    assert shapes["blocks.0.attn.forget.weight"] == (4, 32) and shapes["blocks.0.attn.forget.bias"] == (4,)
    assert shapes["blocks.0.mlp.up.weight"] == (128, 32) and shapes["blocks.0.mlp.down.weight"] == (32, 64)
    assert sum(math.prod(s) for s in shapes.values()) == 2 * 11 * 32 + 32 + 3 * (4 * 32 * 32 + 4 * 33 + 6 * 32 * 32 + 64)


@pytest.mark.parametrize("bad", [dict(attn="none"), dict(n_embd=30, n_head=4), dict(attn="rope", n_embd=12, n_head=4), dict(n_layer=0),
                                 dict(dropout=1.0), dict(dropout=-0.1), dict(vocab_size=0), dict(rope_theta=0.0), dict(n_embd=16.0)])
def test_impossible_configs_are_refused(bad):
    with pytest.raises(ValueError):
        GPTConfig(**bad)


def test_worked_example(capsys):
    model_script.worked_example()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("weight")]
    assert rows[0][2:] == ["0.3400", "0.0000", "0.1528", "0.0000", "0.5072"]
    assert [w for w in rows[1][2:] if w != "0.0000"] == ["0.3400", "0.1528", "0.5072"]


# The tasks, against parsers that know nothing of how they are made: from an example as text to the tokens that must be scored

def parse_flipflop(words, task, split):
    n = task.length * (4 if split.endswith("4x") else 1)
    assert len(words) == 2 * n and words[0] == "w" and words[-2] == "r"
    memory, scored = None, []
    for t in range(0, len(words), 2):
        assert words[t] in "wri" and words[t + 1] in "01"
        if words[t] == "w":
            memory = words[t + 1]
        if words[t] == "r":
            assert words[t + 1] == memory
            scored.append(t + 1)
    return scored


def parse_copy(words, task, split):
    sep = words.index("<sep>")
    x, answer = words[1:sep], words[sep + 1:]
    assert words[0] == "<bos>" and answer == x + ["<eos>"] and not any(w.startswith("<") for w in x)
    check_length(len(x), 1, task, split)
    return list(range(sep + 1, len(words)))


def parse_induct(words, task, split):
    sep = words.index("<sep>")
    x, queries, answers = words[1:sep], words[sep + 1::2], words[sep + 2::2]
    assert words[0] == "<bos>" and len(queries) == len(answers) == len(set(queries)) == min(task.pairs, len(x) // 2)
    for query, answer in zip(queries, answers):
        assert x.count(query) == 1 and x[x.index(query) + 1] == answer and answer not in queries
    check_length(len(x), 2, task, split)
    return list(range(sep + 2, len(words), 2))


def parse_instruct(words, task, split):
    sep = words.index("<sep>")
    what, x, answer = words[0][1:-1], words[1:sep], words[sep + 1:]
    if split != "train":
        assert what == split.split("-")[0]
    assert answer == {"copy": x, "reverse": x[::-1], "first": x[:1], "last": x[-1:]}[what] + ["<eos>"]
    check_length(len(x), 0, task, split)
    return list(range(sep + 1, len(words)))


def check_length(n, least, task, split):
    if split == "train":
        assert least <= n <= task.length
    else:
        assert n == int(task.length * float(split.split("-")[-1].rstrip("x")))


PARSERS = {"flipflop": parse_flipflop, "copy": parse_copy, "induct": parse_induct, "instruct": parse_instruct}
SMALL = {"flipflop": dict(length=8), "copy": dict(length=6, symbols=5), "induct": dict(length=7, symbols=9, pairs=3),
         "instruct": dict(length=4, symbols=5)}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("sizes", ["small", "laptop", "paper"])
def test_every_example_is_in_the_language_and_scored_where_it_should(name, sizes):
    task = make_task(name, "laptop", **SMALL[name]) if sizes == "small" else make_task(name, sizes)
    for split in task.splits:
        for step in range(12):
            x, y = task.batch(split, 5, step, 3)
            assert x.dtype == y.dtype == np.int64 and x.shape == y.shape and x.min() >= 0 and max(x.max(), y.max()) < len(task.vocab)
            assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == -1)).all()
            for row in range(3):
                plain = tasks_script.show(task, x[row], y[row], mark=False).split(" ")
                marked = tasks_script.show(task, x[row], y[row]).split(" ")
                scored = [t for t, word in enumerate(marked) if word != plain[t]]
                assert scored == PARSERS[name](plain, task, split)
                assert [t + 1 for t in np.flatnonzero(y[row] >= 0)] == scored


@pytest.mark.parametrize("name", TASKS)
def test_streams_are_endless_seeded_and_disjoint(name):
    task = make_task(name, "laptop")
    text = lambda *args: [tuple(np.concatenate((a, b))) for a, b in zip(*task.batch(*args))]
    assert text("train", 3, 10**6, 8) == text("train", 3, 10**6, 8)
    same_length = [split for split in task.splits if split in ("iid", "1x") or split.endswith("-1x")]
    seen = set()
    for seed in (0, 1):
        for step in range(60):
            seen.update(text("train", seed, step, 16))
    for split in same_length:
        for step in range(20):
            fresh = [row for row in text(split, 0, step, 16)]
            if not split.startswith(("first", "last")):
                assert not seen.intersection(fresh)


@pytest.mark.parametrize("name, digest", [("flipflop", "261a334e12e78694"), ("copy", "b0051152f3b7039e"), ("induct", "b8c1422557147855"), ("instruct", "e439da35d9a6cee4")])
def test_the_same_seed_gives_the_same_batches_on_every_machine(name, digest):
    task = make_task(name, "laptop", **SMALL[name])
    sha = hashlib.sha256()
    for split in task.splits:
        for step in range(3):
            for array in task.batch(split, 7, step, 4):
                sha.update(array.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == digest


def test_flipflop_has_the_stated_probabilities():
    task = make_task("flipflop", "laptop", length=100)
    for split, p in (("train", 0.8), ("sparse", 0.98), ("dense", 0.1)):
        what = task.batch(split, 0, 0, 400)[0][:, 2:-2:2]          # without the first and the last instruction
        for token, want in ((0, (1 - p) / 2), (1, (1 - p) / 2), (2, p)):
            assert abs((what == token).mean() - want) < 0.01
        bits = task.batch(split, 0, 0, 400)[0][:, 1::2]
        assert abs((bits == 3).mean() - 0.5) < 0.05


def test_all_lengths_instructions_and_places_occur():
    lengths = lambda name, **sizes: {make_task(name, "laptop", **sizes).batch("train", 0, s, 1)[0].shape[1] for s in range(300)}
    assert lengths("copy", length=9, symbols=4) == {2 * n + 2 for n in range(1, 10)}
    assert lengths("induct", length=9, symbols=9, pairs=2) == {n + 1 + 2 * min(2, n // 2) for n in range(2, 10)}
    assert lengths("instruct", length=5, symbols=4) == {2 * n + 2 for n in range(6)}
    task = make_task("induct", "laptop", length=6, symbols=9, pairs=2)
    x, _ = task.batch("1x", 0, 0, 500)
    places = {(list(row[1:7]).index(row[8]), list(row[1:7]).index(row[10])) for row in x}
    assert places == {(a, b) for a in range(5) for b in range(5) if abs(a - b) > 1}


# Scripts

QUICK = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch", "4", "--steps", "6", "--examples", "5", "--log-every", "2",
         "--device", "cpu", "--scale", "laptop"]


def quick(task, *flags):
    sizes = [word for name, value in SMALL[task].items() for word in (f"--{name}", str(value))]
    return ["--task", task, *sizes, *QUICK, *flags]


def call(script, *argv):
    """Run a script's main() in this process; returns its exit code."""
    old, sys.argv = sys.argv, [script.__name__ + ".py", *map(str, argv)]
    try:
        script.main()
        return 0
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = old


def command(*words, cwd, timeout=120, **kwargs):
    """Run a script as a user would, in a process of its own, from another folder."""
    words = [os.path.join(HERE, words[0]), *map(str, words[1:])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, **kwargs)


def log(run):
    with open(run / "log.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def weights(run):
    return torch.load(run / "ckpt.pt", weights_only=True)["model"]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_trains_on_every_task_and_twice_the_same(tmp_path, capsys, attn, task):
    for name in ("a", "b"):
        assert call(train_script, *quick(task, "--attn", attn, "--out", tmp_path / name, "--seed", 3)) == 0
    assert same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    first, second = log(tmp_path / "a"), log(tmp_path / "b")
    assert [row["step"] for row in first] == [2, 4, 6] and first[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert [(r["loss"], r["lr"], r["grad_norm"]) for r in first] == [(r["loss"], r["lr"], r["grad_norm"]) for r in second]
    found = json.loads((tmp_path / "a" / "eval.json").read_text())
    assert (found["task"], found["attn"], found["seed"], found["scale"], found["examples"]) == (task, attn, 3, "laptop", 5)
    assert list(found["results"]) == list(make_task(task, "laptop", **SMALL[task]).splits)[1:]
    assert capsys.readouterr().out.count(f"| {attn} ") == 2


def test_a_short_training_learns_flipflop_and_keeps_it_at_four_times_the_length(tmp_path, capsys):
    """About half a minute: with 24 instructions and 250 steps TRA is right nearly everywhere, at 96 instructions too."""
    assert call(train_script, "--attn", "tra", "--task", "flipflop", "--scale", "laptop", "--length", 24, "--n-layer", 2, "--n-embd", 64,
                "--n-head", 4, "--steps", 250, "--lr", 0.002, "--beta2", 0.98, "--batch", 32, "--examples", 100, "--device", "cpu", "--out", tmp_path / "run") == 0
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    assert min(results.values()) >= 0.95, results
    losses = [row["loss"] for row in log(tmp_path / "run")]
    assert losses[0] > 0.3 and losses[-1] < 0.05


def test_seeds_differ_and_settings_reach_the_model(tmp_path, capsys):
    runs = {"a": ["--seed", 0], "b": ["--seed", 1], "c": ["--no-sparse"], "d": ["--no-contextual"], "e": ["--dropout", 0.5], "f": ["--lr", 0.1],
            "g": ["--beta2", 0.5], "h": ["--weight-decay", 50], "i": ["--warmup", 1], "j": ["--grad-clip", 0.01], "k": ["--batch", 3],
            "l": ["--symbols", 4], "m": ["--dtype", "bfloat16"]}
    for name, flags in runs.items():
        assert call(train_script, *quick("copy", "--attn", "tra", "--out", tmp_path / name, *flags)) == 0
    sums = {name: float(weights(tmp_path / name)["blocks.0.mlp.up.weight"].double().sum()) for name in runs}
    assert len(set(sums.values())) == len(runs)
    config = torch.load(tmp_path / "c" / "ckpt.pt", weights_only=True)["config"]
    assert config["sparse"] is False and config["contextual"] is True


def test_accumulation_and_logging_do_not_change_the_training(tmp_path, capsys):
    runs = {"whole": [], "parts": ["--accumulate", 4], "uneven": ["--accumulate", 3], "logs": ["--log-every", 5]}
    for name, flags in runs.items():
        assert call(train_script, *quick("instruct", "--attn", "tra", "--dropout", 0, "--out", tmp_path / name, *flags)) == 0
    whole = weights(tmp_path / "whole")
    assert same_weights(whole, weights(tmp_path / "logs"))
    for name in ("parts", "uneven"):
        for key, value in weights(tmp_path / name).items():
            torch.testing.assert_close(value, whole[key], rtol=1e-3, atol=1e-4)


def test_learning_rate_warms_up_and_decays_to_zero():
    args = dict(lr=2.0, warmup=0.05, steps=200)
    rates = [train_script.learning_rate(step, args) for step in range(200)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert max(rates) == rates[9] == 2.0 and rates[105] == pytest.approx(1.0) and rates[-1] < 1e-3
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))


def test_exact_match_equals_greedy_generation_and_counts_examples():
    """The prompt is fed, the rest generated greedily; right examples are the same ones, over batches of unequal size."""
    task = make_task("copy", "laptop", length=2, symbols=4)
    torch.manual_seed(0)
    model = GPT(GPTConfig(attn="tra", vocab_size=len(task.vocab), n_layer=2, n_head=2, n_embd=32, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(150):                                             # trained a little: right on some, wrong on others
        model(*map(torch.from_numpy, task.batch("train", 0, step, 32)))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    old, eval_script.TOKENS_PER_BATCH = eval_script.TOKENS_PER_BATCH, 8 * 6
    try:
        total = generated = batches = 0
        for x, y, predicted in eval_script.predictions(model, task, "1x", 45, "cpu"):
            start = int((y[0] >= 0).argmax()) + 1
            out = model.generate(torch.from_numpy(x[:, :start]), y.shape[1] + 1 - start, temperature=0).numpy()
            same = (out[:, start:] == y[:, start - 1:]).all(1)
            assert (same == eval_script.right(y, predicted)).all()
            total, generated, batches = total + len(x), generated + same.sum(), batches + 1
        assert total == 45 and batches > 1 and 0 < generated < 45
        assert eval_script.exact_match(model, task, "1x", 45, "cpu") == generated / 45
    finally:
        eval_script.TOKENS_PER_BATCH = old


def test_table_gives_mean_and_spread_over_seeds_a_row_per_attention(tmp_path, capsys):
    for attn, seed, value in (("tra", 0, 1.0), ("tra", 1, 0.9996), ("rope", 0, 0.5), ("rope", 1, 0.25)):
        run = tmp_path / f"{attn}{seed}"
        run.mkdir()
        (run / "eval.json").write_text(json.dumps({
            "task": "copy", "attn": attn, "seed": seed, "scale": "laptop", "metric": "exact match", "examples": 9,
            "results": {"1x": 1.0, "2x": value}, "label": attn, "sizes": {"length": 4, "symbols": 3}}))
    runs = sorted(tmp_path.iterdir(), reverse=True)
    assert call(eval_script, *runs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["attention", "seeds", "1x", "2x"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == ["tra", "2", "100.0 ± 0.0", "99.9 ± 0.0"]
    assert [cell.strip() for cell in lines[5].split("|")[1:-1]] == ["rope", "2", "100.0 ± 0.0", "37.5 ± 17.7"]
    assert call(eval_script, *runs, "--json", "--split", "2x") == 0
    groups = json.loads(capsys.readouterr().out)
    assert groups[0]["rows"][1]["results"]["2x"]["values"] == [0.25, 0.5] and len(groups) == 1


def test_eval_measures_again_and_shows_mistakes(tmp_path, capsys):
    run = tmp_path / "run"
    assert call(train_script, *quick("induct", "--attn", "rope", "--out", run)) == 0
    capsys.readouterr()
    assert call(eval_script, run, "--examples", 5, "--json", "--device", "cpu") == 0
    again = json.loads(capsys.readouterr().out)[0]["rows"][0]["results"]
    saved = json.loads((run / "eval.json").read_text())["results"]
    assert {split: r["mean"] for split, r in again.items()} == saved
    assert call(eval_script, run, "--mistakes", 3, "--split", "2x", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert out.count("expected") == out.count("predicted") == out.count(f"{run}, 2x: wrong at") == 3
    example = [line.split()[1:] for line in out.splitlines() if line.strip().startswith("example")][0]
    expected = [line.split()[1:] for line in out.splitlines() if line.strip().startswith("expected")][0]
    assert [word[1:-1] for word in example if word.startswith("[")] == expected


def one_line(result, *words):
    """Exit code 2, one line on stderr that holds these words, no traceback."""
    assert result.returncode == 2, result
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


BAD_COMMANDS = [
    (train_script, ["--attn", "tra"], "--task"),
    (train_script, ["--attn", "none", "--task", "copy"], "none"),
    (train_script, ["--attn", "tra", "--task", "none"], "none"),
    (train_script, ["--attn", "tra", "--task", "copy", "--n-embd", "30", "--n-head", "4"], "divisible"),
    (train_script, ["--attn", "rope", "--task", "copy", "--n-embd", "12", "--n-head", "4"], "even"),
    (train_script, ["--attn", "tra", "--task", "copy", "--length", "-3"], "-3"),
    (train_script, ["--attn", "tra", "--task", "copy", "--length", "0"], "--length"),
    (train_script, ["--attn", "tra", "--task", "flipflop", "--length", "1"], "--length"),
    (train_script, ["--attn", "tra", "--task", "flipflop", "--symbols", "5"], "--symbols"),
    (train_script, ["--attn", "tra", "--task", "induct", "--symbols", "8", "--pairs", "8"], "--pairs"),
    (train_script, ["--attn", "tra", "--task", "copy", "--steps", "many"], "many"),
    (train_script, ["--attn", "tra", "--task", "copy", "--lr", "nan"], "nan"),
    (train_script, ["--attn", "tra", "--task", "copy", "--dropout", "1"], "--dropout"),
    (train_script, ["--attn", "tra", "--task", "copy", "--seed", "-1"], "-1"),
    (train_script, ["--attn", "tra", "--task", "copy", "--device", "toaster"], "toaster"),
    (train_script, ["--attn", "tra", "--task", "copy", "--device", "cuda:99"], "cuda:99"),
    (train_script, ["--attn", "tra", "--task", "copy", "--unknown"], "--unknown"),
    (train_script, ["--attn", "tra", "--task", "copy", "--resume"], "no run"),
    (train_script, ["--attn", "tra", "--task", "copy", "--out", "/dev/null/x", *QUICK], "/dev/null"),
    (eval_script, [], "RUN"),
    (eval_script, ["nowhere"], "nowhere"),
    (eval_script, ["nowhere", "--examples", "0"], "0"),
    (tasks_script, ["--task", "copy", "--split", "7x"], "7x"),
    (tasks_script, ["--task", "copy", "--count", "-1"], "-1"),
    (tasks_script, [], "--task"),
]


@pytest.mark.parametrize("script, argv, word", BAD_COMMANDS, ids=[" ".join([s.__name__, *a]) for s, a, _ in BAD_COMMANDS])
def test_bad_command_lines_get_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, script, argv, word):
    monkeypatch.chdir(tmp_path)
    code = call(script, *argv)
    error = capsys.readouterr().err
    assert code == 2 and len(error.strip().splitlines()) == 1 and word in error
    assert not list(tmp_path.rglob("*.*"))


def test_bad_command_line_in_a_process_of_its_own(tmp_path):
    one_line(command("train.py", "--attn", "tra", "--task", "none", cwd=tmp_path), "none")
    one_line(command("eval.py", "nowhere", cwd=tmp_path), "nowhere")


def test_an_existing_run_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(train_script, *quick("copy", "--attn", "tra", "--no-sparse")) == 0
    run = tmp_path / "out" / "copy-tra-no-sparse-s0"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert before.keys() == {"ckpt.pt", "log.jsonl", "eval.json"}
    assert call(train_script, *quick("copy", "--attn", "tra", "--no-sparse")) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}
    assert call(train_script, *quick("copy", "--attn", "tra", "--no-sparse", "--overwrite", "--lr", 0.01)) == 0
    assert not same_weights(weights(run), torch.load(io.BytesIO(before["ckpt.pt"]), weights_only=True)["model"])


# Long sequences

def test_cope_by_rows_is_the_same_function():
    call, (q, k, v, e), _ = case("cope", 520, 530, B=1, H=1)
    rows = torch.cat([cope_attention(q[:, :, t:t + 1], k[:, :, :t + 11], v[:, :, :t + 11], e) for t in range(520)], dim=2)
    torch.testing.assert_close(call(q, k, v, e), rows)
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    for a, b in zip(torch.autograd.grad(call(q, k, v, e), (q, k, v, e), weight), torch.autograd.grad(rows, (q, k, v, e), weight)):
        torch.testing.assert_close(a, b)


# TRA in blocks against its plain form; small blocks, so that short sequences have many

ABLATIONS = [(True, True), (True, False), (False, True), (False, False)]


def both_forms(q, k, v, f, sparse=True, contextual=True, **tolerance):
    """The blocked form's output, after comparing it and all four gradients with the plain form's."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, f)]
    want, got = tra_plain(*leaves, sparse, contextual), tra_blocked(*leaves, sparse, contextual)
    torch.testing.assert_close(got, want, **tolerance)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    pairs = zip("qkvf", torch.autograd.grad(got, leaves, weight), torch.autograd.grad(want, leaves, weight))
    for name, a, b in pairs:
        assert a.isfinite().all(), name
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text: f"gradient of {name}: {text}")
    return got.detach()


def count_blocks(monkeypatch):
    """A list that receives, per call of the blocked form (and again in its backward), the number of blocks it touches."""
    calls, real = [], model_script.walk

    def walk(*args):
        calls.append(0)
        for item in real(*args):
            calls[-1] += len(item[0])
            yield item
    monkeypatch.setattr(model_script, "walk", walk)
    return calls


@pytest.mark.parametrize("T, S", [(40, 40), (37, 37), (100, 100), (21, 50), (9, 64), (1, 30), (1, 1)])
@pytest.mark.parametrize("sparse, contextual", ABLATIONS)
def test_blocks_equal_the_plain_form(monkeypatch, sparse, contextual, T, S):
    monkeypatch.setattr(model_script, "BLOCK", 8)
    _, (q, k, v, f), _ = case("tra", T, S, H=3)
    both_forms(q, k, v, f, sparse, contextual)
    both_forms(q[:1, :1], k[:1, :1], v[:1, :1, :, :1], 4 * f[:1, :1], sparse, contextual)      # and with narrower values


GATES = {"none": 0.0, "faint": -1e-6, "strong": -30.0, "absurd": -1e4, "not forgetting": 0.2}


@pytest.mark.parametrize("scale", [1, 0.01, 30], ids=lambda s: f"norms times {s}")
@pytest.mark.parametrize("gate", [*GATES, "by head", "by query"])
def test_blocks_equal_the_plain_form_for_extreme_gates_and_norms(monkeypatch, gate, scale):
    """The bound comes from the norms of q and k, so normalised or not makes no difference to what is right."""
    monkeypatch.setattr(model_script, "BLOCK", 8)
    _, (q, k, v, f), _ = case("tra", 43, 61, H=2)
    f = torch.full_like(f, GATES.get(gate, 0.0))
    if gate == "by head":
        f[:, 1] = -20.0
    if gate == "by query":
        f[..., ::3] = -20.0
    q, k = scale * q, scale * k * torch.linspace(0.1, 2, 61, dtype=k.dtype).flip(0)[:, None]       # older keys are longer
    for sparse, contextual in ABLATIONS:
        both_forms(q, k, v, f, sparse, contextual)


def test_blocks_walk_on_to_the_only_kept_key_and_give_zero_without_one(monkeypatch):
    """Strong gates everywhere: the neighbours of queries 28 to 30 are done at once, these have to search to the very start."""
    monkeypatch.setattr(model_script, "BLOCK", 8)
    _, (q, k, v, f), _ = case("tra", 40, 40)
    q, k, f = q.detach().clone(), k.detach().clone(), torch.full_like(f, -25.0)
    k[..., 2:] = -k[..., 2:].abs() - 0.1
    k[:, :, 0, 3] = 0.5
    q[:, :, 28] = torch.tensor([0.0, 0.0, 0.0, 2.0])        # keeps key 0 only
    q[:, :, 29] = torch.tensor([0.0, 0.0, 2.0, 0.0])        # keeps nothing
    q[:, :, 30] = 0.0                                       # keeps nothing, as 0 is not above 0
    calls = count_blocks(monkeypatch)
    for contextual in (True, False):
        out = both_forms(q, k, v, f, True, contextual)
        torch.testing.assert_close(out[:, :, 28], v[:, :, 0])
        assert torch.equal(out[:, :, 29:31], torch.zeros_like(out[:, :, 29:31]))
    assert calls[0] < 4 * (1 + 2 + 3 + 4 + 5)               # and no other block of queries goes all the way


def grid(T, H=2, seed=0):
    """q and k of -1, 0, 1 with D 16: scores are multiples of 1/4, many of them 0, and exact in any precision."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(-1, 2, (1, H, T, 16), generator=g).float() for _ in range(2))
    return q, k, torch.randn(1, H, T, 8, generator=g)


@pytest.mark.parametrize("gate", [-0.2, -0.5, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_skipped_is_below_the_resolution_of_the_output(monkeypatch, dtype, gate):
    """Against the plain form in float64, at 1,000 tokens and blocks of the real size; scores that are exactly 0 included."""
    calls = count_blocks(monkeypatch)
    q, k, v = grid(1000)
    f = torch.full((1, 2, 1000), gate)
    got = tra_attention(*[t.to(dtype) for t in (q, k, v, f)])
    want = tra_plain(*[t.double() for t in (q, k, v, f)])
    assert (got - want).abs().max() < 8 * torch.finfo(dtype).eps * v.abs().max()
    assert calls[0] < 2 * (16 * 17 / 2)                     # of all blocks, two heads


def test_float32_gradients_of_blocks_match_float64_of_the_plain_form():
    q, k, v = grid(400)
    f = F.logsigmoid(torch.randn(1, 2, 400, generator=torch.Generator().manual_seed(2)))
    grads = {}
    for form, dtype in ((tra_blocked, torch.float32), (tra_plain, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v, f)]
        grads[dtype] = torch.autograd.grad(form(*leaves).square().sum(), leaves)
    for a, b in zip(*grads.values()):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_forgetting_skips_blocks_and_its_absence_none(monkeypatch):
    calls = count_blocks(monkeypatch)
    q, k, v = grid(1280)
    all_of_one_head = 20 * 21 // 2

    def touched(*gates, T=1280):
        del calls[:]
        f = torch.tensor(gates).view(1, 2, 1).repeat(1, 1, T)
        leaves = [t.clone().requires_grad_() for t in (q[:, :, -T:], k, v, f)]
        tra_attention(*leaves).sum().backward()
        assert calls[0] == calls[1]                         # backward touches what forward touched
        return calls[0]
    assert touched(0.0, 0.0) == 2 * all_of_one_head
    assert touched(-0.5, -0.5) <= 2 * 20 * 6
    assert touched(-50.0, -50.0) <= 2 * 20 * 3
    assert touched(-50.0, -50.0, T=300) <= 2 * 5 * 3        # 300 queries are padded to 5 blocks
    assert all_of_one_head < touched(0.0, -50.0) <= all_of_one_head + 20 * 3        # each head by itself


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in (out if isinstance(out, (list, tuple)) else [out])
                 if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_tensor_grows_with_the_square_of_the_length():
    """At 2,048 tokens T x S would be 4 million; TRA forward and backward, CoPE forward."""
    q, k, v = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    with Largest() as mode:
        tra_attention(q, k, v, torch.zeros(1, 1, 2048, requires_grad=True), dropout_p=0.1).sum().backward()
    assert mode.elements <= 64 * model_script.BLOCK ** 2
    with Largest() as mode, torch.no_grad():
        cope_attention(q, k, v, torch.randn(8, 16))
    assert mode.elements <= 256 * 2048


@pytest.mark.parametrize("sparse, contextual", [(True, True), (False, False)])
def test_dropout_in_blocks_is_the_same_in_both_passes(monkeypatch, sparse, contextual):
    """With v = identity the output is the weights, which shows what was dropped; the plain form with that mask must agree."""
    monkeypatch.setattr(model_script, "BLOCK", 8)
    _, leaves, _ = case("tra", 45, 45)
    q, k, v, f = leaves
    eye = torch.eye(45, dtype=q.dtype).expand(2, 2, 45, 45)

    def dropped(v):
        torch.manual_seed(5)
        return tra_blocked(q, k, v, f, sparse, contextual, dropout_p=0.3)

    whole = tra_plain(q, k, eye, f, sparse, contextual)
    seen = whole.detach() > 1e-9
    mask = (dropped(eye) != 0) & seen
    assert 0.65 < mask.sum() / seen.sum() < 0.75
    got, want = dropped(v), (whole * mask / 0.7) @ v
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert not torch.equal(got, tra_blocked(q, k, v, f, sparse, contextual, dropout_p=0.3))        # another call, other masks
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, weight), torch.autograd.grad(want, leaves, weight)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_dropout_in_blocks_keeps_the_mean():
    _, (q, k, v, f), _ = case("tra", 200, 200, B=20, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        out = tra_attention(q, k, torch.ones_like(v), f, dropout_p=0.25)[:, :, 20:, 0]
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.02


def test_blocks_under_autocast():
    """Half precision in and out, float32 inside, backward too, and also when backward is called within the autocast."""
    call, leaves, _ = case("tra", 150, 150, dtype=torch.bfloat16, D=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*leaves)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    full = [t.detach().float().requires_grad_() for t in leaves]
    want = tra_plain(*full)
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.bfloat16 for g in grads)
    torch.testing.assert_close(out.float(), want, atol=0.03, rtol=0.02)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), full)):
        torch.testing.assert_close(a.float(), b, atol=0.02 * b.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("chunks", [[41], [30, 1, 1, 9], [3, 38]])
def test_cached_logits_in_blocks_equal_full_logits_of_the_plain_form(monkeypatch, chunks):
    model = tiny("tra").double()
    idx = torch.randint(0, 11, (2, 41), generator=torch.Generator().manual_seed(0))
    calls = count_blocks(monkeypatch)
    cache = [{} for _ in model.blocks]
    with torch.no_grad():
        want = model(idx)[0]
        assert not calls                                    # 41 tokens are few: the plain form
        monkeypatch.setattr(model_script, "BLOCK", 4)
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
        assert len(calls) == 2 * sum(n >= 8 for n in chunks)        # two layers
        torch.testing.assert_close(torch.cat(parts, 1), want)


def test_compiled_at_two_lengths():
    """The blocked form breaks the graph and is itself run as it is; the numbers are the same."""
    model = tiny("tra")
    compiled = torch.compile(model, backend="eager")
    for T in (24, 150):
        idx = torch.randint(0, 11, (2, T), generator=torch.Generator().manual_seed(T))
        losses, grads = [], []
        for m in (model, compiled):
            losses.append(m(idx, idx)[1])
            model.zero_grad()
            losses[-1].backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*grads)
