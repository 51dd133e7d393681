"""
All tests: pytest

Attention against oracles of plain loops, in output and in every gradient; then properties, the GPT, the tasks against
independent parsers, training, and the command lines. What is parametrised over ATTENTIONS picks up a new one by itself.
"""

import cmath
import functools
import hashlib
import http.server
import importlib.util
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import data as data_script
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
        "nope": lambda k, v: nope_attention(q, k, v),
        "rope": lambda k, v: rope_attention(q, k, v, 100.0),
        "alibi": lambda k, v: alibi_attention(q, k, v),
        "cope": lambda k, v: cope_attention(q, k, v, pos_emb),
        "fox": lambda k, v: fox_attention(q, k, v, torch.full((1, 1, k.size(2)), -0.3)),
        "no-sparse": lambda k, v: tra_attention(q, k, v, f, sparse=False),
    }
    if at == 3:     # older than all, they leave the distances alone; newer than all, they add a constant, which cancels
        others["no-contextual"] = lambda k, v: tra_attention(q, k, v, f, contextual=False)
    for name, call in others.items():
        assert (call(k2, v2) - call(k, v)).abs().max() > 1e-3, name


def test_both_ablations_and_no_forgetting_give_nope():
    _, (q, k, v, f), _ = case("tra", 6, 9)
    torch.testing.assert_close(tra_attention(q, k, v, torch.zeros_like(f), sparse=False, contextual=False), nope_attention(q, k, v))


def test_both_ablations_and_a_fixed_gate_give_alibi():
    _, (q, k, v), _ = case("alibi", 6, 9)
    f = torch.tensor([-2.0 ** -4, -2.0 ** -8], dtype=q.dtype).view(1, 2, 1).expand(2, 2, 6)
    torch.testing.assert_close(tra_attention(q, k, v, f, sparse=False, contextual=False), alibi_attention(q, k, v))


def test_fox_without_forgetting_and_cope_without_positions_give_nope():
    _, (q, k, v), _ = case("nope", 6, 9)
    torch.testing.assert_close(fox_attention(q, k, v, torch.zeros(2, 2, 9, dtype=q.dtype)), nope_attention(q, k, v))
    torch.testing.assert_close(cope_attention(q, k, v, torch.zeros(4, 8, dtype=q.dtype)), nope_attention(q, k, v))


def test_rope_depends_on_relative_positions_only():
    """Without the oldest key every position is one less; the weights of the others keep their ratios."""
    _, (q, k, v), _ = case("rope", 4, 9)
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
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 1, 6], [17], [3, 300, 1, 1]])         # the last outgrows the cache's room
def test_cached_logits_equal_full_logits(attn, chunks):
    model = tiny(attn).double()
    idx = torch.randint(0, 11, (2, sum(chunks)))
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
    assert torch.equal(model.generate(idx, 8, top_k=1), out) and torch.equal(model.generate(idx, 8, temperature=1e-40), out)
    next(model.stream(idx, 8))                                          # broken off
    assert model.training
    model(out[:, :-1], out[:, 1:])[1].backward()                        # one may train on what was generated
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
                                 dict(dropout=1.0), dict(dropout=-0.1), dict(vocab_size=0), dict(rope_theta=0.0), dict(n_embd=16.0), dict(embd_std=-1.0)])
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
    if name not in PARSERS:
        pytest.skip(f"to check the examples of {name}, give it a parser in PARSERS")
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


@pytest.mark.parametrize("name, digest", [("flipflop", "261a334e12e78694"), ("copy", "b0051152f3b7039e"), ("induct", "b8c1422557147855"), ("instruct", "9f3efa0979e42928")])
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


def test_instruct_practises_long_answers_and_long_sequences_more():
    task = make_task("instruct", "laptop", length=4, symbols=5)
    batches = [task.batch("train", 0, step, 20)[0] for step in range(1000)]
    what = np.concatenate([x[:, 0] for x in batches])
    assert np.allclose(np.bincount(what) / len(what), [1/3, 1/3, 1/6, 1/6], atol=0.02)
    lengths = np.array([x.shape[1] // 2 - 1 for x in batches])
    assert np.allclose(np.bincount(lengths) / len(lengths), [((n + 1) ** 3 - n ** 3) / 5 ** 3 for n in range(5)], atol=0.05)


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

@pytest.fixture(scope="session", autouse=True)
def prepared(tmp_path_factory):
    """A small text as bytes, for --task wikitext."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    (folder / "text.txt").write_text("".join(rng.choice(["the cat sat . ", "a dog ran , ", "naïve . \n"]) for _ in range(400)), encoding="utf-8")
    data_script.prepare(folder / "text.txt", folder / "data", "byte", 1)
    SMALL["wikitext"] = dict(window=6, data=folder / "data")
    return folder / "data"


QUICK = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch", "4", "--steps", "6", "--examples", "5", "--log-every", "2",
         "--device", "cpu", "--scale", "laptop"]


def quick(task, *flags):
    sizes = [word for name, value in SMALL.get(task, {}).items() for word in (f"--{name}", str(value))]
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


@pytest.mark.parametrize("task", train_script.PRESETS)
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_trains_on_every_task_and_twice_the_same(tmp_path, capsys, attn, task):
    for name in ("a", "b"):
        assert call(train_script, *quick(task, "--attn", attn, "--out", tmp_path / name, "--seed", 3)) == 0
    assert same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    first, second = log(tmp_path / "a"), log(tmp_path / "b")
    assert [row["step"] for row in first] == [2, 4, 6] and first[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert [(r["loss"], r["lr"], r["grad_norm"]) for r in first] == [(r["loss"], r["lr"], r["grad_norm"]) for r in second]
    found = json.loads((tmp_path / "a" / "eval.json").read_text())
    assert (found["task"], found["attn"], found["seed"], found["scale"]) == (task, attn, 3, "laptop")
    assert found["examples"] == (5 if task in TASKS else 4)             # the first token of a text is not predicted
    assert list(found["results"]) == (list(make_task(task, "laptop", **SMALL.get(task, {})).splits)[1:] if task in TASKS else "6 12 24 48 96 192".split())
    assert capsys.readouterr().out.count(f"| {attn} ") == 2 * (4 if task == "instruct" else 1)        # a table per instruction


def test_a_short_training_learns_flipflop_and_keeps_it_at_four_times_the_length(tmp_path, capsys):
    """About half a minute: with 24 instructions and 250 steps TRA is right nearly everywhere, at 96 instructions too."""
    assert call(train_script, "--attn", "tra", "--task", "flipflop", "--scale", "laptop", "--length", 24, "--n-layer", 2, "--n-embd", 64,
                "--n-head", 4, "--steps", 250, "--lr", 0.002, "--beta2", 0.98, "--embd-std", 1, "--batch", 32, "--examples", 100, "--device", "cpu", "--out", tmp_path / "run") == 0
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    assert min(results.values()) >= 0.95, results
    losses = [row["loss"] for row in log(tmp_path / "run")]
    assert losses[0] > 0.3 and losses[-1] < 0.05


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_compiled_training_has_the_same_losses_at_every_length(tmp_path, monkeypatch, capsys, attn):
    """Lengths differ from step to step, and TRA takes both its forms. COMPILE=1 goes on to the C++ compiler, which takes minutes."""
    compiler = "inductor" if "COMPILE" in os.environ else "aot_eager"
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    losses = []
    for flag in ("--compile", "--no-compile"):
        run = tmp_path / flag
        flags = ["--seed", 189, "--length", 100, "--dropout", 0, "--log-every", 1, "--steps", 3, "--examples", 1, flag, "--out", run]
        assert call(train_script, "--attn", attn, *quick("copy"), *flags) == 0
        losses.append([row["loss"] for row in log(run)])
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_without_a_compiler_one_line_and_no_run(tmp_path, monkeypatch, capsys):
    def broken(*inputs):
        raise RuntimeError("no compiler found\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    assert call(train_script, *quick("copy", "--attn", "tra", "--compile", "--out", tmp_path / "run")) == 2
    assert capsys.readouterr().err.strip() == "error: --compile does not work here, leave it out: no compiler found"
    assert not (tmp_path / "run").exists()


def test_seeds_differ_and_settings_reach_the_model(tmp_path, capsys):
    runs = {"a": ["--seed", 0], "b": ["--seed", 1], "c": ["--no-sparse"], "d": ["--no-contextual"], "e": ["--dropout", 0.5], "f": ["--lr", 0.1],
            "g": ["--beta2", 0.5], "h": ["--weight-decay", 50], "i": ["--warmup", 1], "j": ["--grad-clip", 0.01], "k": ["--batch", 3],
            "l": ["--symbols", 4], "n": ["--embd-std", 1], "o": ["--forget-bias", 2], "m": ["--dtype", "bfloat16"]}
    for name, flags in runs.items():
        assert call(train_script, *quick("copy", "--attn", "tra", "--out", tmp_path / name, *flags)) == 0
    sums = {name: float(weights(tmp_path / name)["blocks.0.mlp.up.weight"].double().sum()) for name in runs}
    assert len(set(sums.values())) == len(runs)
    config = torch.load(tmp_path / "c" / "ckpt.pt", weights_only=True)["config"]
    assert config["sparse"] is False and config["contextual"] is True


def test_flags_beat_presets_and_presets_beat_defaults(tmp_path):
    flags = lambda *words: train_script.settings(train_script.parse_flags([*words, "--attn", "tra", "--out", str(tmp_path / "none")]))[1]
    args = flags("--task", "flipflop", "--scale", "laptop", "--steps", "7")
    preset = train_script.PRESETS["flipflop"]["laptop"]
    assert args["steps"] == 7 and args["embd_std"] == preset["embd_std"] != GPTConfig.embd_std and args["length"] == 64
    assert {**args, "steps": preset["steps"]}.items() >= preset.items() and args["dropout"] == GPTConfig.dropout
    paper = flags("--task", "copy", "--scale", "paper")
    assert (paper["n_layer"], paper["n_embd"], paper["batch"], paper["length"], paper["dropout"]) == (4, 256, 128, 50, 0.01)
    assert flags("--task", "copy")["scale"] == flags("--task", "copy", "--scale", "auto")["scale"] in ("laptop", "paper")


def test_accumulation_logging_and_validation_do_not_change_the_training(tmp_path, capsys):
    runs = {"whole": [], "parts": ["--accumulate", 4], "uneven": ["--accumulate", 3], "logs": ["--log-every", 5], "evals": ["--eval-every", 2]}
    for name, flags in runs.items():
        assert call(train_script, *quick("instruct", "--attn", "tra", "--dropout", 0, "--out", tmp_path / name, *flags)) == 0
    whole = weights(tmp_path / "whole")
    assert same_weights(whole, weights(tmp_path / "logs")) and same_weights(whole, weights(tmp_path / "evals"))
    assert [row["step"] for row in log(tmp_path / "evals") if "exact_match_copy-1x" in row] == [2, 4, 6]
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


def test_eval_notes_what_a_row_should_not_mix_and_measures_on_another_text(tmp_path, capsys, prepared):
    for name in ("a", "b"):
        assert call(train_script, "--attn", "tra", *quick("copy"), "--out", tmp_path / name) == 0
    assert call(train_script, "--attn", "rope", *quick("wikitext"), "--out", tmp_path / "text") == 0
    capsys.readouterr()
    assert call(eval_script, tmp_path / "a", tmp_path / "b") == 0
    assert "the tra runs of copy share a row, but a seed occurs twice" in capsys.readouterr().err
    for seed, *flags in ((1,), (2, "--steps", 8, "--forget-bias", 5)):
        assert call(train_script, "--attn", "tra", *quick("copy"), "--seed", seed, *flags, "--out", tmp_path / f"s{seed}") == 0
    capsys.readouterr()
    assert call(eval_script, tmp_path / "a", tmp_path / "s1") == 0 and not capsys.readouterr().err
    assert call(eval_script, tmp_path / "a", tmp_path / "s1", tmp_path / "s2") == 0
    assert capsys.readouterr().err == "note: the tra runs of copy share a row, but differ in forget_bias, steps\n"
    assert call(eval_script, tmp_path / "text", "--windows", "64,8,999999", "--examples", 100) == 0
    assert "8 |" in (said := capsys.readouterr()).out.split("64 |")[0] and said.err == "note: 99 tokens are scored, fewer than a window of 999999\n"
    assert call(eval_script, tmp_path / "text", "--data", "nowhere") == 2 and "nowhere" in capsys.readouterr().err
    assert call(eval_script, tmp_path / "text", "--examples", 1) == 2 and "at least 2" in capsys.readouterr().err
    assert call(train_script, "--attn", "rope", *quick("wikitext"), "--examples", 1, "--out", tmp_path / "c") == 2 and not (tmp_path / "c").exists()


def test_a_model_that_came_apart_still_gets_a_table(monkeypatch, prepared):
    task = data_script.WikiText(str(prepared), 6)
    model = tiny("rope", vocab_size=256)
    torch.nn.init.constant_(model.head.weight, 0)
    model.head.weight.data[0] = 1e6
    found = eval_script.evaluate(model, task, 100, "cpu", ["6"])
    assert 1e11 < found["6"] < 1e12                                     # what read_record takes
    assert eval_script.bench_text({"rope": model}, task.tokens["test"][:100], 6, torch.device("cpu"))[0]["perplexity"] == found["6"]


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
    (train_script, ["--attn", "tra", "--task", "copy", "--length", "100001"], "100000"),
    (train_script, ["--attn", "tra", "--task", "copy", "--n-layer", "4000000000"], "--n-layer"),
    (train_script, ["--attn", "rope", "--task", "copy", "--no-sparse"], "sparse"),
    (train_script, ["--attn", "tra", "--task", "copy", "--resume", "--overwrite"], "--resume"),
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
    (eval_script, ["--bench", "--attn", "tra", "none"], "none"),
    (eval_script, ["--bench", "--window", "0"], "0"),
    (eval_script, ["nowhere", "--bench"], "nowhere"),
    (eval_script, ["nowhere", "--bench", "--batch", "2"], "--batch"),
    (eval_script, ["--bench", "--examples", "2"], "--examples"),
    (eval_script, ["nowhere", "--top-k", "2"], "--top-k"),
    (eval_script, ["--bench", "--temperature", "0"], "--temperature"),
    (tasks_script, ["--task", "copy", "--split", "7x"], "7x"),
    (tasks_script, ["--task", "copy", "--count", "-1"], "-1"),
    (tasks_script, ["--task", "copy", "--symbols", "4000000000"], "--symbols"),
    (tasks_script, ["--task", "copy", "--more\nlines"], "--more lines"),
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


# Text: downloads, preparation, and files that cannot be trusted

TEXT = "".join(f" \n = Title {i} = \n \n Some words , naïve “quotes” 東京 🙂 and <|endoftext|> {i * i} . \n" for i in range(60))
RAW = {f"wikitext-103-raw/wiki.{name}.raw": TEXT[cut] for name, cut in
       [("train", slice(0, 2000)), ("valid", slice(2000, 2500)), ("test", slice(2500, 3100))]}


def make_zip(members, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text, compress_type=method)
    return buffer.getvalue()


def prepare_text(capsys, *argv, tokenizer="byte"):
    """data.py's main() in this process: (exit code, lines of stdout, lines of stderr)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data.py", *map(str, argv), "--tokenizer", tokenizer])
        try:
            code = data_script.main() or 0
        except SystemExit as e:
            code = e.code
    out, err = capsys.readouterr()
    assert "\r" not in out + err and "Traceback" not in err
    return code, out.splitlines(), err.splitlines()


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()} if Path(folder).exists() else None


def decoded(folder):
    meta, splits = data_script.load(folder)
    return [bytes(splits[s].astype(np.uint8)).decode() for s in ("train", "val", "test")]


@pytest.fixture
def mirror(monkeypatch):
    """A loopback web server with one small zip: /good, and /short, /wrong, /slow, /gone, which fail in their own ways."""
    body, asked, release = make_zip(RAW), [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            refused = self.path == "/gone" or "python" in self.headers.get("User-Agent", "python").lower()
            self.send_response(404 if self.path == "/gone" else 403 if refused else 200)
            if refused or self.path != "/unannounced":
                self.send_header("Content-Length", "0" if refused else str(len(body)))
            self.end_headers()
            if refused:
                return
            half = len(body) // 2
            self.wfile.write(body[:half])
            if self.path == "/slow":
                self.wfile.flush()
                release.wait(20)
            if self.path != "/short":
                self.wfile.write(bytes([body[half] ^ 1 if self.path == "/wrong" else body[half]]) + body[half + 1:])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data_script, "SHA256", hashlib.sha256(body).hexdigest())

    def use(*paths):
        monkeypatch.setattr(data_script, "MIRRORS", [path if "://" in path else url + path for path in paths])
        return asked

    use.body, use.url = body, url
    yield use
    release.set()
    server.shutdown()
    server.server_close()


def closed_port():
    with http.server.HTTPServer(("127.0.0.1", 0), None) as server:
        return f"http://127.0.0.1:{server.server_port}/zip"


@pytest.mark.parametrize("first", [None, "/short", "/wrong", "/gone", "closed"])
def test_data_downloads_from_first_good_mirror(mirror, first, tmp_path, capsys):
    asked = mirror(*([closed_port() if first == "closed" else first] if first else []), "/good", "/gone")
    code, out, err = prepare_text(capsys, "--out", tmp_path / "d")
    assert (code, err) == (0, []) and asked[-1] == "/good" and "/gone" not in asked[1:]
    assert decoded(tmp_path / "d") == list(RAW.values())
    meta = data_script.load(tmp_path / "d")[0]
    assert meta["source"] == mirror.url + "/good" and meta["sha256"] == data_script.SHA256 and meta["vocab_size"] == 256
    assert meta["bytes"] == meta["tokens"] == {s: len(t.encode()) for s, t in zip(("train", "val", "test"), RAW.values())}
    assert sorted(os.listdir(tmp_path / "d")) == ["meta.json", "test.bin", "train.bin", "val.bin"]
    before, count = tree(tmp_path), len(asked)
    code, out, err = prepare_text(capsys, "--out", tmp_path / "d")
    assert (code, err, len(out)) == (0, [], 1) and "nothing to do" in out[0] and tree(tmp_path) == before and len(asked) == count


def test_data_download_without_announced_length(mirror, tmp_path, capsys):
    mirror("/unannounced")
    assert prepare_text(capsys, "--out", tmp_path / "d")[0] == 0 and decoded(tmp_path / "d") == list(RAW.values())


@pytest.mark.parametrize("path, reason", [("/short", "broke off"), ("/wrong", "sha256"), ("/gone", "404"), ("closed", "refused")])
def test_data_download_that_fails_leaves_nothing(mirror, path, reason, tmp_path, capsys):
    mirror(closed_port() if path == "closed" else path)
    code, out, err = prepare_text(capsys, "--out", tmp_path / "d")
    assert code == 2 and len(err) == 1 and reason in err[0] and "--from" in err[0] and "--tokenizer byte" in err[0]
    assert os.listdir(tmp_path) == []


def test_a_missing_text_names_the_command_that_prepares_it(tmp_path, capsys):
    for folder, words in (("x-byte", "data.py --tokenizer byte --out"), ("x-byte/", "data.py --tokenizer byte --out"), ("x", "data.py --out")):
        assert call(train_script, *quick("wikitext", "--attn", "tra", "--out", tmp_path / "run", "--data", f"{tmp_path}/{folder}")) == 2
        assert f"{words} {tmp_path}/{folder}" in capsys.readouterr().err


def test_data_needs_its_user_agent(mirror, monkeypatch, tmp_path, capsys):
    mirror("/good")
    plain = data_script.urllib.request.Request
    monkeypatch.setattr(data_script.urllib.request, "Request", lambda url, headers: plain(url))
    code, out, err = prepare_text(capsys, "--out", tmp_path / "d")
    assert code == 2 and len(err) == 1 and "403" in err[0]


def test_data_offline_vocabulary(monkeypatch, tmp_path, capsys):
    def offline(name):
        raise OSError("no route\nto host")
    monkeypatch.setattr(data_script.tiktoken, "get_encoding", offline)
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    code, out, err = prepare_text(capsys, "--from", tmp_path / "t.txt", "--out", tmp_path / "d", tokenizer="gpt2")
    assert code == 2 and len(err) == 1 and all(way in err[0] for way in ("TIKTOKEN_CACHE_DIR", "--from", "--tokenizer byte"))
    assert os.listdir(tmp_path) == ["t.txt"]


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_data_ctrl_c(mirror, tmp_path):
    mirror("/slow")
    code = ("import data, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a background job may have it off
            f"data.MIRRORS = {data_script.MIRRORS!r}; data.main()")
    process = subprocess.Popen([sys.executable, "-c", code, "--out", str(tmp_path / "d"), "--tokenizer", "byte"], cwd=HERE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 30
    while not list(tmp_path.glob("d/.partial-*/raw.zip")) and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2 and len(err.splitlines()) == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", [
    TEXT, "x" * 500, "é" * 333, "東京🙂" * 77, "\r\n" * 50, "a\rb\r\nc\n" * 40, "abcdefghijklmnopqrstuvwxyz", "one line only " * 40 + "\n",
    "\ufeff" + "bom and \x00 nul \x1c\x85\u2028 breaks\n" * 9, "".join(map(chr, [*range(0, 0xD800, 31), *range(0xE000, 0x110000, 331)])),
])
def test_data_text_file_split_and_round_trip(text, monkeypatch, tmp_path, capsys):
    (tmp_path / "t.txt").write_bytes(text.encode())
    monkeypatch.setattr(data_script, "CHUNK", 37)
    code, out, err = prepare_text(capsys, "--from", tmp_path / "t.txt", "--out", tmp_path / "d")
    assert (code, err) == (0, [])
    meta, splits = data_script.load(tmp_path / "d")
    byte = data_script.encoding("byte")
    assert "".join(byte.decode(splits[s].tolist()) for s in splits) == text  # each part decodes alone: none is cut inside a character
    for part in decoded(tmp_path / "d"):
        assert byte.decode(byte.encode_ordinary(part)) == part
    size = len(text.encode())
    for s, share in [("train", 0.9), ("val", 0.05), ("test", 0.05)]:
        assert meta["bytes"][s] == meta["tokens"][s] == len(splits[s]) and abs(meta["bytes"][s] - share * size) <= 0.04 * size + 4
    assert meta["source"] == "t.txt" and meta["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_data_text_file_is_cut_between_lines(tmp_path, capsys):
    for lines in (30, 100, 1234):
        text = "".join(f"line {i} of some length\n" for i in range(lines))
        (tmp_path / "t.txt").write_text(text, newline="")
        assert prepare_text(capsys, "--from", tmp_path / "t.txt", "--out", tmp_path / str(lines))[0] == 0
        assert all(part.endswith("\n") for part in decoded(tmp_path / str(lines)))


def test_data_chunks_do_not_change_tokens(monkeypatch, tmp_path):
    """A small BPE with GPT-2's pattern: cutting the text, and the number of threads, make no difference."""
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    merges = [b"\n\n", b" \n", b" \n \n", b"\n ", b"  ", b" =", b" w", b"or", b"ds", b" wor", b" words", b"ti", b"tle", b" ,", b"||", b"e,"]
    ranks = {bytes([b]): b for b in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    enc = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 999})
    raw = (TEXT + "  a \n\n\n b \n \n  'll, it's  \n" * 40).encode()
    (tmp_path / "t.txt").write_bytes(raw)
    part = "t", lambda: open(tmp_path / "t.txt", "rb"), 0, len(raw)
    for chunk, threads in [(64, 1), (64, 5), (100, 2), (1 << 18, 3)]:
        monkeypatch.setattr(data_script, "CHUNK", chunk)
        count = data_script.tokenise(enc, part, tmp_path / "t.bin", threads)
        ids = np.fromfile(tmp_path / "t.bin", dtype="<u2")
        assert ids.tolist() == enc.encode_ordinary(raw.decode()) and count == len(ids) < len(raw)
    with open(tmp_path / "t.txt", "rb") as f:
        monkeypatch.setattr(data_script, "CHUNK", 64)
        texts = list(data_script.chunks(f, len(raw)))
    assert "".join(texts).encode() == raw and len(texts) > 50


