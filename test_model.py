"""
All tests: pytest

Attention against oracles of plain loops, in output and in every gradient; then properties, the GPT, the tasks against
independent parsers, training, resuming, tables, texts, the README. Tests that are parametrised over ATTENTIONS or TASKS
pick up a new one by themselves. Those of extras/ are beside it.
"""

import functools
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import data as data_module
import eval as eval_module
import model as model_module
import train as train_module
from model import (ATTENTIONS, GPT, GPTConfig, alibi_attention, cope_attention, fox_attention, nope_attention,
                   rope_attention, tra_attention)
from tasks import TASKS, as_text

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
torch.set_num_threads(1)        # tiny models: more threads only cost


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def code_of_readme(start):
    """The block of the README that begins with these words."""
    return next(block for block in BLOCKS if block.lstrip().startswith(start))


# -----------------------------------------------------------------------------
# Attention functions against loops

THETA = 100.0
SIX = {"tra": tra_attention, "rope": functools.partial(rope_attention, theta=THETA), "cope": cope_attention,
       "nope": nope_attention, "alibi": alibi_attention, "fox": fox_attention}
ABLATIONS = {"tra no-sparse": functools.partial(tra_attention, sparse=False),
             "tra no-contextual": functools.partial(tra_attention, contextual=False),
             "tra no-sparse no-contextual": functools.partial(tra_attention, sparse=False, contextual=False)}
FUNCTIONS = SIX | ABLATIONS


def oracle_logits(name, q, k, i, h, H, extra):
    """Logits of query q, at position i in head h of H, over keys 0 to i; None for a key that leaves the softmax."""
    scores = [q @ k[j] / math.sqrt(len(q)) for j in range(i + 1)]
    logits = []
    for j, score in enumerate(scores):
        between = range(j, i + 1)
        if name == "nope":
            logits.append(score)
        elif name == "alibi":
            logits.append(score - 2 ** (-8 * (h + 1) / H) * (i - j))
        elif name == "fox":
            logits.append(score + sum(extra[l] for l in between if l > j))
        elif name == "rope":
            # Pairs as complex numbers, turned by distance times speed.
            a, b = torch.complex(*q.chunk(2)), torch.complex(*k[j].chunk(2))
            angle = (i - j) * THETA ** (-torch.arange(0, len(q), 2, dtype=q.dtype) / len(q))
            logits.append((a * b.conj() * torch.exp(1j * angle)).real.sum() / math.sqrt(len(q)))
        elif name == "cope":
            p = sum(1 / (1 + torch.exp(-scores[l])) for l in between).clamp(max=extra.size(1) - 1)
            low, high = math.floor(p.item()), math.ceil(p.item())
            logits.append(score + q @ (extra[:, low] * (1 - (p - low)) + extra[:, high] * (p - low)))
        else:
            n = sum(1 for l in between if scores[l] > 0 or "no-contextual" in name)
            logits.append(score + extra * n if score > 0 or "no-sparse" in name else None)
    return logits


def oracle(name, q, k, v, extra=None):
    """An attention by loops. extra: the gates of TRA (B, H, T) or of FoX (B, H, S), CoPE's learned positions."""
    (B, H, T, _), S = q.shape, k.size(2)
    rows = []
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        own = extra[b, h, t] if name.startswith("tra") else extra[b, h] if name == "fox" else extra
        logits = oracle_logits(name, q[b, h, t], k[b, h], S - T + t, h, H, own)
        kept = [j for j, logit in enumerate(logits) if logit is not None]
        weights = [torch.exp(logits[j] - max(logits[l].item() for l in kept)) for j in kept]
        row = sum(weight / sum(weights) * v[b, h, j] for weight, j in zip(weights, kept))
        rows.append(row if kept else torch.zeros_like(v[b, h, 0]))
    return torch.stack(rows).view(B, H, T, -1)


