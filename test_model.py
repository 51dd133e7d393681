"""
All tests: pytest

Attention against oracles of plain loops, in output and in every gradient; then properties, the GPT, the tasks against
independent parsers, training, resuming, texts, tables, the README. Tests that are parametrised over ATTENTIONS or TASKS
pick up a new one by themselves. Those of extras/ are beside it.
"""

import cmath
import functools
import hashlib
import http.server
import importlib.util
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data as data_module
import eval as eval_module
import model as model_module
import tasks as tasks_module
import train as train_module
from model import (ATTENTIONS, GPT, GPTConfig, alibi_attention, cope_attention, fox_attention, nope_attention,
                   rope_attention, tra_attention)
from tasks import TASKS, as_text, make_task

HERE = Path(__file__).parent
torch.set_num_threads(1)        # tiny models: more threads only cost

# -----------------------------------------------------------------------------
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
            at_low, at_high = (sum(q[d] * extra[d, n] for d in range(len(q))) for n in (low, high))
            logits.append(scores[j] + at_low * (1 - (p - low)) + at_high * (p - low))
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
                zero = torch.zeros(v.size(-1), dtype=v.dtype)
                rows.append(sum((e[j] / sum(e.values()) * v[b, h, j] for j in kept), zero))
    return torch.stack(rows).view(B, H, T, -1)


def case(name, T, S, seed=0, B=2, H=2, D=4, dtype=torch.float64):
    """Random inputs: a function, its tensors as leaves with gradients, and what the oracle gets beside q, k and v."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    q, k, v = rand(B, H, T, D), rand(B, H, S, D), rand(B, H, S, D)
    if name.startswith("tra"):
        q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
        flags = dict(sparse="no-sparse" not in name, contextual="no-contextual" not in name)
        more, function = [F.logsigmoid(rand(B, H, T))], functools.partial(tra_attention, **flags)
    elif name == "fox":
        more, function = [F.logsigmoid(rand(B, H, S))], fox_attention
    elif name == "cope":
        more, function = [rand(D, 6)], cope_attention           # 6 positions: some distances are clamped
    elif name == "rope":
        more, function = [], functools.partial(rope_attention, theta=100.0)
    else:
        more, function = [], {"nope": nope_attention, "alibi": alibi_attention}[name]
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, *more)]
    extra = leaves[3] if more else 100.0
    if name.startswith("tra"):
        extra = (leaves[3], *flags.values())
    return function, leaves, extra


ABLATIONS = ["tra-no-sparse", "tra-no-contextual", "tra-no-sparse-no-contextual"]
SIX = ["tra", "rope", "cope", "nope", "alibi", "fox"]


@pytest.mark.parametrize("T, S", [(7, 7), (3, 8), (1, 6), (1, 1)])
@pytest.mark.parametrize("name", SIX + ABLATIONS)
def test_attention_equals_loops_in_output_and_gradients(name, T, S):
    function, leaves, extra = case(name, T, S)
    out, want = function(*leaves), oracle(name, *leaves[:3], extra)
    torch.testing.assert_close(out, want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), leaves, allow_unused=True)):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("name", SIX)
def test_half_precision_inputs_are_computed_in_float32(name):
    function, leaves, _ = case(name, 40, 40, dtype=torch.bfloat16, D=8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*leaves)
    with torch.no_grad():
        want = function(*[t.float() for t in leaves])
    assert out.dtype == torch.bfloat16
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
        "nope": nope_attention, "alibi": alibi_attention, "rope": functools.partial(rope_attention, theta=100.0),
        "cope": functools.partial(cope_attention, pos_emb=pos_emb),
        "fox": lambda q, k, v: fox_attention(q, k, v, torch.full((1, 1, k.size(2)), -0.3)),
        "no-sparse": functools.partial(tra_attention, log_forget=f, sparse=False),
    }
    if at == 3:     # older than all, they leave the distances alone; newer than all, they add a constant, which cancels
        others["no-contextual"] = functools.partial(tra_attention, log_forget=f, contextual=False)
    for name, function in others.items():
        assert (function(q, k2, v2) - function(q, k, v)).abs().max() > 1e-3, name


def test_both_ablations_and_no_forgetting_give_nope():
    _, (q, k, v, f), _ = case("tra", 6, 9)
    out = tra_attention(q, k, v, torch.zeros_like(f), sparse=False, contextual=False)
    torch.testing.assert_close(out, nope_attention(q, k, v))


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


@pytest.mark.parametrize("name", SIX)
def test_dropout_falls_on_the_weights_and_keeps_their_mean(name):
    function, leaves, _ = case(name, 1, 50, B=400, H=1, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        out = function(*leaves[:2], torch.ones_like(leaves[2]), *leaves[3:], dropout_p=0.25)[:, 0, 0, 0]
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.05


def test_cope_by_rows_is_the_same_function():
    function, leaves, _ = case("cope", 300, 300, B=1, H=1)
    whole, parts = function(*leaves), [function(q, *(x[:, :, :t] for x in leaves[1:3]), leaves[3])
                                       for q, t in ((leaves[0][:, :, :200], 200), (leaves[0][:, :, 200:], 300))]
    torch.testing.assert_close(whole, torch.cat(parts, dim=2))


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
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 1, 6], [3, 300, 1, 1]])       # the last outgrows the cache's room
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
    assert torch.equal(model.generate(idx, 8, top_k=1), out)
    model.eval()
    for t in range(5, 13):
        assert torch.equal(model(out[:, :t])[0][:, -1].argmax(-1), out[:, t])
    torch.manual_seed(1)
    sampled = model.generate(idx, 30, temperature=5.0)
    torch.manual_seed(1)
    assert torch.equal(sampled, model.generate(idx, 30, temperature=5.0, top_k=99))
    assert not torch.equal(sampled, model.generate(idx, 30, temperature=5.0))


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
    per_block = 4 * 32 * 32 + 4 * 33 + 6 * 32 * 32 + 2 * 32
    assert sum(math.prod(shape) for shape in shapes.values()) == 2 * 11 * 32 + 32 + 3 * per_block


@pytest.mark.parametrize("bad", [dict(attn="none"), dict(n_embd=30), dict(attn="rope", n_embd=12), dict(n_layer=0),
                                 dict(dropout=1.0), dict(vocab_size=0), dict(attn="rope", sparse=False)])
def test_impossible_configs_are_refused(bad):
    with pytest.raises(ValueError):
        GPTConfig(**bad)


def test_model_py_alone_in_a_folder_trains_and_generates_at_any_length(tmp_path):
    shutil.copy(HERE / "model.py", tmp_path)
    code = """