@pytest.mark.parametrize("kind", ["raw", "tokens", "both"])
def test_data_folder_and_zip_agree(kind, tmp_path, capsys):
    folder, members = tmp_path / "wiki", {}
    folder.mkdir()
    for name, text in RAW.items():
        base = Path(name).name
        if kind != "tokens":
            (folder / base).write_text(text, encoding="utf-8", newline="")
        if kind != "raw":
            (folder / base.replace(".raw", ".tokens")).write_text(text if kind == "tokens" else "other", encoding="utf-8", newline="")
        members[name if kind != "tokens" else name.replace("-raw", "").replace(".raw", ".tokens")] = text
    (tmp_path / "w.zip").write_bytes(make_zip({"../../evil.txt": "out!", "/abs/evil.txt": "out!", **members}))
    assert prepare_text(capsys, "--from", folder, "--out", tmp_path / "a")[0] == 0
    code, out, err = prepare_text(capsys, "--from", tmp_path / "w.zip", "--out", tmp_path / "b")
    assert (code, err) == (0, []) and "not one of the two published" in out[0]
    assert decoded(tmp_path / "a") == decoded(tmp_path / "b") == list(RAW.values())
    assert "not one of the published" in data_script.load(tmp_path / "b")[0]["source"] and not list(tmp_path.rglob("evil*"))
    assert data_script.load(tmp_path / "a")[0]["sha256"] == hashlib.sha256("".join(RAW.values()).encode()).hexdigest()