def inputs(name, T, S, B=2, H=2, D=4, dtype=torch.float64):
    """Random q, k, v and whatever else this attention takes, as leaves with gradients."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = [randn(B, H, T, D), randn(B, H, S, D), randn(B, H, S, D)]
    if name.startswith("tra") or name == "fox":
        tensors.append(F.logsigmoid(randn(B, H, S if name == "fox" else T)))
    if name == "cope":
        tensors.append(randn(D, 6))                         # 6 positions: some distances are clamped
    return [x.to(dtype).requires_grad_() for x in tensors]


@pytest.mark.parametrize("T, S", [(7, 7), (3, 8), (1, 6), (1, 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_attention_equals_loops_in_output_and_gradients(name, T, S):
    leaves = inputs(name, T, S)
    with torch.no_grad():
        leaves[0][0, 0, 0] = 0                              # all scores are 0: TRA keeps nothing
        if name.startswith("tra"):
            leaves[3][1, 1, -1] = -1e4                      # and forgets as much as it can
    got, want = FUNCTIONS[name](*leaves), oracle(name, *leaves)
    torch.testing.assert_close(got, want)
    assert torch.equal((got == 0).all(-1), (want == 0).all(-1))         # a row that keeps nothing is exactly 0
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    gradients = [torch.autograd.grad(out, leaves, weight, materialize_grads=True) for out in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", SIX)
def test_counts_and_positions_past_256_are_exact_in_half_precision(name):
    """bfloat16 cannot hold them. With the identity for v, the output is the weights."""
    q, k, _, *more = inputs(name, 1, 900, B=1, dtype=torch.bfloat16)
    if name == "cope":
        more = [torch.randn(4, 400, generator=torch.Generator().manual_seed(1)).bfloat16()]
    elif more:
        more = [0.1 * more[0]]                              # gates that look back far
    leaves = [q, k, torch.eye(900, dtype=q.dtype).expand(1, 2, 900, 900), *more]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = SIX[name](*leaves)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), SIX[name](*[x.double() for x in leaves]), rtol=0.05, atol=0)


# Properties

@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_irrelevant_keys_are_invisible_to_tra_and_to_no_other(name, at):
    """One query on eleven keys, and without the five of them, first, middle or last, whose scores are negative."""
    q, k, v, *more = inputs(name, 1, 11, B=1, H=1)
    is_new = (torch.arange(11) >= at) & (torch.arange(11) < at + 5)
    k = torch.where((k @ q.mT > 0) == is_new[:, None], -k, k)
    out = FUNCTIONS[name](q, k, v, *more)
    more = [more[0][..., ~is_new]] if name == "fox" else more
    without = FUNCTIONS[name](q, k[:, :, ~is_new], v[:, :, ~is_new], *more)
    # Where all keys count, the first ones change no distance, and the last ones add a constant, which cancels.
    is_invisible = name == "tra" or name == "tra no-contextual" and at != 3
    assert torch.allclose(out, without) == is_invisible


def test_without_its_parts_an_attention_is_nope_or_alibi():
    q, k, v = inputs("nope", 6, 9)
    nope, alibi = nope_attention(q, k, v), alibi_attention(q, k, v)
    zeros, slopes = torch.zeros(2, 2, 9).double(), -torch.tensor([2.0 ** -4, 2.0 ** -8]).double().view(2, 1)
    plain = FUNCTIONS["tra no-sparse no-contextual"]
    torch.testing.assert_close(plain(q, k, v, zeros[..., :6]), nope)
    torch.testing.assert_close(plain(q, k, v, slopes.expand(2, 2, 6)), alibi)
    torch.testing.assert_close(fox_attention(q, k, v, zeros), nope)
    torch.testing.assert_close(cope_attention(q, k, v, zeros[0, :1].expand(4, 9)), nope)


@pytest.mark.parametrize("name", SIX)
def test_dropout_falls_on_the_weights_and_keeps_their_mean(name):
    q, k, v, *more = inputs(name, 1, 50, B=400, H=1)
    torch.manual_seed(0)
    out = SIX[name](q, k, torch.ones_like(v), *more, dropout_p=0.25)[..., 0]
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.05
    assert out.round(decimals=3).unique().numel() > 50                  # on outputs, it would leave two values


# The GPT

def tiny(attn, **kwargs):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(attn=attn, vocab_size=11, n_layer=2, n_head=2, n_embd=16) | kwargs))
    for p in model.parameters():        # so that nothing rests on a zero or a one of the initialisation
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_the_future_changes_nothing(attn):
    model, idx = tiny(attn), torch.randint(0, 11, (2, 20))
    changed = torch.cat((idx[:, :12], (idx[:, 12:] + 1) % 11), dim=1)
    a, b = model(idx)[0], model(changed)[0]
    assert torch.equal(a[:, :12], b[:, :12])
    assert (a[:, 12:] != b[:, 12:]).any(-1).all()


@pytest.mark.parametrize("attn", ATTENTIONS)
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 1, 6], [3, 300, 1, 1]])       # the last outgrows the cache's room
def test_cached_logits_equal_full_logits(attn, chunks):
    model, idx = tiny(attn).double(), torch.randint(0, 11, (2, sum(chunks)))
    cache = [{} for _ in model.blocks]
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0])


@pytest.mark.parametrize("attn", ATTENTIONS)
@pytest.mark.parametrize("T", [1, 2, 400])
def test_any_length_has_the_same_gradients_in_bfloat16_autocast(attn, T):
    model, idx = tiny(attn), torch.randint(0, 11, (4, T + 1))
    gradients = []
    for is_half in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            _, loss = model(idx[:, :-1], idx[:, 1:])
        by_parameter = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in by_parameter]))
    single, half = gradients
    assert (half - single).norm() < 0.1 * single.norm()


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_generate(attn):
    """Greedy generation with the cache is argmax over full passes; sampling obeys the seed, top-k and the mode."""
    model, idx = tiny(attn).double().train(), torch.randint(0, 11, (2, 5))
    out = model.generate(idx, 8, temperature=0)
    assert model.training and out.shape == (2, 13) and torch.equal(out[:, :5], idx)
    assert torch.equal(model.generate(idx, 8, top_k=1), out)
    assert torch.equal(model.eval()(out)[0][:, 4:-1].argmax(-1), out[:, 5:])
    model(out, out)[1].backward()                   # what was generated can be trained on
    torch.manual_seed(1)
    sampled = model.generate(idx, 30, temperature=5.0)
    torch.manual_seed(1)
    assert torch.equal(sampled, model.generate(idx, 30, temperature=5.0, top_k=99))
    assert not torch.equal(sampled, model.generate(idx, 30, temperature=5.0))


def test_model_py_alone_in_a_folder_runs_the_readmes_layer_and_trains_and_generates():
    shutil.copy(HERE / "model.py", ".")
    code = code_of_readme("import torch\nfrom model") + """