from model import *
model = GPT(GPTConfig(n_layer=1, n_embd=16))
idx = torch.randint(64, (1, 200))
model(idx, idx)[1].backward()
print(tuple(model.generate(idx, 3).shape), tuple(TRA(GPTConfig(n_embd=32))(torch.randn(2, 150, 32)).shape))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "(1, 203) (2, 150, 32)\n", result.stderr


def test_worked_example(capsys):
    model_module.worked_example()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("weight")]
    assert rows[0][2:] == ["0.3400", "0.0000", "0.1528", "0.0000", "0.5072"]
    assert [w for w in rows[1][2:] if w != "0.0000"] == ["0.3400", "0.1528", "0.5072"]


# -----------------------------------------------------------------------------
# The tasks, against parsers that know nothing of how they are made: from an example as text to the tokens to be scored


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
# Small sizes; a task that someone adds takes its laptop sizes.
SMALL = {"flipflop": dict(length=8), "copy": dict(length=6, symbols=5), "induct": dict(length=7, symbols=9, pairs=3),
         "instruct": dict(length=4, symbols=5)}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("sizes", ["small", "laptop", "paper"])
def test_every_example_is_in_the_language_and_scored_where_it_should(name, sizes):
    task = make_task(name, "laptop", **SMALL[name]) if sizes == "small" else make_task(name, sizes)
    for split in task.splits:
        for step in range(12):
            x, y = task.batch(split, 5, step, 3)
            assert x.dtype == y.dtype == np.int64 and x.shape == y.shape
            assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == -1)).all()
            for row in range(3):
                words = as_text(task, x[row], y[row], mark=False).split(" ")
                marked = as_text(task, x[row], y[row]).split(" ")
                scored = [at for at, word in enumerate(marked) if word != words[at]]
                assert scored == PARSERS[name](words, task, split)
                assert [at + 1 for at in np.flatnonzero(y[row] >= 0)] == scored


@pytest.mark.parametrize("name", TASKS)
def test_streams_are_endless_seeded_and_disjoint_and_words_become_tokens(name):
    task = make_task(name, "laptop")

    def examples(*args):
        return [tuple(np.concatenate(pair)) for pair in zip(*task.batch(*args))]

    assert examples("train", 3, 10**6, 8) == examples("train", 3, 10**6, 8) != examples("train", 4, 10**6, 8)
    seen = {example for step in range(60) for example in examples("train", 0, step, 16)}
    test_set = next(split for split in task.splits if split in ("iid", "1x", "copy-1x"))
    assert not seen.intersection(example for step in range(20) for example in examples(test_set, 0, step, 16))
    x, _ = task.batch(test_set, 0, 0, 1)
    assert task.encode(task.decode(x[0])) == x[0].tolist() and task.vocab_size == len(set(task.vocab)) > x.max()


@pytest.mark.parametrize("name, digest", [("flipflop", "261a334e12e78694"), ("copy", "919550cb2af6c69c"),
                                          ("induct", "b8c1422557147855"), ("instruct", "9f3efa0979e42928")])