def bad_sources():
    good, stored = make_zip(RAW), make_zip(RAW, zipfile.ZIP_STORED)
    yield "no such file", "missing", None
    yield "empty text", "t.txt", b""
    yield "one byte", "t.txt", b"a"
    yield "three characters", "t.txt", "東京🙂".encode()
    yield "latin-1", "t.txt", ("abc\n" * 50 + "caf\xe9\n" + "abc\n" * 50).encode("latin-1")
    yield "utf-16", "t.txt", TEXT.encode("utf-16")
    yield "all continuation bytes", "t.txt", b"\x80" * 1000
    yield "last character cut", "t.txt", TEXT.encode() + "🙂".encode()[:3]
    yield "surrogate", "t.txt", b"abc\n" * 50 + b"\xed\xa0\x80" + b"abc\n" * 50
    yield "empty zip file", "z.zip", b""
    yield "no zip", "z.zip", b"hello " * 100
    yield "half a zip", "z.zip", good[:len(good) // 2]
    yield "half a zip, no suffix", "z", good[:len(good) // 2]
    yield "zip without members", "z.zip", make_zip({})
    yield "zip of other things", "z.zip", make_zip({"a.txt": TEXT})
    yield "zip with one missing", "z.zip", make_zip(dict(list(RAW.items())[:2]))
    yield "zip with one empty", "z.zip", make_zip({**RAW, "wikitext-103-raw/wiki.valid.raw": ""})
    yield "zip paths out", "z.zip", make_zip({"../" + name: text for name, text in RAW.items()})
    yield "zip member not UTF-8", "z.zip", make_zip({**RAW, "wikitext-103-raw/wiki.test.raw": b"caf\xe9 " * 9})
    yield "zip wrong byte, stored", "z.zip", stored[:400] + bytes([stored[400] ^ 1]) + stored[401:]
    yield "zip wrong byte, deflated", "z.zip", good[:400] + bytes([good[400] ^ 64]) + good[401:]
    yield "encrypted flag", "z.zip", re.sub(rb"(?s)(PK\x01\x02....)..", lambda m: m[1] + b"\1\0", good)
    yield "unknown compression", "z.zip", re.sub(rb"(?s)(PK\x01\x02......)..", lambda m: m[1] + b"\x63\0", good)
    yield "folder, empty", "w", {}
    yield "folder, one missing", "w", {"wiki.train.raw": b"a", "wiki.test.raw": b"a", "wiki.valid.tokens": b"a"}
    yield "folder, one empty", "w", {"wiki.train.raw": b"a", "wiki.test.raw": b"a", "wiki.valid.raw": b""}
    yield "folder, not UTF-8", "w", {"wiki.train.raw": b"a", "wiki.test.raw": b"a", "wiki.valid.raw": b"\xff"}
    yield "folder, one a folder", "w", {"wiki.train.raw": b"a", "wiki.test.raw": b"a", "wiki.valid.raw/x": b"a"}


@pytest.mark.parametrize("name, content", [pytest.param(n, c, id=i.replace(" ", "-")) for i, n, c in bad_sources()])
def test_data_bad_source_is_one_line(name, content, tmp_path, capsys):
    for file, part in (content.items() if isinstance(content, dict) else [("", content)]):
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        if part is not None:
            (tmp_path / name / file).write_bytes(part)
    if content == {}:
        (tmp_path / name).mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    for out in ("kept", "new"):
        code, _, err = prepare_text(capsys, "--from", tmp_path / name, "--out", tmp_path / out)
        assert code == 2 and len(err) == 1 and err[0].startswith("error: ") and name in err[0], err
        assert tree(tmp_path) == before and not (tmp_path / "new").exists() and len(os.listdir(tmp_path / "kept")) == 1


def test_data_damaged_zips_never_crash(tmp_path, capsys):
    rng, good = np.random.default_rng(0), make_zip(RAW)
    for i in range(120):
        bad = bytearray(good)
        for at in rng.integers(len(bad) * (i % 2) // 2 if i % 4 else len(bad) - 300, len(bad), size=1 + i % 3):
            bad[at] = rng.integers(256)
        (tmp_path / "z.zip").write_bytes(bad[:rng.integers(len(bad))] if i % 7 == 0 else bad)
        code, _, err = prepare_text(capsys, "--from", tmp_path / "z.zip", "--out", tmp_path / str(i))
        assert (code, len(err)) in [(0, 0), (2, 1)] and (code == 0) == (tmp_path / str(i)).exists(), err
        assert code or decoded(tmp_path / str(i)) == list(RAW.values())


def test_data_refuses_another_request_for_a_used_folder(tmp_path, capsys, monkeypatch):
    for name, text in [("a.txt", TEXT), ("b.txt", TEXT + "more\n")]:
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert prepare_text(capsys, "--from", tmp_path / "a.txt", "--out", tmp_path / "d")[0] == 0
    before = tree(tmp_path)
    monkeypatch.setattr(data_script, "encoding", None)  # none of these gets as far as needing one
    for argv, tokenizer in [(("--from", tmp_path / "b.txt"), "byte"), (("--from", tmp_path / "a.txt"), "gpt2"), ((), "byte")]:
        code, out, err = prepare_text(capsys, *argv, "--out", tmp_path / "d", tokenizer=tokenizer)
        assert code == 2 and len(err) == 1 and "already holds a.txt as byte tokens" in err[0] and tree(tmp_path) == before
    code, out, err = prepare_text(capsys, "--from", tmp_path / "a.txt", "--out", tmp_path / "d")
    assert (code, err, len(out)) == (0, [], 1) and "nothing to do" in out[0] and tree(tmp_path) == before
    (tmp_path / "d" / "val.bin").write_bytes(b"short")
    code, out, err = prepare_text(capsys, "--from", tmp_path / "a.txt", "--out", tmp_path / "d")
    assert code == 2 and len(err) == 1 and "val.bin" in err[0]


def test_data_folder_with_moved_boundary_is_another_request(tmp_path, capsys):
    for at, name in [(1000, "a"), (1200, "b")]:
        (tmp_path / name).mkdir()
        for split, text in [("train", TEXT[:at]), ("valid", TEXT[at:2000]), ("test", TEXT[2000:])]:
            (tmp_path / name / f"wiki.{split}.raw").write_text(text, encoding="utf-8", newline="")
    assert prepare_text(capsys, "--from", tmp_path / "a", "--out", tmp_path / "d")[0] == 0
    assert prepare_text(capsys, "--from", tmp_path / "b", "--out", tmp_path / "d")[0] == 2


@pytest.mark.parametrize("where, reason", [
    ("file", "is not a folder"), ("below-a-file", "Not a directory"), ("foreign-bins", "without a meta.json"), ("read-only", "denied"),
    ("disk-full", "No space left"), ("disk-full-at-sync", "No space left"), ("flag", "--what"),
])
def test_data_bad_out_is_one_line(where, reason, tmp_path, capsys, monkeypatch):
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "val.bin").write_bytes(b"mine")
    (tmp_path / "read-only").mkdir(mode=0o500)
    out = {"file": "file", "below-a-file": "file/d", "foreign-bins": "foreign", "read-only": "read-only"}.get(where, "new")
    if where == "read-only" and os.access(tmp_path / "read-only", os.W_OK):
        pytest.skip("this user may write anywhere")
    if where.startswith("disk-full"):
        def full(*args):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(data_script.os, "fsync", full)
        if where == "disk-full":
            class Full(io.FileIO):
                write = full
            monkeypatch.setattr(data_script, "open", lambda path, mode: (Full if "w" in mode else open)(path, mode), raising=False)
    before = tree(tmp_path)
    code, _, err = prepare_text(capsys, "--from", tmp_path / "t.txt", "--out", tmp_path / out, *(["--what"] if where == "flag" else []))
    assert code == 2 and len(err) == 1 and reason in err[0] and (out in err[0] or where == "flag"), err
    assert tree(tmp_path) == before and not (tmp_path / "new").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_data_killed_run_is_never_trusted(tmp_path, capfd, monkeypatch):
    """SIGKILL before and after every move of a finished file, and at random moments; a rerun always ends with the right files."""
    (tmp_path / "t.txt").write_text(TEXT * 20, encoding="utf-8", newline="")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 " * 50)
    monkeypatch.setattr(data_script, "CHUNK", 512)
    replace, context, rng = os.replace, multiprocessing.get_context("fork"), np.random.default_rng(0)

    def child(kill_at):
        moves = iter(range(100))

        def move(a, b):
            if next(moves) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(a, b)
            time.sleep(0.002)
        data_script.os.replace = move
        data_script.prepare(tmp_path / "t.txt", out, "byte", 2)

    start = time.perf_counter()
    data_script.prepare(tmp_path / "t.txt", tmp_path / "good", "byte", 2)
    took, good, seen = time.perf_counter() - start + 0.01, tree(tmp_path / "good"), set()
    for i in range(24):
        out = tmp_path / str(i)
        for again in range(1 + i % 2):  # now and then two killed runs in a row
            process = context.Process(target=child, args=(i if i < 4 else -1,))
            process.start()
            process.join(None if i < 4 else rng.uniform(0, 1.2 * took))
            process.kill()
            process.join()
        seen.add(tuple(sorted(p.name[:9] for p in out.glob("*"))))
        if (out / "meta.json").exists():
            assert {k: v for k, v in tree(out).items() if len(k.parts) == 1} == good
        else:
            with pytest.raises(SystemExit):
                data_script.load(out)
            if i % 3 == 0:  # a run that fails in between takes nothing away from the next
                with pytest.raises(SystemExit):
                    data_script.prepare(tmp_path / "bad.txt", out, "byte", 2)
        data_script.prepare(tmp_path / "t.txt", out, "byte", 2)
        assert tree(out) == good
    assert len(seen) >= 4, seen


def test_data_load_survives_damage(tmp_path, capsys):
    """Sixty damaged folders: load() either gives sound arrays or ends with one line, never a traceback."""
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    assert prepare_text(capsys, "--from", tmp_path / "t.txt", "--out", tmp_path / "d")[0] == 0
    good, rng, outcomes = tree(tmp_path / "d"), np.random.default_rng(1), set()
    meta = json.loads(good[Path("meta.json")])
    odd = [None, True, -1, 0, 1, 1.0, 256.0, 2**80, "", "x", [], {}, "gpt2", ["byte"], float("nan"), 50257]
    damaged = [json.dumps({**meta, field: odd[i]}).encode() for field in meta for i in rng.permutation(len(odd))[:6]]
    damaged += [json.dumps({**meta, f: {**meta[f], "val": v}}).encode() for f in ("tokens", "bytes") for v in odd[:8]]
    damaged += [json.dumps({k: v for k, v in meta.items() if k != field}).encode() for field in meta]
    damaged += [b"", b"[]", b"null", b"[" * 100000, b"9" * 5000, b"\xff\xfe", b'{"format": 2}']
    cases = [("meta.json", blob) for blob in damaged]
    for i in range(60):
        name = sorted(good)[i % 4]
        blob = bytearray(good[name])
        for at in rng.integers(len(blob), size=1 + i % 2):
            blob[at] = rng.integers(256)
        cases.append((name, bytes(blob[:rng.integers(len(blob))] if i % 5 == 0 else blob)))
    sure = [("train.bin", good[Path("train.bin")][:-2] + b"\x00\x01"), ("val.bin", None), ("meta.json", None), ("test.bin", b"")]
    sure += [("meta.json", json.dumps({**meta, **change}).encode()) for change in
             ({"format": 2}, {"bytes": {**meta["bytes"], "val": 1}}, {"tokenizer": "gpt2"}, {"tokenizer": "gpt2", "vocab_size": 256})]
    cases += sure
    for name, blob in cases:
        path = tmp_path / "d" / name
        path.unlink() if blob is None else path.write_bytes(blob)
        try:
            found, splits = data_script.load(tmp_path / "d")
            assert (found["tokenizer"], found["vocab_size"], found["tokens"]) == ("byte", 256, meta["tokens"])
            assert all(len(splits[s]) == n and splits[s].max() < 256 for s, n in meta["tokens"].items())
            outcomes.add("fine")
            assert (name, blob) not in sure
        except SystemExit as e:
            err = capsys.readouterr().err.splitlines()
            assert e.code == 2 and len(err) == 1 and str(tmp_path / "d") in err[0], (blob, err)
            outcomes.add(re.sub(r".*/d\S*|\(.*\)|\d+", "", err[0])[:40])
        path.write_bytes(good[Path(name)])
    assert len(outcomes) >= 6, outcomes


def test_data_load_without_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(SystemExit) as e:
            data_script.load(tmp_path / name)
        err = capsys.readouterr().err.splitlines()
        assert e.value.code == 2 and len(err) == 1 and "python data.py" in err[0]


def test_data_batch():
    tokens = np.arange(1000, dtype="<u2")
    x, y = data_script.batch(tokens, 3, 5, 8, 16)
    assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == np.int64 and (y == x + 1).all() and (np.diff(x) == 1).all()
    again = data_script.batch(tokens, 3, 5, 8, 16)
    assert (x == again[0]).all() and (y == again[1]).all()
    assert (x != data_script.batch(tokens, 4, 5, 8, 16)[0]).any() and (x != data_script.batch(tokens, 3, 6, 8, 16)[0]).any()
    x, y = data_script.batch(tokens[:19], 0, 0, 500, 16)
    assert set(x[:, 0]) == {0, 1, 2} and y.max() == 18  # every window that fits, the last token included
    x, y = data_script.batch(tokens[:17], 0, 0, 2, 16)
    assert (x == np.arange(16)).all()


@pytest.mark.parametrize("terminal", [True, False])
def test_data_progress(terminal, monkeypatch):
    screen, clock = io.StringIO(), iter(range(0, 1000, 4))
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(data_script.time, "monotonic", lambda: next(clock))
    with data_script.progress("train") as show:
        for done in range(10, 101, 10):
            show(done * 10**6, 100 * 10**6)
        show(5 * 10**6, 0)
    text = screen.getvalue()
    assert "50% of 100 MB, 0:20 left" in text if terminal else text.count("\n") == 3 and "\r" not in text
    assert not terminal or text.endswith(" \r") and "\n" not in text and max(map(len, text.split("\r"))) == 79


# Language modelling

@pytest.mark.parametrize("window", [1, 5, 16, 99, 100, 500])
def test_perplexity_scores_every_token_once_as_a_mean_over_tokens(monkeypatch, window):
    """Against one window after the other, by hand: tokens [w W, (w + 1) W] in, a sum of logs out; the last window is shorter."""
    monkeypatch.setattr(eval_script, "TOKENS_PER_BATCH", 40)
    model, tokens = tiny("tra"), np.random.default_rng(0).integers(0, 11, 101).astype("<u2")
    total, scored = 0.0, []
    with torch.no_grad():
        for start in range(0, 100, window):
            part = tokens[start:start + window + 1].astype(np.int64)
            logs = model(torch.from_numpy(part[None, :-1]))[0][0].double().log_softmax(-1)
            total -= sum(logs[i, token].item() for i, token in enumerate(part[1:]))
            scored += range(start + 1, start + len(part))
    assert scored == list(range(1, 101))
    losses = list(eval_script.text_losses(model, tokens, window, "cpu"))
    assert sum(loss.numel() for loss in losses) == 100 and max(loss.numel() for loss in losses) <= max(40, window)
    assert eval_script.mean_loss(model, tokens, window, "cpu") == pytest.approx(total / 100, rel=1e-5)
    parts = eval_script.loss_by_position(model, tokens, window, "cpu")
    assert parts[0][0] == 1 and parts[-1][1] == window or window == 500
    assert all(a[1] + 1 == b[0] for a, b in zip(parts, parts[1:]))
    first = [loss[:, 0] for loss in losses]
    assert parts[0][2] == pytest.approx(torch.cat(first).mean().item())


def test_wikitext_learns_validates_and_reports_windows_and_bits(tmp_path, capsys):
    run = tmp_path / "run"
    flags = quick("wikitext", "--attn", "tra", "--out", run, "--steps", 60, "--eval-every", 20, "--lr", 0.01, "--examples", 200, "--window", 16)
    assert call(train_script, *flags) == 0
    rows = [row for row in log(run) if "val_loss" in row]
    assert [row["step"] for row in rows] == [20, 40, 60] and rows[-1]["val_loss"] < rows[0]["val_loss"] < math.log(256)
    out = capsys.readouterr().out
    assert "val_loss" in out and "perplexity (bits per byte) by window, 199 tokens scored at each" in out
    assert call(eval_script, run, "--windows", "16,100", "--json") == 0
    row = json.loads(capsys.readouterr().out)[0]["rows"][0]
    assert list(row["results"]) == ["16", "100"] and row["by_position"][0][-1][1] == 100
    assert row["results"]["16"]["mean"] == json.loads((run / "eval.json").read_text())["results"]["16"]
    assert call(eval_script, run, "--windows", "16") == 0
    bits = math.log2(row["results"]["16"]["mean"])
    assert f"({bits:.2f})" in capsys.readouterr().out


def test_a_prompt_is_continued_also_past_the_window_and_by_the_seed(tmp_path, capsys):
    run = tmp_path / "run"
    assert call(train_script, *quick("wikitext", "--attn", "tra", "--out", run)) == 0
    capsys.readouterr()
    texts = []
    for flags in ([], [], ["--seed", 1], ["--temperature", 0], ["--top-k", 1]):
        assert call(eval_script, run, "--prompt", "naïve cat " * 5, "--tokens", 30, *flags) == 0
        texts.append(capsys.readouterr().out)
        assert texts[-1].startswith("naïve cat " * 5)
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4]


def test_a_run_does_not_go_on_with_another_text(tmp_path, capsys):
    (tmp_path / "other.txt").write_text("something else . \n" * 300)
    data_script.prepare(tmp_path / "other.txt", tmp_path / "other", "byte", 1)
    shutil.copytree(SMALL["wikitext"]["data"], tmp_path / "data")
    flags = [*quick("wikitext", "--attn", "tra", "--out", tmp_path / "run"), "--data", tmp_path / "data"]
    assert call(train_script, *flags) == 0
    shutil.rmtree(tmp_path / "data")
    os.rename(tmp_path / "other", tmp_path / "data")
    capsys.readouterr()
    assert call(train_script, *flags, "--resume") == 2
    assert "was trained on" in capsys.readouterr().err


def test_wikitext_with_wrong_flags_or_files_gets_one_line(tmp_path, capsys, prepared):
    run = tmp_path / "run"
    assert call(train_script, *quick("wikitext", "--attn", "tra", "--out", run)) == 0
    assert call(train_script, *quick("copy", "--attn", "tra", "--out", tmp_path / "copy")) == 0
    capsys.readouterr()
    for script, argv, word in [
            (train_script, quick("wikitext", "--attn", "tra", "--out", tmp_path / "no", "--data", tmp_path / "nowhere"), "nowhere"),
            (train_script, quick("wikitext", "--attn", "tra", "--out", tmp_path / "no", "--window", 500), "too few"),
            (train_script, quick("wikitext", "--attn", "tra", "--out", tmp_path / "no", "--length", 5), "--length"),
            (train_script, quick("copy", "--attn", "tra", "--out", tmp_path / "no", "--window", 5), "--window"),
            (eval_script, [run, "--windows", "16,0"], "0"), (eval_script, [run, "--windows", "x"], "x"),
            (eval_script, [run, "--prompt", ""], "empty"), (eval_script, [run, "--mistakes", 1], "--mistakes"),
            (eval_script, [tmp_path / "copy", "--prompt", "a"], "--prompt"), (eval_script, [tmp_path / "copy", "--windows", "4"], "--windows"),
            (eval_script, [run, "--windows", "4", "--data", tmp_path / "nowhere"], "nowhere")]:
        assert call(script, *argv) == 2, argv
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and word in error, error
        assert not (tmp_path / "no").exists()


# The README

def readme():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        return file.read()


def test_every_command_of_the_readme_runs(tmp_path):
    """In a process of its own, one after the other, made small; so does what follows a command, such as eval.py on its run."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].split("&&")[-1].strip() for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("python ")]
    assert {words[0] for words in commands} >= {"model.py", "tasks.py", "data.py", "train.py", "eval.py"} and len(commands) > 12
    small = ["--steps", "2", "--log-every", "1", "--examples", "2", "--batch", "2", "--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--device", "cpu"]
    (tmp_path / "wiki").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "wiki" / f"wiki.{name}.tokens").write_text(f"a small {name} text . \n" * 100)
    if importlib.util.find_spec("matplotlib") is None:
        commands = [words for words in commands if not any(word.endswith(".png") for word in words)]
    for words in commands:
        if words[0] == "train.py":
            words[1:] = [w for w in words[1:] if w != "--compile"] + small
            words += ["--window", "4", "--data", "data/wikitext-103-byte"] if "wikitext" in words else ["--length", "4"]
            words += [] if "--resume" in words else ["--overwrite"]
        if words[0] == "data.py" and "--from" not in words:             # what would be fetched
            words[1:] = ["--tokenizer", "byte", "--from", "wiki"]
        if words[0] == "eval.py":
            words += ["--device", "cpu"] + (["--window", "8"] + ["--tokens", "3", "--batch", "1"] * ("out/" not in "".join(words))) * ("--bench" in words)
    driver = """
import glob, json, runpy, sys
folder, commands = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, folder)
for words in commands:
    sys.argv = [words[0]] + [path for word in words[1:] for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    print("$", *sys.argv, flush=True)
    runpy.run_path(folder + "/" + words[0], run_name="__main__")
print("all done")
"""
    result = subprocess.run([sys.executable, "-c", driver, HERE, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.endswith("all done\n"), result.stdout[-2000:] + result.stderr


def test_the_loop_of_the_readme_runs_each_experiment_once(tmp_path):
    """With a stand-in for python, which fails for one experiment: the loop stops there, skips what is done, and resumes what was begun."""
    loop = re.search(r"^for seed.*?^done; done; done$", readme(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >> calls\ncase "$*" in *"copy --attn fox --seed 1"*) [ -f ready ];; esac\n')
    (tmp_path / "python").chmod(0o755)
    done, begun = (tmp_path / "out" / name for name in ("flipflop-tra-no-sparse-no-contextual-s0", "induct-cope-s2"))
    for run, file in ((done, "eval.json"), (begun, "ckpt.pt")):
        run.mkdir(parents=True)
        (run / file).write_text("")
    go = lambda: subprocess.run(["bash", "-c", loop], cwd=tmp_path, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    go()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1] == "train.py --scale laptop --task copy --attn fox --seed 1" and "train.py --scale laptop --task copy --attn tra --no-sparse --seed 0" in calls
    assert not any("flipflop --attn tra --no-sparse --no-contextual --seed 0" in call for call in calls)
    (tmp_path / "ready").write_text("")
    (tmp_path / "calls").unlink()
    go()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 4 * 4 * 9 - 1 and "train.py --scale laptop --task induct --attn cope --seed 2 --resume" in calls


def test_the_two_commands_of_a_fresh_machine_are_in_the_readme():
    for line in ("pip install -r requirements.txt && python train.py --attn tra --task copy", "pip install -r requirements.txt && pytest"):
        assert line in readme().splitlines()


def test_the_code_the_readme_quotes_is_the_code():
    quoted = re.search(r"```python\n(    T, S = .*?)```", readme(), re.DOTALL).group(1)
    with open(os.path.join(HERE, "model.py"), encoding="utf-8") as file:
        assert quoted in file.read()


def test_the_readmes_own_attention_works(monkeypatch):
    """The recipe, word for word, in the place it names; then the same checks that every attention gets."""
    code = re.search(r"```python\n(def near_attention.*?)```", readme(), re.DOTALL).group(1)
    monkeypatch.setitem(ATTENTIONS, "near", None)
    exec(code, vars(model_script))
    test_the_future_changes_nothing("near")
    test_cached_logits_equal_full_logits("near", [9, 1, 1, 6])
    test_any_length("near", 300)
    test_bfloat16_autocast_trains_as_float32_does("near")
    test_generate("near")
    eye = torch.eye(40).view(1, 1, 40, 40)
    weights = model_script.near_attention(torch.randn(1, 1, 40, 4), torch.randn(1, 1, 40, 4), eye)[0, 0]
    assert ((weights > 0).sum(1) == torch.arange(1, 41).clamp(max=16)).all()


def test_the_readmes_own_task_works(tmp_path):
    """The recipe, word for word, in the place it names; then the scripts as a user would run them."""
    code = re.search(r"```python\n(@dataclass.*?)```", readme(), re.DOTALL).group(1)
    for script in ("model", "tasks", "data", "train", "eval"):
        shutil.copy(os.path.join(HERE, script + ".py"), tmp_path)
    text = (tmp_path / "tasks.py").read_text(encoding="utf-8")
    assert text.count("\nSIZES = ") == 1
    (tmp_path / "tasks.py").write_text(text.replace("\nSIZES = ", f"\n\n\n{code}\n\nSIZES = "), encoding="utf-8")
    run = lambda *words: subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    for line in run("tasks.py", "--task", "sort", "--split", "2x", "--plain").splitlines():
        _, x, y = re.split("<bos> | <sep> | <eos>", line)[:3]
        assert sorted(x.split(), key=tasks_script.SYMBOLS.index) == y.split() and len(y.split()) == 32
    out = run("train.py", *quick("sort"), "--attn", "tra", "--length", "4", "--out", "run")
    assert "sort, laptop scale (length 4, symbols 48)" in out and "| 1.5x |" in out


# Speed and gates

def test_peak_memory_counts_what_is_held_at_the_same_time():
    held = torch.zeros(1000)

    def one_after_the_other():
        for _ in range(3):
            torch.zeros(250, 1000)

    def both():
        return torch.zeros(250, 1000), torch.zeros(250, 1000), held + 1

    for run, bytes_held in ((one_after_the_other, 1_000_000), (both, 2_004_000)):
        assert bytes_held <= eval_script.peak_memory(run, "cpu") < bytes_held + 1000        # the allocator rounds up


def test_race_takes_turns_and_keeps_the_best(monkeypatch):
    order, times = [], iter([3.0, 9.0, 1.0, 4.0])
    monkeypatch.setattr(eval_script, "seconds", lambda run, device: (run(), next(times))[1])
    rows = eval_script.race("x", 10, 2, {"rope": lambda: order.append("rope"), "tra": lambda: order.append("tra")}, "cpu", rounds=2, memory=False)
    assert order == ["rope", "tra"] * 2
    assert [(row["name"], row["seconds"], row["ratio"], row["tokens_per_second"]) for row in rows] == [("rope", 1.0, 1.0, 20.0), ("tra", 4.0, 4.0, 5.0)]


def test_seconds_and_memory_on_cuda_come_from_events_and_the_allocator(monkeypatch):
    """No GPU here: a stand-in for torch.cuda that notes what is asked of it."""
    asked = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        record = lambda self: asked.append("record")
        synchronize = lambda self: asked.append("synchronize")
        elapsed_time = lambda self, end: 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert eval_script.seconds(lambda: asked.append("run"), "cuda:0") == 0.25
    assert asked == ["record", "run", "record", "synchronize"]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    assert eval_script.peak_memory(lambda: asked.append("run"), "cuda") == 600 and asked[-2:] == ["reset", "run"]


def test_bench_measures_every_attention_and_prints_markdown_or_json(capsys):
    flags = ["--bench", "--window", "8", "--batch", "1", "--tokens", "3", "--device", "cpu"]
    assert call(eval_script, *flags, "--attn", "tra", "rope") == 0
    printed = capsys.readouterr().out
    assert printed.count("|") == 4 * 9 + 6 * 7 and "perplexity" not in printed
    assert call(eval_script, *flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    steps = [row for row in found["rows"] if row["what"] == "training step"]
    assert [row["name"] for row in steps][0] == "rope" and {row["name"] for row in steps} == set(ATTENTIONS)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 and row["tokens_per_second"] == 8 / row["seconds"] for row in steps)
    assert {row["what"] for row in found["rows"]} == {"training step", "generation"} and steps[0]["ratio"] == 1
    alone = [row for backward in (False, True) for row in eval_script.bench_attention(256, 1, backward, "cpu")]
    assert [row["name"] for row in alone] == ["sdpa", "tra", "tra, gates at 0", "tra_plain"] * 2 and alone[1]["skipped"] > 0 and alone[5]["skipped"] > 0
    assert alone[4]["peak_bytes"] < alone[5]["peak_bytes"]


def test_bench_can_be_drawn():
    pytest.importorskip("matplotlib")
    rows = [{"what": "training step", "name": name, "window": window, "seconds": factor * window / 1e3}
            for name, factor in (("rope", 1), ("tra", 2)) for window in (8, 16)] + [{"what": "generation", "name": "tra, cache", "window": 3, "seconds": 1.0}]
    ax, = eval_script.draw_bench(rows).axes
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {"rope": [[8, 0.008], [16, 0.016]], "tra": [[8, 0.016], [16, 0.032]]}


def test_bench_of_runs_is_their_perplexity_pass(tmp_path, capsys):
    for attn in ("tra", "rope"):
        assert call(train_script, "--attn", attn, *quick("wikitext"), "--out", tmp_path / attn) == 0
    assert call(train_script, "--attn", "tra", *quick("copy"), "--out", tmp_path / "copy") == 0
    capsys.readouterr()
    assert call(eval_script, tmp_path / "tra", tmp_path / "rope", "--bench", "--windows", "16,32", "--examples", "101", "--json", "--device", "cpu") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["window"]) for row in rows] == [("rope, seed 0", 16), ("tra, seed 0", 16), ("rope, seed 0", 32), ("tra, seed 0", 32)]
    call(eval_script, tmp_path / "tra", "--windows", "32", "--examples", "101", "--json", "--device", "cpu")
    measured = json.loads(capsys.readouterr().out)[0]["rows"][0]["results"]["32"]["mean"]
    assert rows[3]["perplexity"] == measured and rows[3]["skipped"] == 0 and rows[2]["skipped"] is None
    for runs in (("tra", "copy"), ("tra", "tra")):
        assert call(eval_script, *(tmp_path / run for run in runs), "--bench", "--device", "cpu") == 2
        assert "same text" in capsys.readouterr().err


def test_a_variant_of_tra_is_not_taken_for_tra(monkeypatch):
    """Which keys it keeps is its own affair: no gray cells, no table of gates, no ablation that it may ignore."""
    monkeypatch.setitem(ATTENTIONS, "variant", type("Variant", (model_script.TRA,), {}))
    model = tiny("variant")
    assert not eval_script.is_tra(model)
    assert all(n is None and keep[:, -1].all() for _, keep, n in eval_script.attention_weights(model, torch.randint(0, 11, (1, 9))))
    with pytest.raises(ValueError, match="parts of tra"):
        tiny("variant", sparse=False)


def test_gates_are_what_the_heads_do(tmp_path, capsys):
    """Forget gates and kept keys by plain loops; the share of skipped blocks where it is known."""
    model = tiny("tra", n_layer=2)
    idx = torch.randint(0, model.config.vocab_size, (2, 9))
    once, rows = torch.randint(0, model.config.vocab_size, (1, 300)), eval_script.gates(model, idx)
    by_weights = [keep.sum((1, 2)) / (300 * 301 / 2) for _, keep, _ in eval_script.attention_weights(model, once)]
    assert [row["kept"] for row in eval_script.gates(model, once)] == pytest.approx(torch.cat(by_weights).tolist(), rel=1e-3)
    x = model.embed(idx)
    for layer, block in enumerate(model.blocks):
        read = block.norm1(x)
        q, k, _ = block.attn.heads(read)
        forget = F.logsigmoid(F.linear(read, block.attn.forget.weight, block.attn.forget.bias))
        for head in range(model.config.n_head):
            kept = sum(dot(q[b, head, i], k[b, head, j]) > 0 for b in range(2) for i in range(9) for j in range(i + 1)) / (2 * 45)
            row = rows[layer * model.config.n_head + head]
            assert (row["layer"], row["head"]) == (layer + 1, head + 1)
            assert row["kept"] == pytest.approx(float(kept)) and row["forget"][1] == pytest.approx(forget[:, :, head].quantile(0.5).item())
        x = block(x)
    for bias, skipped in ((50.0, 0.0), (-1e5, 1 - (1 + 5 * 2) / 21)):           # forget nothing; or all but the nearest kept key
        for block in model.blocks:
            torch.nn.init.zeros_(block.attn.forget.weight)
            torch.nn.init.constant_(block.attn.forget.bias, bias)
        found = [row["skipped"] for row in eval_script.gates(model, torch.randint(0, model.config.vocab_size, (1, 6 * model_script.BLOCK)))]
        assert all(share == pytest.approx(0) if bias > 0 else share >= skipped - 1e-6 for share in found), found

    run = tmp_path / "run"
    assert call(train_script, "--attn", "tra", *quick("copy"), "--out", run) == 0
    assert call(train_script, "--attn", "tra", *quick("wikitext"), "--out", tmp_path / "text") == 0
    assert call(train_script, "--attn", "rope", *quick("copy"), "--out", tmp_path / "rope") == 0
    capsys.readouterr()
    assert call(eval_script, run, "--gates", "--device", "cpu") == 0 and call(eval_script, tmp_path / "text", "--gates", "--window", "40", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "100 examples of 1x" in printed and "the first 40 tokens" in printed and printed.count("|") == 2 * 4 * 8
    assert call(eval_script, tmp_path / "text", "--gates", "--windows", "8,40", "--split", "8") == 0 and "the first 8 tokens" in capsys.readouterr().out
    assert call(eval_script, run, "--gates", "--split", "2x", "--json", "--device", "cpu") == 0
    assert len(json.loads(capsys.readouterr().out)[0]["heads"]) == 2
    assert call(eval_script, tmp_path / "rope", "--gates", "--device", "cpu") == 2 and "--gates is for tra" in capsys.readouterr().err


# Crash safety: runs that are killed, files that cannot be trusted

# The tasks that are killed and resumed, as (task, flags): 120 steps with enough dropout that a wrong random state would show.
CRASH_CASES = [(task, ["--attn", "tra", "--steps", 120, "--log-every", 7, "--eval-every", 50, "--dropout", 0.2]) for task in ("copy", "flipflop", "wikitext")]
DATA_FILES = ("ckpt.pt", "log.jsonl", "eval.json")


def start(*argv, errors=os.devnull, prepare=lambda: None):
    """Train in a process of its own, forked so that torch is there at once; returns its id."""
    pid = os.fork()
    if pid == 0:
        try:
            sys.stdout, sys.stderr = open(os.devnull, "w"), open(errors, "w", buffering=1)
            prepare()
            os._exit(call(train_script, *argv))
        finally:
            os._exit(99)        # an exception, which no test expects
    return pid


def finish(pid):
    """Exit code of a process, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(module, name, count, after=False):
    """Make this process kill itself in the count-th call of a function, before or after it has done its work."""
    original, calls = getattr(module, name), []

    def function(*args, **kwargs):
        calls.append(name)
        if len(calls) == count and not after:
            if name == "save":                                          # torch.save, half done
                whole = io.BytesIO()
                original(args[0], whole)
                args[1].write(whole.getvalue()[:len(whole.getvalue()) // 2])
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, function)


def resumable(run):
    return ["--out", run] + ["--resume"] * (run / "ckpt.pt").exists()


def same_run(run, untouched):
    """Bitwise the same weights, optimizer and random state, the same lines in the log, the same eval.json, and nothing beside them."""
    assert {path.name for path in run.iterdir()} == set(DATA_FILES)
    a, b = (torch.load(folder / "ckpt.pt", weights_only=True) for folder in (run, untouched))
    assert same_weights(a["model"], b["model"]) and torch.equal(a["random"]["cpu"], b["random"]["cpu"])
    assert (a["step"], a["since_log"]) == (b["step"], b["since_log"])
    assert all(same_weights(a["optimizer"]["state"][i], b["optimizer"]["state"][i]) for i in b["optimizer"]["state"])
    rows = [[{key: row[key] for key in row if key != "tokens_per_second"} for row in log(folder)] for folder in (run, untouched)]
    assert rows[0] == rows[1]
    assert (run / "eval.json").read_bytes() == (untouched / "eval.json").read_bytes()


@pytest.fixture
def signals():
    """train.py listens to signals in a way of its own; afterwards pytest's way is back."""
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("task, flags", CRASH_CASES, ids=[task for task, _ in CRASH_CASES])
def test_killed_at_random_moments_and_resumed_a_run_ends_as_if_never_touched(tmp_path, capsys, signals, task, flags):
    rng, flags = random.Random(task), quick(task, *flags)
    assert call(train_script, *flags, "--out", tmp_path / "untouched") == 0
    run, kills = tmp_path / "run", 0
    while kills < 12:
        pid = start(*flags, *resumable(run), "--save-every", rng.choice((0, 0.01, 0.1)))
        time.sleep(rng.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        assert code in (0, -signal.SIGKILL)
        kills += 1
    assert call(train_script, *resumable(run), *([] if (run / "ckpt.pt").exists() else flags)) == 0
    same_run(run, tmp_path / "untouched")


# With a checkpoint after each of twelve steps, the first save is number 1, the last number 13; the replace after that is eval.json's.
MOMENTS = [(os, "makedirs", 1, True), (torch, "save", 1, False), (torch, "save", 9, False), (torch, "save", 13, False), (torch, "save", 8, True),
           (os, "fsync", 1, False), (os, "fsync", 12, True), (os, "fsync", 13, True), (os, "replace", 1, True), (os, "replace", 7, False),
           (os, "replace", 8, True), (os, "replace", 13, True), (train_script, "end_of_step", 1, False), (train_script, "evaluate", 1, False),
           (train_script, "evaluate", 2, True), (os, "replace", 14, False), (os, "replace", 14, True)]


def test_killed_at_every_kind_of_moment_and_resumed_a_run_ends_as_if_never_touched(tmp_path, capsys, signals):
    """Before the first checkpoint, with half a checkpoint written, between checkpoint and log, in the final test, ..."""
    flags = quick("copy", "--attn", "tra", "--steps", 12, "--log-every", 5, "--dropout", 0.2)
    assert call(train_script, *flags, "--out", tmp_path / "untouched") == 0
    for number, moment in enumerate(MOMENTS):
        run = tmp_path / str(number)
        pid = start(*flags, "--out", run, "--save-every", 0, prepare=lambda: die_at(*moment))
        assert finish(pid) == -signal.SIGKILL, moment
        assert call(train_script, *flags, *resumable(run)) == 0, moment
        same_run(run, tmp_path / "untouched")


def test_overwrite_that_is_killed_leaves_a_run_that_can_go_on(tmp_path, capsys, signals):
    old, new = quick("copy", "--attn", "rope"), quick("copy", "--attn", "tra")
    assert call(train_script, *new, "--out", tmp_path / "untouched") == 0
    for moment in ((torch, "save", 1, False), (os, "replace", 1, True), (train_script, "end_of_step", 1, True), (os, "remove", 1, True)):
        run = tmp_path / "run"
        assert call(train_script, *old, "--out", run, "--overwrite") == 0
        pid = start(*new, "--out", run, "--overwrite", prepare=lambda: die_at(*moment))
        assert finish(pid) == -signal.SIGKILL, moment
        if moment[1] == "save":                                         # the old run is still whole
            assert call(train_script, *old, "--out", run, "--resume") == 0 and len(log(run)) == 3
        else:
            assert call(train_script, *new, "--out", run, "--resume") == 0
            same_run(run, tmp_path / "untouched")


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_stopped_by_a_signal_and_resumed_as_it_says_a_run_ends_the_same(tmp_path, monkeypatch, capsys, signals, attn):
    flags = quick("copy", "--attn", attn, "--dropout", 0.3)
    assert call(train_script, *flags, "--out", tmp_path / "untouched") == 0
    learning_rate = train_script.learning_rate
    for number in (signal.SIGINT, signal.SIGTERM):
        run = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(train_script, "learning_rate", lambda step, args: (step == 2 and os.kill(os.getpid(), number), learning_rate(step, args))[1])
            assert call(train_script, *flags, "--out", run) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "stopped at step 3" in error
        assert [row["step"] for row in log(run)] == [2] and not (run / "eval.json").exists()
        assert torch.load(run / "ckpt.pt", weights_only=True)["step"] == 3
        assert call(train_script, *error.split("train.py")[1].split()) == 0
        same_run(run, tmp_path / "untouched")


def test_a_signal_in_the_final_test_and_a_second_one_at_any_time(tmp_path, monkeypatch, capsys, signals):
    flags, interrupt = quick("copy", "--attn", "tra"), lambda *args: os.kill(os.getpid(), signal.SIGINT)
    assert call(train_script, *flags, "--out", tmp_path / "untouched") == 0
    evaluate, learning_rate = train_script.evaluate, train_script.learning_rate
    monkeypatch.setattr(train_script, "evaluate", lambda *args: (interrupt(), evaluate(*args))[1])
    assert call(train_script, *flags, "--out", tmp_path / "tested") == 2
    assert "--resume" in capsys.readouterr().err and not (tmp_path / "tested" / "eval.json").exists()
    monkeypatch.setattr(train_script, "evaluate", evaluate)
    assert call(train_script, "--out", tmp_path / "tested", "--resume") == 0
    same_run(tmp_path / "tested", tmp_path / "untouched")

    monkeypatch.setattr(train_script, "learning_rate", lambda step, args: [interrupt(), interrupt()] if step == 2 else learning_rate(step, args))
    assert finish(start(*flags, "--out", tmp_path / "twice", errors=tmp_path / "errors")) == -signal.SIGINT
    assert (tmp_path / "errors").read_text() == ""
    monkeypatch.setattr(train_script, "learning_rate", learning_rate)
    assert call(train_script, "--out", tmp_path / "twice", "--resume") == 0
    same_run(tmp_path / "twice", tmp_path / "untouched")


@pytest.mark.parametrize("script, function", [(train_script, "seconds_per_step"), (eval_script, "load_checkpoint"), (tasks_script, "make_task")])
def test_an_interrupt_outside_of_training_is_one_line(tmp_path, monkeypatch, capsys, script, function):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
    argv = {train_script: quick("copy", "--attn", "tra", "--out", tmp_path / "run"), eval_script: [tmp_path], tasks_script: ["--task", "copy"]}[script]
    monkeypatch.setattr(script, function, interrupted)
    assert call(script, *argv) == 2
    assert capsys.readouterr().err == "error: interrupted\n" and not (tmp_path / "run").exists()


@pytest.mark.parametrize("run, short", [
    (lambda: torch.empty(2**50), True), (lambda: torch.empty(2**62, dtype=torch.int64), True), (lambda: np.empty(2**50), True),
    (lambda: torch.zeros(1).expand(3).add_(1), False)])
def test_a_lack_of_memory_is_one_line_and_another_error_is_not(capsys, run, short):
    """The last one is a mistake in code, although torch says "memory location"."""
    with pytest.raises(SystemExit if short else RuntimeError):
        tasks_script.script(run)()
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory: ") and error.count("\n") == 1 if short else error == ""


def test_a_command_is_killed_then_stopped_then_ends(tmp_path):
    """As a user would: a command, kill -9, --resume, Ctrl-C, the command that it names. On stderr nothing else, no warning of torch's either."""
    def lines():
        return (tmp_path / "run" / "log.jsonl").read_bytes().count(b"\n") if (tmp_path / "run" / "log.jsonl").exists() else 0

    for flags, number in (([], signal.SIGKILL), (["--resume"], signal.SIGINT)):
        words = [os.path.join(HERE, "train.py"), *map(str, quick("copy", "--attn", "tra", "--steps", 10**6, "--save-every", 0.01, "--out", "run")), *flags]
        process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        before = lines()
        while process.poll() is None and lines() < before + 5:
            time.sleep(0.05)
        process.send_signal(number)
        error = process.communicate()[1]
        assert (process.returncode, len(error.splitlines())) == ((-number, 0) if number == signal.SIGKILL else (2, 1)), error
    step = int(re.fullmatch(r"error: stopped at step (\d+); to go on: python train.py --resume --out run\n", error)[1])
    result = command(*error.split("python ")[1].split(), "--steps", step + 3, cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert [row["step"] for row in log(tmp_path / "run")] == sorted({*range(2, step + 4, 2), step + 3})


def test_a_folder_whose_name_cannot_be_shown(tmp_path, capsys, signals):
    assert call(train_script, *quick("copy", "--attn", "tra", "--out", f"{tmp_path}/\udcff")) == 0
    assert r"/\udcff" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["tasks.py", "--task", "copy", "--count", "100000"], ["model.py"]])
def test_a_closed_pipe_is_no_error_to_speak_of(words):
    process = subprocess.Popen([sys.executable, os.path.join(HERE, words[0]), *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 2


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CHANGED_FLAGS = [("--attn", "rope", "tra"), ("--task", "induct", "copy"), ("--length", 9, 6), ("--symbols", 7, 5), ("--pairs", 2, "without it"), ("--n-layer", 2, 1),
                 ("--n-embd", 32, 16), ("--lr", 0.5, 0.002), ("--batch", 8, 4), ("--seed", 1, 0), ("--dropout", 0.5, 0.01), ("--dtype", "bfloat16", "float32"),
                 ("--scale", "paper", "laptop"), ("--no-sparse", False, True)]


def test_resume_with_other_flags_names_the_flag_and_both_values(tmp_path, monkeypatch, capsys, signals):
    run = tmp_path / "run"
    monkeypatch.setitem(train_script.PRESETS["copy"]["laptop"], "lr", 0.002)
    assert call(train_script, *quick("copy", "--attn", "tra", "--out", run)) == 0
    before = files(run)
    capsys.readouterr()
    for flag, value, started in CHANGED_FLAGS:
        assert call(train_script, "--resume", "--out", run, flag, *([] if value is False else [value])) == 2
        error = capsys.readouterr().err
        assert error == f"error: {flag.replace('no-', '')} is {value}, but {run} was started {started if started == 'without it' else f'with {started}'}\n"
    monkeypatch.chdir(tmp_path)
    assert call(train_script, "--resume", *quick("copy", "--attn", "tra", "--out", "")) == 2       # no name is the default name
    assert os.path.join("out", "copy-tra-s0") + " holds no run" in capsys.readouterr().err
    for flags in (["--steps", 5], ["--overwrite"]):
        assert call(train_script, "--resume", "--out", run, *flags) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and flags[0] in error
    assert files(run) == before


def test_resume_finds_a_text_that_was_moved(tmp_path, capsys, prepared, signals):
    shutil.copytree(prepared, tmp_path / "here")
    assert call(train_script, *quick("wikitext"), "--attn", "tra", "--data", tmp_path / "here", "--out", tmp_path / "run") == 0
    (tmp_path / "here").rename(tmp_path / "there")
    resume = ["--resume", "--out", tmp_path / "run", "--steps", 9]
    assert call(train_script, *resume) == 2 and "does not exist" in capsys.readouterr().err
    assert call(train_script, *resume, "--data", tmp_path / "there") == 0
    assert log(tmp_path / "run")[-1]["step"] == 9                       # the last step is logged, though --log-every is 2
    (tmp_path / "text.txt").write_text("another text . " * 99)
    data_script.prepare(tmp_path / "text.txt", tmp_path / "other", "byte", 1)
    assert call(train_script, *resume, "--data", tmp_path / "other") == 2 and "was trained on" in capsys.readouterr().err


def test_resume_may_repeat_the_flags_raise_the_steps_and_go_on_after_the_end(tmp_path, monkeypatch, capsys, signals):
    run = tmp_path / "run"
    flags = ["--task", "copy", *QUICK, "--attn", "tra", "--out", run, "--dtype", "auto"]
    assert call(train_script, *flags) == 0
    before = files(run)
    sizes = TASKS["copy"].scales["laptop"]
    monkeypatch.setitem(TASKS["copy"].scales, "laptop", {**sizes, "length": 99})        # a preset of a later version
    assert call(train_script, *flags, "--resume") == 0 and call(train_script, "--resume", "--out", run) == 0
    assert {path: data for path, data in files(run).items() if path.name != "ckpt.pt"} == {p: d for p, d in before.items() if p.name != "ckpt.pt"}
    assert call(train_script, *flags[:-2], "--resume", "--steps", 11, "--log-every", 1, "--no-compile") == 0
    rows = log(run)
    assert [row["step"] for row in rows] == [2, 4, 6, 7, 8, 9, 10, 11]
    args = torch.load(run / "ckpt.pt", weights_only=True)["args"]
    assert args["steps"] == 11 and [row["lr"] for row in rows[3:]] == [train_script.learning_rate(step, args) for step in range(6, 11)]


def test_a_folder_without_a_checkpoint_names_a_way_forward(tmp_path, capsys, signals):
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text('{"step": 2}\n')
    flags = quick("copy", "--attn", "tra", "--out", run)
    assert call(train_script, *flags, "--resume") == 2 and "no run" in capsys.readouterr().err
    assert call(train_script, *flags) == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error and "--resume" not in error and (run / "log.jsonl").read_text() == '{"step": 2}\n'
    assert call(train_script, *flags, "--overwrite") == 0 and len(log(run)) == 3


def test_two_processes_do_not_train_into_one_folder(tmp_path, capsys, signals):
    run, flags = tmp_path / "run", quick("copy", "--attn", "tra")
    pid = start(*flags, "--out", run, "--steps", 10**6)
    try:
        while not (run / "log.jsonl").exists() or not (run / "log.jsonl").stat().st_size:
            time.sleep(0.01)
        for flag in ("--resume", "--overwrite"):
            assert call(train_script, *flags, "--out", run, flag) == 2
            assert "another process" in capsys.readouterr().err
    finally:
        os.kill(pid, signal.SIGKILL)
        finish(pid)
    assert call(train_script, *flags, "--out", run, "--overwrite") == 0


@pytest.mark.parametrize("room, flags", [(1000, []), (100_000, ["--n-embd", 128]), (25_000, ["--save-every", 0]), (25_000, ["--steps", 240, "--log-every", 1])],
                         ids=["first checkpoint", "large tensor", "later checkpoint", "log"])
def test_a_full_disk_leaves_the_last_checkpoint_and_one_line(tmp_path, capsys, signals, room, flags):
    """A limit on the size of files stands in for a full disk: the checkpoint at step 0 is smaller than 25,000 bytes, the later ones are larger."""
    run = tmp_path / "run"
    flags = quick("copy", "--attn", "tra", *flags)
    assert call(train_script, *flags, "--out", tmp_path / "untouched") == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    assert finish(start(*flags, "--out", run, errors=tmp_path / "errors", prepare=limit)) == 2
    error = (tmp_path / "errors").read_text()
    assert error == f"error: could not write to {run}: File too large; what was saved there before is untouched\n"
    assert {path.name for path in run.iterdir()} == ({"log.jsonl"} if room != 25_000 else {"ckpt.pt", "log.jsonl"})
    assert call(train_script, *flags, *resumable(run)) == 0
    same_run(run, tmp_path / "untouched")


def test_a_full_disk_leaves_a_finished_run_as_it_is(tmp_path, capsys, signals):
    run = tmp_path / "run"
    assert call(train_script, *quick("copy", "--attn", "tra", "--out", run)) == 0
    before = files(run)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    for flags in (["--resume"], ["--resume", "--steps", 9], ["--attn", "tra", "--task", "copy", "--overwrite"]):
        assert finish(start("--out", run, *flags, errors=tmp_path / "errors", prepare=limit)) == 2
        assert (tmp_path / "errors").read_text().count("\n") == 1 and files(run) == before


def test_numbers_that_are_not_finite_stop_the_run_and_are_never_saved(tmp_path, monkeypatch, capsys, signals):
    flags = quick("copy", "--attn", "tra", "--out", tmp_path / "run", "--save-every", 0)
    wild = ["--lr", 100, "--weight-decay", 100, "--grad-clip", 0, "--steps", 60, "--warmup", 0]
    assert call(train_script, *flags, *wild) == 2
    error = capsys.readouterr().err
    step = int(re.search(r"at step (\d+), learning rate [\d.]+e[+-]\d+: stopped", error)[1])
    assert len(error.splitlines()) == 1 and torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)["step"] == step - 1
    assert call(eval_script, tmp_path / "run") == 0 and f"at step {step - 1} of 60" in capsys.readouterr().err  # finite weights, however bad

    def to_nan(optimizer, *args):
        optimizer.param_groups[0]["params"][0].data[0, 0] = math.nan
    original, calls = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (calls.append(0), to_nan(self) if len(calls) == 6 else original(self, *args))[1])
    assert call(train_script, *flags, "--overwrite") == 2               # in the last update, which no loss comes after
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "not finite after step 6" in error
    assert torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)["step"] == 5 and not (tmp_path / "run" / "eval.json").exists()


class Evil:
    """A pickle of it would, when it is read, make a folder."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def put(*keys, value):
    """A change to a checkpoint: checkpoint[key][key]... = value, or of value(old)."""
    def change(ckpt):
        for key in keys[:-1]:
            ckpt = ckpt[key]
        ckpt[keys[-1]] = value(ckpt.get(keys[-1])) if callable(value) else value
    return change


def drop(*keys):
    def change(ckpt):
        for key in keys[:-1]:
            ckpt = ckpt[key]
        del ckpt[keys[-1]]
    return change


HEAD = ("model", "head.weight")
BAD_FOR_ALL = {
    "newer format": put("format", value=2), "format of a wrong type": put("format", value=torch.zeros(3)), "no format": drop("format"),
    "no model": drop("model"), "no args": drop("args"), "no config": drop("config"), "no step": drop("step"), "step of a wrong type": put("step", value="4"),
    "missing tensor": drop(*HEAD), "extra tensor": put("model", "extra", value=torch.zeros(1)), "list for model": put("model", value=[1]),
    "wrong shape": put(*HEAD, value=torch.zeros(3, 3)), "transposed": put(*HEAD, value=lambda t: t.t().contiguous().t()),
    "wrong type": put(*HEAD, value=lambda t: t.double()), "complex": put(*HEAD, value=lambda t: t * 1j), "whole numbers": put(*HEAD, value=lambda t: t.int()),
    "sparse": put(*HEAD, value=lambda t: t.to_sparse()), "no memory behind it": put(*HEAD, value=lambda t: t.to("meta")),
    "one number for all": put(*HEAD, value=lambda t: t[:1, :1].expand(t.shape)), "not a tensor": put(*HEAD, value="weights"),
    "NaN": put(*HEAD, value=lambda t: t * math.nan), "infinite": put(*HEAD, value=lambda t: t + math.inf),
    "unknown attention": put("config", "attn", value="none"), "other attention": put("config", "attn", value="rope"),
    "unknown setting": put("config", "depth", value=3), "number as text": put("config", "n_layer", value="1"), "huge": put("config", "n_embd", value=10**30),
    "many layers": put("config", "n_layer", value=10**9), "many tokens": put("config", "vocab_size", value=10**9), "not a choice": put("config", "sparse", value=[]),
    "dropout as text": put("config", "dropout", value="0.1"), "unknown task": put("args", "task", value="none"), "task of a wrong type": put("args", "task", value=[1]),
    "no task": drop("args", "task"), "unknown scale": put("args", "scale", value="tiny"), "other length": put("args", "length", value="four"),
    "endless length": put("args", "length", value=10**12), "negative length": put("args", "length", value=-1), "other vocabulary": put("args", "symbols", value=9),
    "size of another task": put("args", "pairs", value=3), "flags against config": put("args", "attn", value="fox"), "seed as text": put("args", "seed", value="zero"),
    "steps as text": put("args", "steps", value="many"),
}
BAD_FOR_RESUME = {
    "no optimizer": drop("optimizer"), "empty optimizer": put("optimizer", value={}), "optimizer of a wrong type": put("optimizer", value=3),
    "no moments": put("optimizer", "state", value={}), "moments of a wrong type": put("optimizer", "state", 0, value=[1, 2]),
    "moment of a wrong shape": put("optimizer", "state", 0, "exp_avg", value=torch.zeros(2)), "missing moment": drop("optimizer", "state", 0, "exp_avg_sq"),
    "moment of a wrong type": put("optimizer", "state", 0, "exp_avg", value="x"), "other step": put("optimizer", "state", 0, "step", value=torch.tensor(-1.0)),
    "no random state": drop("random"), "random state of a wrong type": put("random", "cpu", value="dice"), "short random state": put("random", "cpu", value=torch.zeros(3)),
    "bad random state": put("random", "cpu", value=lambda t: torch.full_like(t, 255)), "no losses": drop("since_log"), "losses as text": put("since_log", value=["x"]),
    "loss that is not finite": put("since_log", value=[math.nan]), "losses of a wrong type": put("since_log", value=torch.UntypedStorage(8)), "negative step": put("step", value=-1),
    "later step": put("step", value=10**9), "other step than the optimizer's": put("step", value=5), "negative batch": put("args", "batch", value=-1),
    "batch of a wrong type": put("args", "batch", value=[1]), "flag that is no switch": put("args", "batch", value=True), "lr as text": put("args", "lr", value="fast"),
    "infinite lr": put("args", "lr", value=math.inf), "log every 0": put("args", "log_every", value=0), "other width": put("args", "n_embd", value=32),
    "dtype of a wrong type": put("args", "dtype", value=torch.float32), "a tensor as a flag": put("args", "lr", value=torch.zeros(5, 5)),
    "unknown device": put("args", "device", value="toaster"), "settings that do not fit": put("args", "n_head", value=3),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of four steps, to be copied and spoilt."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert call(train_script, *quick("copy", "--attn", "tra", "--steps", 4, "--log-every", 1, "--out", run)) == 0
    return run


def silently(capsys, script, *argv):
    """Exit code and stderr of a script that may not warn."""
    capsys.readouterr()
    sys.stderr.reconfigure(errors="backslashreplace")                   # like the real one
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)                # as in a process that a user starts
        code = call(script, *argv)
    assert not warned, [str(w.message) for w in warned]
    error = re.sub(r"^note: .*\n", "", capsys.readouterr().err, flags=re.MULTILINE)
    assert code in (0, 2) and error.count("\n") == (code == 2), (code, error, argv)
    return code, error


@pytest.mark.parametrize("name", [*BAD_FOR_ALL, *BAD_FOR_RESUME])
def test_checkpoints_that_do_not_hold_together_are_refused(tmp_path, capsys, signals, trained, name):
    run = shutil.copytree(trained, tmp_path / "run")
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    ({**BAD_FOR_ALL, **BAD_FOR_RESUME}[name])(ckpt)
    torch.save(ckpt, run / "ckpt.pt")
    before = files(run)
    assert silently(capsys, train_script, "--resume", "--out", run)[0] == 2
    assert silently(capsys, eval_script, run, "--examples", 1)[0] == (2 if name in BAD_FOR_ALL else 0)
    assert files(run) == before


def test_a_run_is_read_that_is_older_than_a_size_of_another_task(tmp_path, capsys, trained):
    run = shutil.copytree(trained, tmp_path / "run")
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    drop("args", "pairs")(ckpt)
    torch.save(ckpt, run / "ckpt.pt")
    assert silently(capsys, eval_script, run, "--mistakes", 1)[0] == 0


@pytest.mark.parametrize("window", [0, -5, None, "6"])
def test_a_window_that_is_none_is_refused(tmp_path, capsys, window):
    run = tmp_path / "run"
    assert call(train_script, *quick("wikitext", "--attn", "tra", "--out", run)) == 0
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    put("args", "window", value=window)(ckpt)
    torch.save(ckpt, run / "ckpt.pt")
    code, error = silently(capsys, eval_script, run, "--examples", 20)
    assert code == 2 and "window" in error


def test_nothing_in_a_checkpoint_is_ever_run(tmp_path, capsys, signals, trained):
    run, trap = shutil.copytree(trained, tmp_path / "run"), tmp_path / "trap"
    whole = torch.load(run / "ckpt.pt", weights_only=True)
    for spoil in (lambda file: torch.save({**whole, "extra": Evil(trap)}, file), lambda file: torch.save(Evil(trap), file), lambda file: pickle.dump(Evil(trap), file),
                  lambda file: torch.save({**whole, "model": Evil(trap)}, file, _use_new_zipfile_serialization=False)):
        with open(run / "ckpt.pt", "wb") as file:
            spoil(file)
        before = files(run)
        for script, argv in ((train_script, ["--resume", "--out", run]), (eval_script, [run, "--examples", 1]), (eval_script, [run, "--mistakes", 1])):
            assert silently(capsys, script, *argv)[0] == 2
        assert files(run) == before and not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()                                                # the trap does work


BAD_VALUES = ["x", "", [], {}, None, True, -1, 10**400, 1e308, -0.5, math.nan, math.inf, [[[]]], {"a": {"b": 1}}, "a\nb", "\ud800", "\x1b[2J", ["x"], 3.5]


def test_records_that_do_not_hold_together_are_refused_or_shown(tmp_path, capsys, trained):
    run = shutil.copytree(trained, tmp_path / "run")
    record = json.loads((run / "eval.json").read_text())
    spoilt = [{k: v for k, v in record.items() if k != key} for key in record]
    for value in BAD_VALUES:
        spoilt += [value] + [{**record, key: value} for key in record]
        spoilt += [{**record, "results": {**record["results"], "1x": value}}, {**record, "sizes": {"length": value}}]
        spoilt += [{**record, "results": {value: 1.0}}, {**record, "sizes": {value: 1}}] if isinstance(value, str) else []
    texts = [json.dumps(value) for value in spoilt] + ["", "{", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "\x00", json.dumps(record)[:-9], "9" * 10_000]
    refused = 0
    for text in texts:
        (run / "eval.json").write_text(text)
        for flags in ([], ["--json"]):
            code, error = silently(capsys, eval_script, run, *flags)
            assert code == 0 or "writes it anew" in error
            refused += code == 2
        assert (run / "eval.json").read_text() == text
    assert refused > len(texts)
    assert silently(capsys, eval_script, run, "--examples", 2)[0] == 0


def test_a_log_of_garbage_does_not_stop_a_run(tmp_path, capsys, signals, trained):
    """What is whole stays, what the checkpoint does not know of goes."""
    line = lambda step: b'{"step": %d, "loss": 1.0}\n' % step
    for number, (text, kept) in enumerate([
            (line(2) + line(4) + b'{"step": 5, "lo', line(2) + line(4)), (line(2) + b"\xff\x00garbage\n" + line(4) + line(5), line(2) + b"\xff\x00garbage\n" + line(4)),
            (b"[" * 10**6, b""), (b'{"step": "x"}\n{"step": NaN}\n[]\n7\n' + line(9), b""), (line(2) + b'{"step": 4}', line(2)), (b"\x00" * 100, b""), (b"", b"")]):
        run = shutil.copytree(trained, tmp_path / str(number))
        (run / "log.jsonl").write_bytes(text)
        assert silently(capsys, train_script, "--resume", "--out", run, "--steps", 5)[0] == 0
        lines = (run / "log.jsonl").read_bytes()
        assert lines.startswith(kept) and [json.loads(line)["step"] for line in lines[len(kept):].splitlines()] == [5]


def mutate(rng, data):
    """Bytes flipped, overwritten, cut off, cut out, doubled or put in."""
    data, at = bytearray(data), rng.randrange(max(1, len(data)))
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at:at + rng.randrange(1, 40)] = rng.randbytes(rng.randrange(1, 40))
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at:at + rng.randrange(1, 200)]
    elif kind == 4:
        data[at:at] = data[at:at + rng.randrange(1, 200)]
    else:
        data[at:at] = rng.choice((b"\x00", b"\n", b'"', b"{}", b"1e999", b"[" * 2000, b"-", b"\xff\xfe", b"\\ud800"))
    return bytes(data)


def mutate_inside(rng, data):
    """A checkpoint is a zip: mutate one of its members, mostly the pickle, and pack it again, so that it is read that far."""
    old, new = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    chosen = rng.choice([name for name in old.namelist() if name.endswith(".pkl") or rng.random() < 0.1])
    with zipfile.ZipFile(new, "w") as file:
        for name in old.namelist():
            file.writestr(name, mutate(rng, old.read(name)) if name == chosen else old.read(name))
    return new.getvalue()


WORDS = ["", "x", "-1", "0", "1", "2", "3", "0.5", "1e-3", "nan", "inf", "-inf", "1e999", "4294967296", "9" * 5000, "100001", "ü", "a\nb", "\udcff", "%s", "{}", "-", "--",
         "auto", "laptop", "copy", "induct", "flipflop", "tra", "cope", "float32", "bfloat16", "cpu", "cpu:1", "cuda", "cuda:9", "meta", "mps", "xpu", "1x", "sparse", "run", "new",
         "../run", "run/ckpt.pt", "/dev/null", "."]


def random_command(rng, flags):
    """A script's flags with random values, most of which make no sense."""
    argv = []
    for _ in range(rng.randrange(6)):
        argv.append(rng.choice(flags))
        argv += [rng.choice(WORDS)] * (rng.random() < 0.8)
    return argv


MUTATIONS = int(os.environ.get("MUTATIONS", 600))


def test_mutated_files_and_command_lines_never_lose_anything(tmp_path, monkeypatch, capsys, signals, trained, prepared):
    """MUTATIONS=20000 pytest -k mutated makes more of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)                 # the disk is not what is tested
    flags = {script: [word for word in re.findall(r"--[a-z0-9-]+", help_text(script, capsys)) if word not in ("--help", "--compile", "--no-compile", "--steps")]
             for script in (train_script, eval_script, tasks_script, data_script)}
    monkeypatch.setattr(data_script, "MIRRORS", [])                     # nothing is fetched
    monkeypatch.setattr(data_script.tiktoken, "get_encoding", lambda name: 1 / 0)
    for name in ("step", "attention", "generation", "text"):            # and nothing timed for minutes
        monkeypatch.setattr(eval_script, f"bench_{name}", lambda *args: [])
    rng, codes, whole = random.Random(5), [], {name: (trained / name).read_bytes() for name in DATA_FILES}
    for number in range(MUTATIONS):
        for path in tmp_path.iterdir():                                 # a command may have written files beside the folders
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run, text = shutil.copytree(trained, tmp_path / "run"), shutil.copytree(prepared, tmp_path / "text")
        kind = rng.choice((*DATA_FILES, "command", "command", "text"))
        if kind == "command":
            script = rng.choice((train_script, train_script, eval_script, tasks_script, data_script))
            start = {train_script: rng.choice((["--resume", "--out", "run"], quick("copy", "--attn", "tra", "--steps", 2, "--examples", 1, "--out", rng.choice(("run", "new"))))),
                     eval_script: ["run", "--examples", "1"], tasks_script: ["--task", "copy"],
                     data_script: ["--from", "run/log.jsonl", "--tokenizer", "byte", "--out", rng.choice(("text", "new"))]}[script]
            argv = rng.choice((start, start, [])) + random_command(rng, flags[script])
        elif kind == "text":
            path = text / rng.choice(("meta.json", "train.bin", "val.bin", "test.bin"))
            path.write_bytes(mutate(rng, path.read_bytes()))
            script, argv = rng.choice([(train_script, quick("wikitext", "--attn", "tra", "--steps", 2, "--examples", 3, "--data", "text", "--out", "new")),
                                       (data_script, ["--from", "run/log.jsonl", "--tokenizer", "byte", "--out", "text"])])
        else:
            (run / kind).write_bytes((mutate_inside if kind == "ckpt.pt" and rng.random() < 0.5 else mutate)(rng, whole[kind]))
            script, argv = rng.choice([(train_script, ["--resume", "--out", "run", "--steps", "5", "--examples", "1"]),
                                       (eval_script, ["run", *rng.choice(([], ["--examples", "1"], ["--json"], ["--mistakes", "1"]))])])
        before = files(tmp_path)
        code, error = silently(capsys, script, *argv)
        codes.append(code)
        if script is data_script and code == 0:                         # what was there still is
            assert files(tmp_path).items() >= before.items()
        elif script is not train_script or code == 2 and "stopped" not in error:
            assert files(tmp_path) == before, (number, kind, argv, error)
        elif (run / "ckpt.pt").exists():                                # training went on, perhaps to a loss that is not finite
            assert silently(capsys, eval_script, "run", "--examples", "1")[0] == 0
            assert not list(tmp_path.rglob("*.tmp")), (number, kind, argv, error)
    assert min(codes.count(0), codes.count(2)) > MUTATIONS // 10


def help_text(script, capsys):
    capsys.readouterr()
    assert call(script, "--help") == 0
    return capsys.readouterr().out


# Pictures

@pytest.mark.parametrize("attn", [*ATTENTIONS, "tra-no-sparse", "tra-no-contextual"])
def test_attention_weights_are_those_that_the_model_uses(attn):
    """Column j of the weights is what a value of 1 at key j, and 0 elsewhere, becomes; the sum with the values is the layer's output."""
    model = tiny(attn.split("-")[0], sparse=attn != "tra-no-sparse", contextual=attn != "tra-no-contextual")
    idx, inputs = torch.randint(0, 11, (1, 20)), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda layer, args, out: inputs.append((layer, args[0], out)))
    with torch.no_grad():
        model(idx)
        layers = eval_script.attention_weights(model, idx)
        assert len(layers) == 2
        for (A, keep, n), (layer, x, out) in zip(layers, inputs):
            q, k, v = layer.heads(x)                                    # (1, 2, 20, 8) each
            assert torch.allclose(layer.proj((A @ v[0]).transpose(0, 1).flatten(1)), out[0], atol=1e-5)
            assert A.shape == (2, 20, 20) and (A[~keep] == 0).all() and not keep.triu(1).any()
            if attn.split("-")[0] != "tra":
                assert n is None and keep.sum() == 2 * 210
                assert torch.allclose(A.sum(-1), torch.ones(2, 20)) or attn not in ("rope", "cope", "nope", "alibi", "fox")
                continue
            assert 0 < keep.sum() < 2 * 210 or attn == "tra-no-sparse" and keep.sum() == 2 * 210
            for h, i in ((h, i) for h in range(2) for i in range(20)):
                scores = [dot(q[0, h, i].double(), k[0, h, j].double()).item() for j in range(i + 1)]
                for j in range(i + 1):                                  # a norm changes no sign
                    assert keep[h, i, j] == (scores[j] > 0 or attn == "tra-no-sparse")
                    assert n[h, i, j] == (i - j + 1 if attn == "tra-no-contextual" else sum(s > 0 for s in scores[j:]))