from model import GPT
model, idx = GPT(GPTConfig(n_layer=1, n_embd=16)), torch.randint(64, (1, 200))
model(idx, idx)[1].backward()
print(tuple(y.shape), tuple(model.generate(idx, 3).shape))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "(2, 100, 256) (1, 203)\n", result.stderr


# -----------------------------------------------------------------------------
# The tasks

# Small sizes; a task that someone adds takes its laptop sizes.
SMALL = {"flipflop": dict(length=8), "copy": dict(length=6, symbols=5), "induct": dict(length=7, symbols=9, pairs=3),
         "instruct": dict(length=4, symbols=5)}


def parse(words, task, split):
    """Check an example, knowing nothing of how it was made. Returns its length and where its scored words stand."""
    if task.name == "flipflop":
        assert words[0] == "w" and words[-2] == "r"
        memory, scored = None, []
        for t in range(0, len(words), 2):
            assert words[t] in "wri" and words[t + 1] in "01"
            if words[t] == "w":
                memory = words[t + 1]
            if words[t] == "r":
                assert words[t + 1] == memory
                scored.append(t + 1)
        return len(words) // 2, scored
    sep = words.index("<sep>")
    first, x, answer, scored = words[0], words[1:sep], words[sep + 1:], list(range(sep + 1, len(words)))
    assert first in ("<bos>", f"<{split.split('-')[0]}>") or split == "train"
    if task.name == "induct":
        queries, answers, scored = answer[::2], answer[1::2], scored[1::2]
        assert len(queries) == len(answers) == len(set(queries)) == min(task.pairs, len(x) // 2)
        for query, next_one in zip(queries, answers):
            assert x.count(query) == 1 and x[x.index(query) + 1] == next_one and next_one not in queries
    else:
        asked_for = {"<bos>": x, "<copy>": x, "<reverse>": x[::-1], "<first>": x[:1], "<last>": x[-1:]}
        assert answer == asked_for[first] + ["<eos>"]
    assert not any(word.startswith("<") for word in x)
    return len(x), scored


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("scale, steps", [("small", 12), ("paper", 3)])
def test_every_example_is_in_the_language_and_scored_where_it_should(name, scale, steps):
    presets = {"small": SMALL, "paper": train_module.PRESETS["paper"]}
    sizes = TASKS[name].__dataclass_fields__
    task = TASKS[name](**{size: value for size, value in presets[scale][name].items() if size in sizes})
    for split, step in itertools.product(task.splits, range(steps)):
        x, y = task.batch(split, 5, step, 3)
        assert x.dtype == y.dtype == np.int64 and x.shape == y.shape
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == -1)).all()
        times = float(split.split("-")[-1].removesuffix("x")) if split.endswith("x") else 1
        for row in range(3):
            words = as_text(task, x[row], y[row], mark=False).split(" ")
            marked = as_text(task, x[row], y[row]).split(" ")
            length, scored = parse(words, task, split)
            assert length == int(task.length * times) or split == "train" and length < task.length
            assert scored == [at for at, word in enumerate(marked) if word != words[at]]
            assert scored == [at + 1 for at in np.flatnonzero(y[row] >= 0)]


@pytest.mark.parametrize("name", TASKS)
def test_streams_are_endless_seeded_and_disjoint_and_words_become_tokens(name):
    task = TASKS[name]()

    def examples(*args):
        return [tuple(np.concatenate(pair)) for pair in zip(*task.batch(*args))]

    assert examples("train", 3, 10**6, 8) == examples("train", 3, 10**6, 8) != examples("train", 4, 10**6, 8)
    seen = {example for step in range(60) for example in examples("train", 0, step, 16)}
    test_set = list(task.splits)[1]                         # as long as in training
    assert not seen.intersection(example for step in range(20) for example in examples(test_set, 0, step, 16))
    x, _ = task.batch(test_set, 0, 0, 1)
    assert task.encode(task.decode(x[0])) == x[0].tolist() and task.vocab_size == len(set(task.vocab)) > x.max()