def test_the_same_seed_gives_the_same_batches_on_every_machine(name, digest):
    task, sha = make_task(name, "laptop", **SMALL[name]), hashlib.sha256()
    for split in task.splits:
        for step in range(3):
            for array in task.batch(split, 7, step, 4):
                sha.update(array.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == digest


def test_flipflop_has_the_stated_probabilities():
    task = make_task("flipflop", "laptop", length=100)
    for split, p in (("train", 0.8), ("sparse", 0.98), ("dense", 0.1)):
        x, _ = task.batch(split, 0, 0, 400)
        instructions, bits = x[:, 2:-2:2], x[:, 1::2]               # without the first and the last instruction
        for token, want in ((0, (1 - p) / 2), (1, (1 - p) / 2), (2, p)):
            assert abs((instructions == token).mean() - want) < 0.01
        assert abs((bits == 3).mean() - 0.5) < 0.05


def test_all_lengths_and_places_occur():
    def lengths(name, **sizes):
        task = make_task(name, "laptop", **sizes)
        return {task.batch("train", 0, step, 1)[0].shape[1] for step in range(300)}

    assert lengths("copy", length=9, symbols=4) == {2 * n + 2 for n in range(1, 10)}
    assert lengths("induct", length=9, symbols=9, pairs=2) == {n + 1 + 2 * min(2, n // 2) for n in range(2, 10)}
    assert lengths("instruct", length=5, symbols=4) == {2 * n + 2 for n in range(6)}
    x, _ = make_task("induct", "laptop", length=6, symbols=9, pairs=2).batch("1x", 0, 0, 500)
    places = {(list(row[1:7]).index(row[8]), list(row[1:7]).index(row[10])) for row in x}
    assert places == {(a, b) for a in range(5) for b in range(5) if abs(a - b) > 1}


# -----------------------------------------------------------------------------
# Training


def flags_for(task, *more):
    """The command line of a tiny run."""
    sizes = [word for name, value in SMALL.get(task, {}).items() for word in (f"--{name}", value)]
    model = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16]
    quick = ["--batch", 4, "--steps", 6, "--examples", 5, "--log-every", 2, "--device", "cpu"]
    return [str(word) for word in ("--task", task, *sizes, *model, *quick, *more)]


def train(*flags):
    """train.py in this process."""
    train_module.train(train_module.parse_flags([str(flag) for flag in flags]))


def script(name, *words, cwd, **kwargs):
    """A script as a user would run it, in a process of its own."""
    return subprocess.run([sys.executable, HERE / name, *map(str, words)], cwd=cwd, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, **kwargs)


def read_log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def read_eval(run):
    return json.loads((run / "eval.json").read_text())


@pytest.fixture(scope="session", autouse=True)
def small_text(tmp_path_factory):
    """A small text as bytes, for --task wikitext."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    sentences = rng.choices(["the cat sat . ", "a dog ran , ", "naïve . \n"], k=600)
    (folder / "story.txt").write_text("".join(sentences), encoding="utf-8")
    data_module.prepare(str(folder / "story.txt"), out=folder / "story-byte")
    SMALL["wikitext"] = dict(window=6, data=folder / "story-byte")
    return folder / "story-byte"


@pytest.mark.parametrize("task", [*TASKS, "wikitext"])
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_trains_on_every_task(tmp_path, capsys, attn, task):
    train(*flags_for(task, "--attn", attn, "--out", tmp_path, "--seed", 3))
    record, log = read_eval(tmp_path), read_log(tmp_path)
    assert [row["step"] for row in log] == [2, 4, 6]
    assert log[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert (record["attn"], record["seed"], record["scale"]) == (attn, 3, "laptop")
    assert record["task"] == ("story-byte" if task == "wikitext" else task)
    assert record["results"].keys() == record["right_tokens"].keys() and f"| {attn} " in capsys.readouterr().out


def test_a_short_training_learns_flipflop_and_keeps_it_at_four_times_the_length(tmp_path):
    train("--attn", "tra", "--task", "flipflop", "--length", 24, "--steps", 250, "--examples", 100, "--out", tmp_path)
    results, log = read_eval(tmp_path)["results"], read_log(tmp_path)
    assert min(results.values()) >= 0.95, results
    assert log[0]["loss"] > 0.3 and log[-1]["loss"] < 0.05


def test_accumulation_logging_and_validation_do_not_change_the_training(tmp_path):
    flags = flags_for("instruct", "--attn", "tra", "--dropout", 0)
    train(*flags, "--out", tmp_path / "a")
    train(*flags, "--out", tmp_path / "b", "--accumulate", 3, "--log-every", 3, "--eval-every", 2, "--save-every", 0)
    assert [row["step"] for row in read_log(tmp_path / "b") if "val_loss" in row] == [2, 4, 6]
    a, b = (eval_module.load_checkpoint(tmp_path / name)["model"] for name in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


def test_learning_rate_warms_up_and_decays_to_zero():
    args = dict(lr=1.0, warmup=0.1, steps=100)
    rates = [train_module.learning_rate(step, args) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)]) and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and all(a > b for a, b in zip(rates[10:], rates[11:])) and rates[-1] < 0.001


def test_flags_beat_presets_and_name_the_folder(tmp_path):
    def parse(*words):
        return train_module.parse_flags([*map(str, words)])

    args = parse("--attn", "tra", "--task", "copy")
    assert (args["n_embd"], args["beta2"], args["warmup"], args["length"]) == (128, 0.9, 0.05, 16)
    assert args["out"] == os.path.join("out", "copy-tra-s0")
    args = parse("--attn", "tra", "--task", "copy", "--steps", 50, "--no-sparse", "--lr", 0.0005, "--seed", 7)
    assert args["out"] == os.path.join("out", "copy-tra-no-sparse-steps50-lr0.0005-s7") and args["sparse"] is False
    args = parse("--attn", "rope", "--data", SMALL["wikitext"]["data"], "--scale", "paper", "--log-every", 3)
    assert args["out"] == os.path.join("out", "story-byte-rope-paper-s0") and args["n_embd"] == 512


def test_compiled_training_has_the_same_losses_with_two_graphs_at_most(tmp_path, monkeypatch):
    """Lengths differ from step to step. The graphs are made and run, without a compiler behind them."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=count))
    for attn in ATTENTIONS:
        torch._dynamo.reset()
        graphs.clear()
        flags = flags_for("copy", "--attn", attn, "--length", 9, "--steps", 12)
        train(*flags, "--out", tmp_path / f"{attn}-plain")
        train(*flags, "--out", tmp_path / f"{attn}-compiled", "--compile")
        plain, compiled = (read_log(tmp_path / f"{attn}-{form}") for form in ("plain", "compiled"))
        assert [row["loss"] for row in plain] == pytest.approx([row["loss"] for row in compiled], abs=1e-4), attn
        assert len(graphs) <= 2, (attn, len(graphs))


# -----------------------------------------------------------------------------
# Stopping and going on


def same_run(run, untouched):
    """Bitwise the same weights, optimizer and random state; the same log and results; and no other file beside them."""
    assert {path.name for path in run.iterdir()} == {"ckpt.pt", "log.jsonl", "eval.json"}
    a, b = (eval_module.load_checkpoint(folder) for folder in (run, untouched))
    for part in ("model", "optimizer", "random", "history"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)
    a, b = read_log(run), read_log(untouched)
    for row in a + b:
        row.pop("tokens_per_second", None)
    assert a == b and a[-1]["step"] == 6
    assert read_eval(run)["results"] == read_eval(untouched)["results"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("task", ["copy", "wikitext"])
def test_a_run_killed_at_random_moments_ends_as_if_never_touched(tmp_path, task):
    rng, run = random.Random(task), tmp_path / "run"
    flags = flags_for(task, "--attn", "tra", "--dropout", 0.2, "--eval-every", 3)
    train(*flags, "--out", tmp_path / "untouched")
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            sys.stdout = open(os.devnull, "w")
            resume = ["--resume"] if (run / "ckpt.pt").exists() else []
            train(*flags, "--out", run, "--save-every", rng.choice((0, 0.01)), *resume)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    train(*flags, "--out", run, *["--resume"] * (run / "ckpt.pt").exists())
    same_run(run, tmp_path / "untouched")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("function", ["torch.save", "os.fsync", "os.replace"])
@pytest.mark.parametrize("call", [1, 2, 6, 7])
def test_a_run_killed_while_it_writes_ends_as_if_never_touched(tmp_path, function, call):
    """Killed in the first checkpoint, between checkpoint and log, between two checkpoints, ..."""
    flags, run = flags_for("copy", "--attn", "tra", "--dropout", 0.2), tmp_path / "run"
    train(*flags, "--out", tmp_path / "untouched")
    pid = os.fork()
    if pid == 0:
        sys.stdout = open(os.devnull, "w")
        module, name = {"torch": torch, "os": os}[function.split(".")[0]], function.split(".")[1]
        original, calls = getattr(module, name), []

        def dying(*args, **kwargs):
            calls.append(name)
            if len(calls) == call:
                if name == "save":
                    args[1].write(b"half a checkpoint")
                    args[1].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, dying)
        train(*flags, "--out", run, "--save-every", 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    train(*flags, "--out", run, *["--resume"] * (run / "ckpt.pt").exists())
    same_run(run, tmp_path / "untouched")


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_stopped_by_a_signal_and_resumed_as_it_says_a_run_ends_the_same(tmp_path, monkeypatch, capsys, attn):
    flags, run = flags_for("copy", "--attn", attn, "--dropout", 0.3), tmp_path / "run"
    train(*flags, "--out", tmp_path / "untouched")
    with monkeypatch.context() as patch:
        learning_rate = train_module.learning_rate

        def stop_at_step_2(step, args):
            if step == 2:
                train_module.stop_requests.append(signal.SIGINT)
            return learning_rate(step, args)

        patch.setattr(train_module, "learning_rate", stop_at_step_2)
        patch.setattr(train_module, "stop_requests", [])
        train(*flags, "--out", run)
    message = capsys.readouterr().out.splitlines()[-1]
    assert "stopped after step 3" in message and not (run / "eval.json").exists()
    train(*flags, "--out", run, "--resume")
    same_run(run, tmp_path / "untouched")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_script_saves_and_is_no_error(tmp_path, signum):
    flags = flags_for("copy", "--attn", "tra", "--steps", 10**6, "--out", tmp_path)
    process = subprocess.Popen([sys.executable, HERE / "train.py", *flags], stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("step"):
        pass
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "the same command with --resume goes on" in out
    assert eval_module.load_checkpoint(tmp_path)["step"] > 0


def test_a_run_with_another_optimizer_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "make_optimizer", lambda model, args:
                        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    flags = flags_for("copy", "--attn", "tra")
    train(*flags, "--out", tmp_path / "untouched")
    train(*flags, "--out", tmp_path / "run", "--steps", 3)
    ckpt = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    torch.save(ckpt | {"args": ckpt["args"] | {"steps": 6}}, tmp_path / "run" / "ckpt.pt")
    train(*flags, "--resume", "--out", tmp_path / "run")
    a, b = (eval_module.load_checkpoint(tmp_path / name) for name in ("run", "untouched"))
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys() and a["step"] == 6
    assert "momentum_buffer" in a["optimizer"]["state"][0]


def test_an_existing_run_is_not_overwritten_and_resumed_only_as_it_was(tmp_path):
    flags = flags_for("copy", "--attn", "tra", "--out", tmp_path)
    train(*flags)
    with pytest.raises(FileExistsError, match="--resume"):
        train(*flags)
    with pytest.raises(ValueError, match="was started with lr 0.002"):
        train(*flags, "--lr", 1, "--resume")
    with pytest.raises(ValueError, match="has done 6 steps"):
        train(*flags, "--steps", 5, "--resume")
    train(*flags, "--attn", "rope", "--overwrite")
    assert read_eval(tmp_path)["attn"] == "rope" and len(read_log(tmp_path)) == 3


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tmp_path):
    with pytest.raises(ValueError, match="lower --lr"):
        train(*flags_for("copy", "--attn", "tra", "--lr", 1e30, "--steps", 50, "--save-every", 0, "--out", tmp_path))
    weights = eval_module.load_checkpoint(tmp_path)["model"].values()
    assert all(tensor.isfinite().all() for tensor in weights)


# -----------------------------------------------------------------------------
# Measuring


def test_exact_match_equals_greedy_generation_and_counts_examples():
    """The prompt is fed, the rest generated greedily: the same examples are right."""
    task = make_task("copy", "laptop", length=2, symbols=4)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=task.vocab_size, n_layer=2, n_head=2, n_embd=32, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(150):                                 # trained a little: right on some, wrong on others
        model(*map(torch.from_numpy, task.batch("train", 0, step, 32)))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    examples = right = right_tokens = tokens = 0
    for x, y, predicted, _ in eval_module.predictions(model, task, "1x", 2001):
        start = int((y[0] >= 0).float().argmax()) + 1
        out = model.generate(x[:, :start], y.shape[1] + 1 - start, temperature=0)
        generated = (out[:, start:] == y[:, start - 1:]).all(1)
        assert torch.equal(generated, ((predicted == y) | (y < 0)).all(1))
        examples, right = examples + len(x), right + generated.sum().item()
        tokens, right_tokens = tokens + (y >= 0).sum().item(), right_tokens + ((predicted == y) & (y >= 0)).sum().item()
    found = eval_module.measure(model, task, "1x", 2001)
    assert examples == 2001 and 0 < right < 2001
    assert found["exact match"] == right / 2001 and found["right tokens"] == right_tokens / tokens


@pytest.mark.parametrize("window", [1, 5, 16, 99, 100, 500])
def test_perplexity_scores_every_token_once_as_a_mean_over_tokens(window):
    task = data_module.Text(str(SMALL["wikitext"]["data"]), window=6)
    model = tiny("tra", vocab_size=256)
    tokens = torch.from_numpy(task.tokens["test"][:101].astype("int64"))
    total = 0.0
    for start in range(0, 100, window):
        part = tokens[start:start + window + 1]
        total -= model(part[None, :-1])[0].log_softmax(-1)[0].gather(1, part[1:, None]).sum().item()
    assert eval_module.measure(model, task, str(window), 101)["loss"] == pytest.approx(total / 100, rel=1e-5)


def make_record(value=0.5, **changes):
    settings = {"lr": 0.002, "sparse": True, "steps": 10} | changes.pop("settings", {})
    return {"task": "copy", "attn": "tra", "seed": 0, "scale": "laptop", "metric": "exact match", "examples": 100,
            "results": {"1x": 1.0, "2x": value}, "right_tokens": {"1x": 1.0, "2x": value}, "sizes": {"length": 16},
            "settings": settings} | changes


def test_a_row_has_mean_and_spread_over_seeds_and_is_rounded_down():
    lines = eval_module.table([make_record(0.9999), make_record(1.0, seed=1), make_record(attn="rope")]).splitlines()
    assert lines[0] == "copy, laptop scale (length 16): exact match in %, examples per test set: 100"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[2:] == [["tra", "2", "100.0 ± 0.0", "99.9 ± 0.0"], ["rope", "1", "100.0", "50.0"]]


@pytest.mark.parametrize("change, name", [
    (dict(settings={"lr": 0.0005}), "tra lr=0.0005"), (dict(settings={"sparse": False}), "tra no-sparse"),
    (dict(settings={"steps": 20}), "tra steps=20"), (dict(examples=7), "tra examples=7"),
    (dict(attn="rope", settings={"reach": 4}), "rope reach=4"), (dict(settings={"rotary": True}), "tra rotary"),
    (dict(seed=5), "tra")])
def test_runs_that_differ_in_more_than_the_seed_get_rows_that_say_in_what(change, name):
    [(_, rows)] = eval_module.group([make_record(), make_record(0.7, **change)])
    assert name in rows and len(rows) == (1 if "seed" in change else 2)


def test_eval_finds_runs_measures_again_shows_mistakes_and_continues_a_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags in (["--seed", 0], ["--seed", 1], ["--lr", 0.1]):
        train(*flags_for("copy", "--attn", "tra", *flags))
    train(*flags_for("wikitext", "--attn", "tra"))
    capsys.readouterr()
    for runs in ([], ["out"], ["out/copy-*", "out/story*"]):
        eval_module.main(runs)
        out = capsys.readouterr().out
        assert "| tra lr=0.002 |     2 |" in out and "| tra lr=0.1   |     1 |" in out and "story-byte" in out, out
    run = os.path.join("out", next(name for name in os.listdir("out") if name.endswith("s1")))
    eval_module.main([run, "--examples", "50", "--split", "2x,4x"])
    assert "test set: 50" in (out := capsys.readouterr().out) and "|  2x |  4x |" in out
    eval_module.main([run, "--mistakes", "2"])
    out = capsys.readouterr().out
    assert out.count(" scored tokens are right") == 2 and len(re.findall(r"\[\w->\S+\]", out)) > 1
    eval_module.main([run, "--prompt", "<bos> a b <sep>", "--count", "3"])
    assert len(capsys.readouterr().out.split(": ")[1].split()) == 7
    story = next(path for path in os.listdir("out") if path.startswith("story"))
    eval_module.main([f"out/{story}", "--prompt", "the cat", "--count", "9"])
    assert ": the cat" in capsys.readouterr().out
    eval_module.main([f"out/{story}", "--windows", "6,50"])
    assert re.search(r"\| +6 \| +50 \|", capsys.readouterr().out)


# -----------------------------------------------------------------------------
# Texts

PARTS = {"wiki.train.raw": "The <unk> cat . \n\n 日本 été \n" * 30, "wiki.valid.raw": "a dog ran \n" * 9,
         "wiki.test.raw": "in été \n" * 9}


def make_zip(folder="wikitext-2-raw/"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in PARTS.items():
            archive.writestr(folder + name, text)
    return file.getvalue()


def decoded(folder):
    task = data_module.Text(str(folder), window=4)
    return [task.decode(task.tokens[split]) for split in ("train", "val", "test")]


@pytest.fixture
def mirror(monkeypatch):
    """A web server with one small zip: /good, and /short, /wrong and /gone, which fail in their own ways."""
    body = make_zip()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_refused = self.path == "/gone" or "python" in self.headers["User-Agent"].lower()
            self.send_response(404 if is_refused else 200)
            self.send_header("Content-Length", "0" if is_refused else str(len(body)))
            self.end_headers()
            if not is_refused:
                sent = body[:len(body) // 2] if self.path == "/short" else body
                self.wfile.write(sent[:-1] + b"?" if self.path == "/wrong" else sent)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")

    def use(*paths):
        urls = [f"http://127.0.0.1:{server.server_port}{path}" for path in paths]
        monkeypatch.setitem(data_module.MIRRORS, "wikitext-2", urls)
        monkeypatch.setitem(data_module.SHA256, "wikitext-2", hashlib.sha256(body).hexdigest())

    yield use
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("first", ["/good", "/short", "/wrong", "/gone"])
def test_a_download_comes_from_the_first_mirror_with_the_right_file(mirror, monkeypatch, tmp_path, capsys, first):
    monkeypatch.chdir(tmp_path)
    mirror(first, "/good")
    data_module.main([])
    assert decoded("data/wikitext-2-byte") == list(PARTS.values())
    assert capsys.readouterr().out.endswith(f"python train.py --attn tra --data {Path('data/wikitext-2-byte')}\n")


@pytest.mark.parametrize("path", ["/short", "/wrong", "/gone"])
def test_a_download_that_fails_leaves_nothing(mirror, monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    mirror(path)
    with pytest.raises(OSError, match="could not fetch wikitext-2"):
        data_module.main([])
    assert not list(tmp_path.iterdir())


def test_zip_folder_and_text_file_hold_the_same_text(tmp_path):
    (tmp_path / "copy.zip").write_bytes(make_zip("anywhere/"))
    (tmp_path / "wiki").mkdir()
    for name, text in PARTS.items():
        (tmp_path / "wiki" / name).write_text(text, encoding="utf-8", newline="")
    for source in ("copy.zip", "wiki"):
        data_module.prepare(str(tmp_path / source), out=tmp_path / f"{source}-byte")
        assert decoded(tmp_path / f"{source}-byte") == list(PARTS.values())
    (tmp_path / "book.txt").write_text("".join(PARTS.values()), encoding="utf-8", newline="")
    data_module.prepare(str(tmp_path / "book.txt"), out=tmp_path / "book")
    assert "".join(decoded(tmp_path / "book")) == "".join(PARTS.values())
    with pytest.raises(FileExistsError, match="already there"):
        data_module.prepare(str(tmp_path / "book.txt"), out=tmp_path / "book")


def test_pieces_have_the_tokens_of_the_uncut_text():
    """GPT-2's pattern, with a stand-in for its vocabulary, which would have to be fetched."""
    tiktoken = pytest.importorskip("tiktoken")
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    merged = [b" t", b"\n\n", b" \n", b"  ", b"he"]
    ranks = {bytes([i]): i for i in range(256)} | {word: 256 + i for i, word in enumerate(merged)}
    encode = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode
    rng = random.Random(1)
    words = ["the ", " the", "\n", "\n\n", "  ", " . ", "é", "日本", "it's", " 42", "\t", "\r\n"]
    text = "".join(rng.choices(words, k=3000))
    cut = list(data_module.pieces(text.encode(), size=50))
    assert "".join(cut) == text and len(cut) > 50
    assert [token for piece in cut for token in encode(piece)] == encode(text)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_text_that_is_half_prepared_is_never_taken_for_done(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("line\n" * 100)
    pid = os.fork()
    if pid == 0:
        os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        data_module.prepare(str(tmp_path / "book.txt"), out=tmp_path / "book")
    os.waitpid(pid, 0)
    with pytest.raises(FileNotFoundError, match="holds no prepared text"):
        decoded(tmp_path / "book")
    data_module.prepare(str(tmp_path / "book.txt"), out=tmp_path / "book")
    assert "".join(decoded(tmp_path / "book")) == "line\n" * 100


# -----------------------------------------------------------------------------
# Bad input: one line and an exit code that is not zero

BAD_COMMANDS = [
    ("train.py", [], "--attn tra --task copy"),
    ("train.py", ["--attn", "tra", "--task", "cpoy"], "invalid choice"),
    ("train.py", ["--attn", "tra", "--task", "copy", "--pairs", "3"], "--pairs"),
    ("train.py", ["--attn", "tra", "--task", "copy", "--n-head", "3"], "divisible"),
    ("train.py", ["--attn", "rope", "--task", "copy", "--no-sparse"], "parts of TRA"),
    ("train.py", ["--attn", "tra", "--task", "induct", "--symbols", "3"], "more symbols than pairs"),
    ("train.py", ["--attn", "tra", "--task", "copy", "--device", "cuda:99"], "does not work here"),
    ("train.py", ["--attn", "tra", "--data", "nowhere"], "make one with data.py"),
    ("train.py", ["--attn", "tra", "--task", "copy", "--resume", "--out", "nowhere"], "holds no run"),
    ("eval.py", ["nowhere"], "holds no run"),
    ("eval.py", ["damaged"], "is damaged"),
    ("data.py", ["nowhere.txt"], "neither a file nor a folder"),
    ("data.py", ["binary.txt"], "not UTF-8"),
    ("data.py", ["short.txt"], "too few lines"),
    ("tasks.py", ["--task", "copy", "--split", "9x"], "choose one of train, 1x"),
]


@pytest.mark.parametrize("name, words, reason", BAD_COMMANDS, ids=lambda value: str(value)[:50])
def test_bad_input_gets_one_line(tmp_path, name, words, reason):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe line\n" * 100)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ckpt.pt").write_bytes(b"half a checkpoint")
    result = script(name, *words, cwd=tmp_path)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("usage: ")]
    assert result.returncode != 0 and len(lines) == 1 and reason in lines[0], result.stderr


def test_nothing_in_a_checkpoint_is_ever_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"config": Evil()}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="damaged"):
        eval_module.load(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_synthetic_task_needs_neither_tiktoken_nor_pytest():
    code = "import sys; import train; print(sorted({'tiktoken', 'pytest', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.stdout == "[]\n"


# -----------------------------------------------------------------------------
# The README

README = (HERE / "README.md").read_text(encoding="utf-8")
SCRIPTS = ["model.py", "tasks.py", "data.py", "train.py", "eval.py", "test_model.py", "README.md"]


def code_of_readme(start):
    """The block of Python code in the README that begins with these words."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(code for code in blocks if code.lstrip().startswith(start))


def test_the_readme_has_the_two_commands_and_quotes_the_code():
    for line in ("pip install -r requirements.txt && python train.py --attn tra --task copy",
                 "pip install -r requirements.txt && pytest"):
        assert line in README.splitlines()
    assert code_of_readme("mask = ") in (HERE / "model.py").read_text(encoding="utf-8")


def test_every_command_of_the_readme_runs(tmp_path):
    """One after the other in one process, made small; eval.py then reads the runs that train.py has made."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line.split("&&")[-1].strip() for _, block in blocks for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("python ")]
    assert len(commands) > 20
    if importlib.util.find_spec("matplotlib") is None:
        commands = [words for words in commands if not any(word.endswith(".png") for word in words)]
    small = "--steps 2 --log-every 1 --examples 200 --batch 2 --n-layer 2 --n-embd 16 --n-head 4 --device cpu".split()
    for words in commands:
        if words[0] == "train.py":
            is_text = "wikitext" in words or "--data" in words
            words[1:] = [word for word in words[1:] if word != "--compile"] + small
            words += ["--window", "4", "--overwrite"] if is_text else ["--length", "4", "--overwrite"]
            # The names of runs in the README are those of the presets.
            attn, name = words[words.index("--attn") + 1], words[words.index("--task") + 1] if "--task" in words else ""
            if "--data" in words or name == "wikitext":
                name = "book-byte" if "--data" in words else "wikitext-2-byte"
                words += ["--data", f"data/{name}"]
            lr = "-lr0.001" if "--lr" in words else ""
            words += ["--out", f"out/{name}-{attn}{lr}-s0"]
        if words[0] == "data.py" and "book.txt" not in words:
            words[1:] = ["wikitext-2"] if words[1:] == [] else ["wiki", "--out", "data/other"]
        if words[0] == "eval.py":
            words += ["--device", "cpu", "--count", "5"]
        if words[:2] == ["-m", "extras.bench"]:
            words += ["--windows", "16", "--attn", "tra", "--tokens", "4"]
    (tmp_path / "wiki").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "wiki" / f"wiki.{name}.raw").write_text(f"a small {name} text . \n" * 100)
    (tmp_path / "book.txt").write_text("a line of a book\n" * 500)
    driver = f"""
import glob, json, runpy, sys
sys.path.insert(0, {str(HERE)!r})
import data
data.download = lambda name: data.Path("wiki.zip").read_bytes()
for words in json.loads(sys.argv[1]):
    print("$", *words, flush=True)
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
    sys.argv = [module] + words[words.index(words[1] if words[0] == "-m" else words[0]) + 1:]
    if module == "data":
        data.main(sys.argv[1:])         # with its stand-in for the network
    else:
        runpy.run_module(module, run_name="__main__")
print("all done")
"""
    (tmp_path / "wiki.zip").write_bytes(make_zip())
    result = subprocess.run([sys.executable, "-c", driver, json.dumps(commands)], cwd=tmp_path, capture_output=True,
                            text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0 and result.stdout.endswith("all done\n"), result.stdout[-2000:] + result.stderr


def test_the_readmes_layer_and_notebook_work(tmp_path, monkeypatch, capsys):
    shutil.copy(HERE / "model.py", tmp_path)
    code = code_of_readme("import torch\nfrom model") + "\nprint(tuple(y.shape))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "(2, 100, 256)\n", result.stderr
    monkeypatch.chdir(tmp_path)
    sizes = ["--n-layer", 2, "--n-head", 4, "--symbols", 7]
    train(*flags_for("copy", "--attn", "tra", *sizes, "--out", "out/copy-tra-s0"))
    capsys.readouterr()
    exec(code_of_readme("import torch\nfrom eval"), {})
    assert len(capsys.readouterr().out.splitlines()[0].split()) == 7
    exec(code_of_readme("import json"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_readmes_own_attention_and_task_work(tmp_path):
    """Pasted where the README says, they train, have flags, folders and rows of their own, and pass the tests."""
    for name in SCRIPTS:
        shutil.copy(HERE / name, tmp_path)
    edits = {
        "model.py": [("# To add one", code_of_readme("def near") + "\n\n# To add one"),
                     ('"fox": FoX}', '"fox": FoX, "near": Near}'),
                     ("\n    def __post_init__", code_of_readme("reach") + "\n    def __post_init__")],
        "tasks.py": [("# To add one", code_of_readme("@dataclass") + "\n\n# To add one"),
                     ('"instruct": Instruct}', '"instruct": Instruct, "repeat": Repeat}')],
    }
    for name, changes in edits.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / name).write_text(text, encoding="utf-8")

    def run(*words):
        return subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    shown = run("tasks.py", "--task", "repeat", "--length", "3", "--times", "4", "--plain", "--split", "2x")
    asked, answer = shown.splitlines()[0].removeprefix("<bos> ").split(" <sep> ")
    assert answer == " ".join([asked] * 4) + " <eos>"
    flags = ["--length", "4", "--steps", "3", "--examples", "5", "--n-embd", "16"]
    run("train.py", "--attn", "near", "--task", "repeat", "--reach", "4", "--times", "3", *flags)
    run("train.py", "--attn", "near", "--task", "repeat", "--times", "3", *flags)
    assert all("times3" in name for name in os.listdir(tmp_path / "out")) and len(os.listdir(tmp_path / "out")) == 2
    assert "| near reach=4 " in run("eval.py") and "| near reach=16 " in run("eval.py")
    chosen = "near and (copy or future or cached or bfloat16) or repeat and streams"
    assert "passed" in run("-m", "pytest", "-q", "-k", chosen)