@pytest.fixture(scope="module")
def pictured(tmp_path_factory, prepared):
    """Two seeds of TRA, an ablation and a RoPE on copy, and one run of each other task, trained for an instant."""
    folder = tmp_path_factory.mktemp("pictured")
    for task, attn, seed, *flags in (("copy", "tra", 0), ("copy", "tra", 1), ("copy", "rope", 0), ("copy", "tra", 2, "--no-sparse"), ("instruct", "fox", 0),
                                     ("flipflop", "cope", 0), ("wikitext", "tra", 0, "--eval-every", 2), ("wikitext", "tra", 1)):
        run = folder / f"{task}-{attn}-s{seed}"
        assert call(train_script, *quick(task, "--attn", attn, "--seed", seed, "--out", run, "--examples", 60, *flags)) == 0
    return folder


def drawn(monkeypatch, *argv):
    """The axes of the picture that a command draws, after a look at the file."""
    pytest.importorskip("matplotlib")
    figures, save = [], eval_script.save_figure
    monkeypatch.setattr(eval_script, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    assert call(eval_script, *argv) == 0
    path = Path(argv[argv.index(next(word for word in argv if str(word).endswith(".png")))])
    assert path.read_bytes().startswith(b"\x89PNG\r\n") and not os.path.exists(f"{path}.tmp")
    return figures[-1].axes


def lines_of(ax):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def test_a_plot_draws_the_numbers_of_the_table(tmp_path, monkeypatch, capsys, pictured):
    runs = sorted(pictured.glob("copy-*"))
    for run, value in zip(runs, (0.25, 0.5, 1.0, 0.75)):                # rope 0, tra 0 and 1, tra-no-sparse
        record = json.loads((run / "eval.json").read_text())
        record["results"] = {split: value / (i + 1) for i, split in enumerate(record["results"])}
        shutil.copytree(run, tmp_path / run.name)
        (tmp_path / run.name / "eval.json").write_text(json.dumps(record))
    assert call(eval_script, *sorted(tmp_path.glob("copy-*"))) == 0
    table = capsys.readouterr().out
    axes = drawn(monkeypatch, *sorted(tmp_path.glob("copy-*")), pictured / "instruct-fox-s0", pictured / "flipflop-cope-s0", "--plot", tmp_path / "a.png")
    out = capsys.readouterr().out
    assert out.startswith(table) and out.endswith(f"wrote {tmp_path / 'a.png'}\n")
    assert [ax.get_title() for ax in axes] == ["copy, laptop scale", *(f"instruct {name}, laptop scale" for name in TASKS["instruct"].instructions), "flipflop, laptop scale"]
    lines, length = lines_of(axes[0]), SMALL["copy"]["length"]
    assert list(lines) == ["tra, 2 seeds", "rope, 1 seed", "tra-no-sparse, 1 seed", "trained up to here"]
    x, y = lines["tra, 2 seeds"]
    assert x == [int(m * length) for m in (1, 1.5, 2, 3, 4, 6)] and y == pytest.approx([75 / i for i in range(1, 7)])
    assert lines["trained up to here"][0] == [length, length]
    band = axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(100) and band[:, 1].min() == pytest.approx(50 / 6)
    assert lines_of(axes[2])["fox, 1 seed"][0] == [m * SMALL["instruct"]["length"] for m in (1, 2, 4, 10)]
    results = json.loads((pictured / "flipflop-cope-s0" / "eval.json").read_text())["results"]
    assert [label.get_text() for label in axes[5].get_xticklabels()] == list(results)
    assert lines_of(axes[5])["cope, 1 seed"][1] == [100 * v for v in results.values()]


def test_a_plot_of_a_text_has_windows_and_with_windows_positions(tmp_path, monkeypatch, capsys, pictured):
    runs = sorted(pictured.glob("wikitext-*"))
    axes = drawn(monkeypatch, *runs, "--plot", tmp_path / "a.png")
    values = [json.loads((run / "eval.json").read_text())["results"] for run in runs]
    x, y = lines_of(axes[0])["tra, 2 seeds"]
    assert len(axes) == 1 and x == [6, 12, 24, 48, 96, 192] and y == pytest.approx([(values[0][str(w)] + values[1][str(w)]) / 2 for w in x])
    assert (axes[0].get_xscale(), axes[0].get_yscale(), lines_of(axes[0])["trained up to here"][0]) == ("log", "log", [6, 6])
    capsys.readouterr()
    assert call(eval_script, *runs, "--windows", "6,20", "--json") == 0
    places = json.loads(capsys.readouterr().out)[0]["rows"][0]["by_position"]
    axes = drawn(monkeypatch, *runs, "--windows", "6,20", "--plot", tmp_path / "b.png")
    x, y = lines_of(axes[1])["tra, 2 seeds"]
    assert len(axes) == 2 and x == [1, 2, 4, 8, 16, 20] and y == pytest.approx([(a[2] + b[2]) / 2 for a, b in zip(*places)])
    assert axes[1].get_xscale() == "log" and axes[1].get_yscale() == "linear"
    assert (axes[0].get_xlabel(), axes[1].get_ylabel()) == ("window, bytes", "loss, nats per byte")


def test_every_row_has_its_own_colour_or_marker(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "window", ATTENTIONS["rope"])
    names = [*ATTENTIONS, "tra-no-sparse", "tra-no-contextual", "tra-no-sparse-no-contextual", "someone-elses"]
    looks = {name: eval_script.style(name) for name in names}
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(names)
    assert looks["tra"]["linewidth"] > max(look["linewidth"] for name, look in looks.items() if name != "tra")


def test_curves_draw_the_log(tmp_path, monkeypatch, capsys, pictured):
    unfinished = shutil.copytree(pictured / "copy-tra-s1", tmp_path / "unfinished")
    (unfinished / "eval.json").unlink()
    with open(unfinished / "log.jsonl", "ab") as file:
        file.write(b'{"step": 8, "lo')
    monkeypatch.setattr(eval_script, "evaluate", lambda *args: 1 / 0)   # nothing is measured for it
    axes = drawn(monkeypatch, pictured / "copy-tra-s0", unfinished, pictured / "wikitext-tra-s0", "--curves", tmp_path / "a.png")
    assert [ax.get_title() for ax in axes] == ["copy, laptop scale", "wikitext, laptop scale"] and {ax.get_yscale() for ax in axes} == {"log"}
    for line, run in zip(axes[0].lines, (pictured / "copy-tra-s0", pictured / "copy-tra-s1")):
        assert [*zip(*line.get_data())] == [(row["step"], row["loss"]) for row in log(run)]
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["tra"]
    dashed = [line for line in axes[1].lines if line.get_linestyle() == "--"]
    assert [[*zip(*line.get_data())] for line in dashed] == [[(row["step"], row["val_loss"]) for row in log(pictured / "wikitext-tra-s0") if "val_loss" in row]]
    (unfinished / "log.jsonl").write_bytes(b'{"step": 1, "loss": 2.5}\n')
    assert drawn(monkeypatch, unfinished, "--curves", tmp_path / "c.png")[0].lines[0].get_marker() == "."      # one point is no line
    for text in (b"", b"garbage\n", b"[]\n", b'{"step": 1, "loss": "x"}\n', b'{"step": 1, "loss": NaN}\n', b'{"loss": 1}\n', b"[" * 10**5 + b"\n", None):
        (unfinished / "log.jsonl").write_bytes(text) if text is not None else (unfinished / "log.jsonl").unlink()
        code, error = silently(capsys, eval_script, unfinished, "--curves", tmp_path / "b.png")
        assert code == 2 and ("holds no log" if text is None else "log.jsonl") in error and not (tmp_path / "b.png").exists()


def test_a_picture_of_attention_shows_weights_and_removed_keys(tmp_path, monkeypatch, capsys, pictured):
    words = "<bos> a b <sep> a".split()
    task = make_task("copy", "laptop", **SMALL["copy"])
    for name in ("copy-tra-s0", "copy-rope-s0"):
        axes = drawn(monkeypatch, pictured / name, "--attention", tmp_path / f"{name}.png", "--example", " ".join(words), "--device", "cpu")
        model = eval_script.load_model("", eval_script.load_checkpoint(pictured / name))
        A, keep, n = eval_script.attention_weights(model, torch.tensor([[task.vocab.index(word) for word in words]]))[0]
        assert len(axes) == 3                                           # one layer, two heads, the colours
        for head, ax in enumerate(axes[:2]):
            kept, removed = (np.ma.getmaskarray(image.get_array()) for image in ax.images)
            assert (kept == ~keep[head].numpy()).all() and (removed == (keep[head] | ~causal_mask(5, 5, "cpu")).numpy()).all()
            assert np.allclose(np.ma.filled(ax.images[0].get_array(), 0), A[head])
            assert [label.get_text() for label in ax.get_xticklabels()] == words
            texts = [] if n is None else [str(int(v)) for i in range(5) for v in [keep[head, i].sum(), *n[head, i][keep[head, i]]]]
            assert [text.get_text() for text in ax.texts] == texts
    monkeypatch.setattr(eval_script, "LONG", 4)
    capsys.readouterr()
    code, error = silently(capsys, eval_script, pictured / "copy-tra-s0", "--attention", tmp_path / "b.png", "--example", " ".join(words))
    assert code == 2 and "5 tokens" in error and not (tmp_path / "b.png").exists()


def test_attention_as_text(tmp_path, monkeypatch, capsys, pictured):
    monkeypatch.setitem(sys.modules, "matplotlib", None)                # not needed
    runs = [pictured / name for name in ("copy-tra-s0", "copy-rope-s0")]
    assert call(eval_script, *runs, "--attention", "--example", "<bos> a <sep>", "--device", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "keeps" not in line and line] == ["copy with tra, seed 0", "copy with rope, seed 0"]
    marks = [dict(word.split(":") for word in line.split()[6:]) for line in lines if line.startswith("layer 1 head")]
    counts = [int(line.split()[5][:-1]) for line in lines if line.startswith("layer 1 head")]
    assert len(marks) == 4 and all(list(mark) == ["<bos>", "a", "<sep>"] for mark in marks) and counts[2:] == [3, 3]
    assert counts == [sum(sign != "-" for sign in mark.values()) for mark in marks]
    model = eval_script.load_model("", eval_script.load_checkpoint(runs[0]))
    A, keep, _ = eval_script.attention_weights(model, torch.tensor([[0, 3, 1]]))[0]
    assert [*marks[0].values()] == ["▁▂▃▄▅▆▇█"[int(w * 7)] if k else "-" for w, k in zip(A[0, -1].tolist(), keep[0, -1])]
    for flags, words in ((["--split", "2x"], 2 * SMALL["copy"]["length"] + 2 + 2 * SMALL["copy"]["length"]), ([], 2 * SMALL["copy"]["length"] + 2)):
        assert call(eval_script, runs[0], "--attention", *flags) == 0
        assert f"last of {words} tokens" in capsys.readouterr().out
    assert call(eval_script, pictured / "wikitext-tra-s0", "--attention", "--example", "a $b\nï") == 0
    assert [word.split(":")[0] for word in capsys.readouterr().out.splitlines()[1].split()[6:]] == ["a", "␣", "$", "b", "\\n", "\\xc3", "\\xaf"]
    assert call(eval_script, pictured / "wikitext-tra-s0", "--attention") == 0
    assert f"last of {eval_script.SHORT} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("terminal, encoding, marks", [(True, "utf-8", "▄█"), (False, "utf-8", ""), (True, "ascii", "")])
def test_cells_have_bars_on_a_terminal_only(monkeypatch, terminal, encoding, marks):
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", screen)
    record = {"task": "copy", "seed": 0, "scale": "laptop", "metric": "exact match", "examples": 9, "results": {"1x": 0.5, "2x": 1.0}, "label": "tra", "sizes": {"length": 4}}
    assert "".join(sign for sign in eval_script.table(eval_script.summarise([record])) if sign in "▁▂▃▄▅▆▇█") == marks
    cells = [cell.strip() for cell in eval_script.table(eval_script.summarise([record])).splitlines()[4].split("|")[1:-1]]
    assert cells == ["tra", "1", *(f"{value} {mark}".strip() for value, mark in zip(("50.0", "100.0"), marks or ["", ""]))]
    text = {**record, "metric": "perplexity"}
    assert "█" not in eval_script.table(eval_script.summarise([text]))


@pytest.mark.parametrize("flags, words", [
    (["--plot", "a.gif"], ["a.gif", ".png"]), (["--plot", ""], [".png"]), (["--plot", "missing/a.png"], ["missing/a.png", "No such file"]), (["--plot", "folder.png"], ["it is a folder"]),
    (["--plot", "a.png", "--mistakes", 2], ["--plot", "--mistakes"]), (["--plot", "a.png", "--json"], ["--plot", "--json"]), (["--plot", "a.png", "--split", "9x"], ["9x"]),
    (["--plot", "a.png", "--windows", 9], ["--windows"]), (["--curves", "a.png", "--attention"], ["--curves", "--attention"]), (["--curves", "a.png", "--split", "1x"], ["--split"]),
    (["--attention", "--examples", 2], ["--examples"]), (["--example", "a"], ["--attention"]), (["--attention", "--example", "a", "--split", "1x"], ["--example", "--split"]),
    (["run", "--attention", "a.png"], ["one run"]), (["--attention", "--example", "a ? b"], ["'?'", "<sep>"]), (["--attention", "--example", " "], ["empty"]),
    (["nowhere", "--plot", "a.png"], ["nowhere"]), (["nowhere", "--curves", "a.png"], ["nowhere"]), (["nowhere", "--attention"], ["nowhere"])], ids=lambda words: " ".join(map(str, words)))
def test_bad_flags_for_pictures_get_one_line_and_no_file(tmp_path, monkeypatch, capsys, trained, flags, words):
    if any(str(flag).endswith(".png") for flag in flags):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    os.mkdir("folder.png")
    before = files(tmp_path)
    code, error = silently(capsys, eval_script, "run", *flags)
    assert code == 2 and all(word in error for word in words), error
    assert files(tmp_path) == before


def test_without_matplotlib_or_on_a_full_disk_there_is_one_line_and_no_picture(tmp_path, monkeypatch, capsys, trained):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setattr(eval_script, "load_checkpoint", lambda run: 1 / 0)        # it is said before anything is measured
        for flag in ("--plot", "--curves", "--attention"):
            code, error = silently(capsys, eval_script, trained, flag, tmp_path / "a.png", *["--examples", 9][:2 * (flag == "--plot")])
            assert code == 2 and "pip install matplotlib" in error
    pytest.importorskip("matplotlib")
    (tmp_path / "a.png").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda file: os.pread(-1, 1, 0))           # an OSError
    assert silently(capsys, eval_script, trained, "--plot", tmp_path / "a.png")[0] == 2
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.png", b"old")]


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