@pytest.mark.parametrize("name, digest", [("flipflop", "261a334e12e78694"), ("copy", "919550cb2af6c69c"),
                                          ("induct", "b8c1422557147855"), ("instruct", "9f3efa0979e42928")])
def test_the_same_seed_gives_the_same_batches_on_every_machine(name, digest):
    task, sha = TASKS[name](**SMALL[name]), hashlib.sha256()
    for split, step in itertools.product(task.splits, range(3)):
        for array in task.batch(split, 7, step, 4):
            sha.update(array.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == digest


def test_flipflop_has_the_stated_probabilities():
    task = TASKS["flipflop"](length=100)
    for split, p in (("train", 0.8), ("sparse", 0.98), ("dense", 0.1)):
        x, _ = task.batch(split, 0, 0, 400)
        instructions, bits = x[:, 2:-2:2], x[:, 1::2]               # without the first and the last instruction
        for token, want in ((0, (1 - p) / 2), (1, (1 - p) / 2), (2, p)):
            assert abs((instructions == token).mean() - want) < 0.01
        assert abs((bits == 3).mean() - 0.5) < 0.05


def test_all_lengths_and_places_occur():
    def widths(name, **sizes):
        task = TASKS[name](**sizes)
        return {task.batch("train", 0, step, 1)[0].shape[1] for step in range(300)}

    assert widths("copy", length=9, symbols=4) == {2 * n + 2 for n in range(1, 10)}
    assert widths("induct", length=9, symbols=9, pairs=2) == {n + 1 + 2 * min(2, n // 2) for n in range(2, 10)}
    assert widths("instruct", length=5, symbols=4) == {2 * n + 2 for n in range(6)}
    x, _ = TASKS["induct"](length=6, symbols=9, pairs=2).batch("1x", 0, 0, 500)
    places = {(list(row[1:7]).index(row[8]), list(row[1:7]).index(row[10])) for row in x}
    assert places == {(a, b) for a in range(5) for b in range(5) if abs(a - b) > 1}


# -----------------------------------------------------------------------------
# Training


@pytest.fixture(scope="session", autouse=True)
def small_text(tmp_path_factory):
    """A small text as bytes, for --task wikitext."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "story.txt").write_text("the cat sat . a dog ran , naïve . \n" * 200, encoding="utf-8")
    data_module.prepare(str(folder / "story.txt"), out=folder / "story-byte")
    SMALL["wikitext"] = dict(window=6, data=folder / "story-byte")


def tiny_flags(task, flags=""):
    """The command line of a tiny run of TRA in the folder "run". More flags may replace these."""
    sizes = [word for name, value in SMALL.get(task, {}).items() for word in (f"--{name}", str(value))]
    model = "--attn tra --n-layer 1 --n-head 2 --n-embd 16"
    quick = "--batch 4 --steps 6 --examples 5 --log-every 2 --device cpu --out run"
    return [*sizes, *f"--task {task} {model} {quick} {flags}".split()]


def train(task, flags=""):
    """A tiny run by train.py, in this process. Returns what it writes to eval.json."""
    return train_module.train(train_module.parse_flags(tiny_flags(task, flags)))


def read_log(run="run"):
    return [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", [*TASKS, "wikitext"])
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_trains_on_every_task(capsys, attn, task):
    record, log = train(task, f"--attn {attn} --seed 3"), read_log()
    assert [row["step"] for row in log] == [2, 4, 6]
    assert log[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert (record["attn"], record["seed"], record["scale"]) == (attn, 3, "laptop")
    assert record["task"] == ("story-byte" if task == "wikitext" else task)
    assert record["results"].keys() == record["right_tokens"].keys() and f"| {attn} " in capsys.readouterr().out


def test_a_short_training_learns_flipflop_and_keeps_it_at_four_times_the_length():
    flags = "--attn tra --task flipflop --length 12 --steps 250 --examples 100 --out run"
    results = train_module.train(train_module.parse_flags(flags.split()))["results"]
    losses = [row["loss"] for row in read_log()]
    assert min(results.values()) >= 0.95 and losses[0] > 0.3 and losses[-1] < 0.05, (results, losses)


def test_accumulation_logging_and_validation_do_not_change_the_training():
    train("instruct", "--dropout 0")
    train("instruct", "--dropout 0 --accumulate 3 --log-every 3 --eval-every 2 --save-every 0 --out other")
    assert [row["step"] for row in read_log("other") if "val_loss" in row] == [2, 4, 6]
    a, b = (eval_module.load_checkpoint(run)["model"] for run in ("run", "other"))
    torch.testing.assert_close(dict(a), dict(b), rtol=1e-3, atol=1e-5)


def test_learning_rate_warms_up_and_decays_to_zero():
    args = dict(lr=1.0, warmup=0.1, steps=100)
    rates = [train_module.learning_rate(step, args) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)]) and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and all(a > b for a, b in zip(rates[10:], rates[11:])) and rates[-1] < 0.001


@pytest.mark.parametrize("flags, folder, settings", [
    ("--attn tra --task copy", "copy-tra-s0", dict(n_embd=128, beta2=0.9, warmup=0.05, length=16, sparse=True)),
    ("--attn tra --task copy --steps 50 --no-sparse --lr 0.0005 --seed 7", "copy-tra-no-sparse-steps50-lr0.0005-s7",
     dict(steps=50, sparse=False, lr=0.0005)),
    ("--attn rope --data there/book --scale paper --log-every 3", "book-rope-paper-s0", dict(n_embd=512))])
def test_flags_beat_presets_and_name_the_folder(flags, folder, settings):
    args = train_module.parse_flags(flags.split())
    assert args["out"] == os.path.join("out", folder) and {name: args[name] for name in settings} == settings


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_compiled_training_has_the_same_losses_with_two_graphs_at_most(monkeypatch, attn):
    """Lengths differ from step to step. The graphs are made and run, without a compiler behind them."""
    graphs, real_compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real_compile(function, backend=graphs))
    torch._dynamo.reset()
    for flags in ("--out plain", "--out compiled --compile"):
        train("copy", f"--attn {attn} --length 9 --steps 8 {flags}")
    plain, compiled = ([row["loss"] for row in read_log(run)] for run in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, abs=1e-4) and 1 <= graphs.frame_count <= 2


# -----------------------------------------------------------------------------
# Stopping and going on


def exit_code_when_killed_at_write(number, function):
    """Run this in a copy of the process, which is killed when it begins this part of writing a file."""
    pid = os.fork()
    if pid != 0:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    writes = itertools.count(1)

    def deadly(write):
        def wrapped(*args):
            if next(writes) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args)
        return wrapped

    try:
        torch.save, os.fsync, os.replace = deadly(torch.save), deadly(os.fsync), deadly(os.replace)
        sys.stdout = open(os.devnull, "w")
        function()
        os._exit(0)
    finally:
        os._exit(1)             # the copy must not come back, not even by an exception


def assert_ends_as_if_never_touched(task, flags):
    """The run goes on, and another one is never touched: all that they leave behind is the same."""
    assert train(task, f"{flags} --resume")["results"] == train(task, f"{flags} --out untouched")["results"]
    assert set(os.listdir("run")) == {"ckpt.pt", "log.jsonl", "eval.json"}
    a, b = (eval_module.load_checkpoint(run) for run in ("run", "untouched"))
    for part in ("model", "optimizer", "random", "history"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)
    a, b = read_log("run"), read_log("untouched")
    for row in a + b:
        row.pop("tokens_per_second", None)
    assert a == b and a[-1]["step"] == 6


@needs_fork
@pytest.mark.parametrize("task", ["copy", "wikitext"])
def test_a_run_killed_again_and_again_ends_as_if_never_touched(task):
    """At the first write of the first attempt, at the second write of the second, until an attempt survives."""
    flags = "--dropout 0.2 --eval-every 3"
    for number in itertools.count(1):
        resume = "--resume" if os.path.exists("run/ckpt.pt") else ""
        code = exit_code_when_killed_at_write(number, lambda: train(task, f"{flags} --save-every 0 {resume}"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert number > 10                                      # it died ten times, each time elsewhere
    assert_ends_as_if_never_touched(task, flags)


@pytest.mark.parametrize("attn, optimizer", [
    *((attn, train_module.make_optimizer) for attn in ATTENTIONS),
    ("tra", lambda model, args: torch.optim.SGD(model.parameters(), momentum=0.9))])
def test_a_stopped_run_goes_on_as_if_never_stopped(monkeypatch, capsys, attn, optimizer):
    flags = f"--attn {attn} --dropout 0.3"
    monkeypatch.setattr(train_module, "make_optimizer", optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requests", [signal.SIGINT])
        train("copy", flags)
    message = capsys.readouterr().out.splitlines()[-1]
    assert "stopped after step 1" in message and "--resume" in message and not os.path.exists("run/eval.json")
    assert_ends_as_if_never_touched("copy", flags)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_script_saves_and_is_no_error(signum):
    command = [sys.executable, HERE / "train.py", *tiny_flags("copy", "--steps 20000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while (line := process.stdout.readline()) and not line.startswith("step"):
        pass
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in out
    assert eval_module.load_checkpoint("run")["step"] > 0


def test_an_existing_run_is_not_overwritten_and_resumed_only_as_it_was():
    train("copy")
    for flags, reason in (("", "--resume goes on"), ("--lr 1 --resume", "was started with lr 0.002")):
        with pytest.raises((FileExistsError, ValueError), match=reason):
            train("copy", flags)
    assert train("copy", "--attn rope --overwrite")["attn"] == "rope" and len(read_log()) == 3


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved():
    with pytest.raises(ValueError, match="lower --lr"):
        train("copy", "--lr 1e30 --steps 50 --save-every 0")
    assert all(tensor.isfinite().all() for tensor in eval_module.load_checkpoint("run")["model"].values())


# -----------------------------------------------------------------------------
# Measuring


def test_exact_match_equals_greedy_generation_and_counts_examples():
    """The prompt is fed, the rest generated greedily: the same examples are right."""
    # Trained a little: right on some, wrong on others.
    train("copy", "--length 2 --symbols 4 --n-layer 2 --n-embd 32 --batch 32 --steps 150")
    model, task = eval_module.load("run", "cpu")
    right, right_tokens = [], []
    for x, y, predicted, _ in eval_module.predictions(model, task, "1x", 2001):
        start = int((y[0] >= 0).float().argmax()) + 1
        out = model.generate(x[:, :start], y.shape[1] + 1 - start, temperature=0)
        right += (out[:, start:] == y[:, start - 1:]).all(1).tolist()
        right_tokens += (predicted == y)[y >= 0].tolist()
    found = eval_module.measure(model, task, "1x", 2001)
    assert len(right) == 2001 and 0 < sum(right) < 2001
    assert found["exact match"] == np.mean(right) and found["right tokens"] == np.mean(right_tokens)


@pytest.mark.parametrize("window", [1, 16, 99, 100, 500])
def test_perplexity_scores_every_token_once_as_a_mean_over_tokens(window):
    model, task = tiny("tra", vocab_size=256), data_module.Text(**SMALL["wikitext"])
    tokens = torch.from_numpy(task.tokens["test"][:101].astype("int64"))
    total = 0.0
    for start in range(0, 100, window):
        part = tokens[start:start + window + 1]
        total -= model(part[None, :-1])[0].log_softmax(-1)[0].gather(1, part[1:, None]).sum().item()
    found = eval_module.measure(model, task, str(window), 101)
    assert found["loss"] == pytest.approx(total / 100, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / 100), rel=1e-4)


def make_record(value=0.5, **changes):
    settings = {"lr": 0.002, "sparse": True, "steps": 10} | changes.pop("settings", {})
    return {"task": "copy", "attn": "tra", "seed": 0, "scale": "laptop", "metric": "exact match", "examples": 100,
            "results": {"1x": 1.0, "2x": value}, "right_tokens": {"1x": 1.0, "2x": value},
            "settings": settings} | changes


def rows_of(table):
    """The cells of a Markdown table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_a_row_has_mean_and_spread_over_seeds_and_100_where_nothing_was_wrong():
    table = eval_module.table([make_record(0.9999), make_record(1.0, seed=1), make_record(attn="rope")])
    assert table.startswith("copy, laptop scale: exact match in %, examples per test set: 100\n")
    assert rows_of(table) == [["tra", "2", "100.0 ± 0.0", "99.9 ± 0.0"], ["rope", "1", "100.0", "50.0"]]


@pytest.mark.parametrize("change, name", [
    (dict(settings={"lr": 0.0005}), "tra lr=0.0005"), (dict(settings={"sparse": False}), "tra no-sparse"),
    (dict(settings={"steps": 20}), "tra steps=20"), (dict(examples=7), "tra examples=7"),
    (dict(attn="rope", settings={"reach": 4}), "rope reach=4"), (dict(settings={"rotary": True}), "tra rotary"),
    (dict(seed=5), "tra")])
def test_runs_that_differ_in_more_than_the_seed_get_rows_that_say_in_what(change, name):
    [(_, rows)] = eval_module.group([make_record(), make_record(0.7, **change)])
    assert name in rows and len(rows) == (1 if "seed" in change else 2)


def test_eval_finds_runs_measures_again_shows_mistakes_and_continues_a_prompt(capsys):
    def printed(*words):
        capsys.readouterr()
        eval_module.main(words)
        return capsys.readouterr().out

    train("copy", "--out out/copy0")
    train("copy", "--out out/copy1 --seed 1")
    train("copy", "--out out/copy2 --lr 0.1")
    train("wikitext", "--out out/story")
    for runs in ([], ["out"], ["out/copy*", "out/story"]):
        out = printed(*runs)
        assert "| tra lr=0.002 |     2 |" in out and "| tra lr=0.1   |     1 |" in out and "story-byte" in out, out
    out = printed("out/copy1", "--examples", "50", "--split", "2x,4x")
    assert "test set: 50" in out and "|  2x |  4x |" in out
    out = printed("out/copy1", "--mistakes", "2")
    assert out.count(" scored tokens are right") == 2 and len(re.findall(r"\[\w->\S+\]", out)) > 1
    assert len(printed("out/copy1", "--prompt", "<bos> a b <sep>", "--count", "3").split(": ")[1].split()) == 7
    assert ": the cat" in printed("out/story", "--prompt", "the cat", "--count", "9")
    assert re.search(r"\| +6 \| +50 \|", printed("out/story", "--windows", "6,50"))


# -----------------------------------------------------------------------------
# Texts

PARTS = {"wiki.train.raw": "The <unk> cat . \n\n 日本 été \n" * 30, "wiki.valid.raw": "a dog ran \n" * 9,
         "wiki.test.raw": "in été \n" * 9}


def make_zip():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in PARTS.items():
            archive.writestr(f"anywhere/{name}", text)
    return file.getvalue()


def decoded(folder):
    task = data_module.Text(str(folder), window=4)
    return [task.decode(task.tokens[split]) for split in ("train", "val", "test")]


@pytest.fixture
def mirror(monkeypatch):
    """The address of a web server with a small zip, /good; /short, /wrong and /gone fail, each in its own way."""
    body = make_zip()
    pages = {"/good": body, "/short": body[:-99], "/wrong": body[:-1] + b"?"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            # One of the real mirrors refuses Python's own User-Agent.
            page = None if "python" in self.headers["User-Agent"].lower() else pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(page or b"")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(data_module.WIKITEXTS, "wikitext-2", (hashlib.sha256(body).hexdigest(), []))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["/short", "/wrong", "/gone"])
def test_a_download_that_fails_leaves_nothing_and_the_next_mirror_is_tried(mirror, capsys, path):
    _, urls = data_module.WIKITEXTS["wikitext-2"]
    urls.append(mirror + path)
    with pytest.raises(OSError, match="could not fetch wikitext-2"):
        data_module.main([])
    assert not os.listdir()
    urls.append(mirror + "/good")
    data_module.main([])
    assert decoded("data/wikitext-2-byte") == list(PARTS.values())
    assert capsys.readouterr().out.endswith(f"python train.py --attn tra --data {Path('data/wikitext-2-byte')}\n")


def test_zip_folder_and_text_file_hold_the_same_text():
    Path("copy.zip").write_bytes(make_zip())
    Path("wiki").mkdir()
    for name, text in PARTS.items():
        Path("wiki", name).write_text(text, encoding="utf-8", newline="")
    Path("book.txt").write_text("".join(PARTS.values()), encoding="utf-8", newline="")
    for source in ("copy.zip", "wiki", "book.txt"):
        data_module.prepare(source)
    assert decoded("data/copy-byte") == decoded("data/wiki-byte") == list(PARTS.values())
    assert "".join(decoded("data/book-byte")) == "".join(PARTS.values())
    with pytest.raises(FileExistsError, match="already there"):
        data_module.prepare("book.txt")


@needs_fork
def test_a_text_that_is_half_prepared_is_never_taken_for_done():
    Path("book.txt").write_text("line\n" * 100)
    assert exit_code_when_killed_at_write(1, lambda: data_module.prepare("book.txt")) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="holds no prepared text"):
        decoded("data/book-byte")
    data_module.prepare("book.txt")
    assert "".join(decoded("data/book-byte")) == "line\n" * 100


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("command, reason", [
    ("train.py", "--attn tra --task copy"),
    ("train.py --attn tra --task copy --pairs 3", "--pairs"),
    ("train.py --attn tra --task copy --n-head 3", "divisible"),
    ("train.py --attn tra --task copy --dropout 1", "dropout must be"),
    ("train.py --attn rope --task copy --n-embd 12", "must be even"),
    ("train.py --attn rope --task copy --no-sparse", "parts of TRA"),
    ("train.py --attn tra --task induct --symbols 3", "more symbols than pairs"),
    ("train.py --attn tra --task copy --device cuda:99", "does not work here"),
    ("train.py --attn tra --data nowhere", "make one with data.py"),
    ("train.py --attn tra --task copy --resume --out nowhere", "holds no run"),
    ("eval.py nowhere", "holds no run"),
    ("eval.py damaged", "is damaged"),
    ("data.py nowhere.txt", "neither a file nor a folder"),
    ("data.py binary.txt", "not UTF-8"),
    ("data.py short.txt", "too few lines"),
    ("tasks.py --task copy --split 9x", "choose one of train, 1x"),
    ("tasks.py --task copy --pairs 3", "copy has no pairs"),
])
def test_bad_input_gets_one_line_and_an_exit_code(monkeypatch, capsys, command, reason):
    Path("binary.txt").write_bytes(b"\xff\xfe line\n" * 100)
    Path("short.txt").write_text("short")
    Path("damaged").mkdir()
    Path("damaged/ckpt.pt").write_bytes(b"half a checkpoint")
    monkeypatch.setattr(sys, "argv", command.split())
    # The scripts would take Ctrl-C from pytest.
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(HERE / sys.argv[0]), run_name="__main__")
    # Python prints the text that sys.exit() gets, and makes it the exit code 1.
    text = capsys.readouterr().err + (end.value.code if isinstance(end.value.code, str) else "")
    lines = [line for line in text.splitlines() if not line.startswith("usage: ")]
    assert end.value.code and len(lines) == 1 and reason in lines[0], text


def test_nothing_in_a_checkpoint_is_ever_run():
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("evil",)

    torch.save({"config": Evil()}, "ckpt.pt")
    with pytest.raises(ValueError, match="damaged"):
        eval_module.load(".")
    assert os.listdir() == ["ckpt.pt"]


def test_a_synthetic_task_needs_neither_tiktoken_nor_pytest():
    code = "import sys; import train; print(sorted({'tiktoken', 'pytest', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.stdout == "[]\n"


# -----------------------------------------------------------------------------
# The README


def test_the_readme_has_the_two_commands_and_quotes_the_code_its_output_and_the_table(monkeypatch, capsys):
    for line in ("pip install -r requirements.txt && python train.py --attn tra --task copy",
                 "pip install -r requirements.txt && pytest"):
        assert line in README.splitlines()
    assert code_of_readme("mask = ") in (HERE / "model.py").read_text(encoding="utf-8")
    model_module.worked_example()
    assert code_of_readme("One query").rstrip() == capsys.readouterr().out.rstrip()
    monkeypatch.chdir(HERE)
    importlib.import_module("extras.campaign").main(["--summary"])
    assert capsys.readouterr().out in README
    eval_module.main(["results/runs.jsonl"])
    assert capsys.readouterr().out in (HERE / "results" / "README.md").read_text(encoding="utf-8")


def test_the_readme_runs_from_top_to_bottom(monkeypatch):
    """Every command and example, in this order, in one folder, with small presets and no network."""
    Path("book.txt").write_text("a line of a book\n" * 500)
    byte_tokenizer = data_module.tokenizer("byte")
    monkeypatch.setattr(data_module, "download", lambda name: make_zip())
    monkeypatch.setattr(data_module, "tokenizer", lambda name: byte_tokenizer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    small = dict(n_layer=2, n_head=4, n_embd=16, batch=2, steps=2, examples=20)
    monkeypatch.setattr(train_module, "PRESETS", {
        scale: {task: preset | small | ({"window": 4} if task == "wikitext" else {"length": 4})
                for task, preset in presets.items()} for scale, presets in train_module.PRESETS.items()})
    monkeypatch.setattr(data_module.Text, "validation", ("val", 100))
    mains = {"model.py": lambda words: model_module.worked_example(),
             "train.py": lambda words: train_module.train(train_module.parse_flags(words))}
    commands = 0
    for block in BLOCKS:
        if block.startswith("import "):
            exec(block, {})
        for command in re.findall(r"^(?:.*&& )?python (?:-m )?(.*)", block, re.MULTILINE):
            if "results/runs.jsonl" in command:
                continue                # it is in the repository; the test above reads it
            name, *words = shlex.split(command.replace("--compile", "").replace("4000", "40"))
            if ".png" in command and importlib.util.find_spec("matplotlib") is None:
                continue
            if name == "extras.bench":
                words += ["--windows", "16", "--attn", "tra", "--batch", "1", "--tokens", "4"]
            main = mains.get(name) or importlib.import_module(name.removesuffix(".py")).main
            main(words)
            commands += 1
    assert commands > 20


def test_the_readmes_own_attention_and_task_work():
    """Pasted where the README says, they train, have flags, folders and rows of their own, and pass the tests."""
    edits = {
        "model.py": [("# To add one", code_of_readme("def near") + "\n\n# To add one"),
                     ('"fox": FoX}', '"fox": FoX, "near": Near}'),
                     ("\n    def __post_init__", code_of_readme("reach") + "\n    def __post_init__")],
        "tasks.py": [("# To add one", code_of_readme("@dataclass") + "\n\n# To add one"),
                     ('"instruct": Instruct}', '"instruct": Instruct, "repeat": Repeat}')],
    }
    for name in ("model.py", "tasks.py", "data.py", "train.py", "eval.py", "test_model.py", "README.md"):
        text = (HERE / name).read_text(encoding="utf-8")
        for old, new in edits.get(name, []):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path(name).write_text(text, encoding="utf-8")
    code = """
import sys, eval, pytest, tasks, train
tasks.main("--task repeat --length 3 --times 4 --plain --split 2x --count 1".split())
for flags in ("--reach 4", ""):
    flags += " --attn near --task repeat --times 3 --length 4 --steps 3 --examples 5 --n-embd 16 --device cpu"
    train.train(train.parse_flags(flags.split()))
eval.main([])
chosen = "near and (copy or future or cached or bfloat16) or repeat and streams"
sys.exit(pytest.main(["-q", "-k", chosen, "test_model.py"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    asked, answer = result.stdout.splitlines()[0].removeprefix("<bos> ").split(" <sep> ")
    assert answer == " ".join([asked] * 4) + " <eos>"
    runs = os.listdir("out")
    assert len(runs) == 2 and all("times3" in run for run in runs)
    assert "| near reach=4 " in result.stdout and "| near reach=16 " in result.stdout
