"""
All tests: pytest

Attention against oracles of plain loops, the GPT, the tasks against independent parsers, training, resuming, tables,
texts, bad input, the README. Tests that are parametrised over ATTENTIONS or TASKS pick up a new one by themselves.
"""

import contextlib
import functools
import hashlib
import http.server
import importlib.util
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import data as data_module
import eval as eval_module
import train as train_module
from model import (ATTENTIONS, GPT, GPTConfig, alibi_attention, cope_attention, fox_attention, nope_attention,
                   rope_attention, tra_attention, worked_example)
from tasks import TASKS, as_text

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
torch.set_num_threads(1)        # tiny models: more threads only cost


WIKI = {"wiki.train.raw": "The <unk> cat . \n\n 日本 été \n" * 30, "wiki.valid.raw": "a dog ran \n" * 9,
        "wiki.test.raw": "in été \n" * 30}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test runs in a folder of its own, which holds a small text: as a folder, as a zip and as token ids."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("wiki")
    for name, text in WIKI.items():
        Path("wiki", name).write_bytes(text.encode())
    shutil.make_archive("copy", "zip", ".", "wiki")
    data_module.prepare("wiki", out="wiki-byte")


def code_of_readme(start):
    """The block of the README that begins with these words."""
    return next(block for block in BLOCKS if block.lstrip().startswith(start))


# -----------------------------------------------------------------------------
# Attention functions against loops

THETA = 100.0
FUNCTIONS = {"tra": tra_attention, "rope": functools.partial(rope_attention, theta=THETA), "cope": cope_attention,
             "nope": nope_attention, "alibi": alibi_attention, "fox": fox_attention,
             "tra no-sparse": functools.partial(tra_attention, sparse=False),
             "tra no-contextual": functools.partial(tra_attention, contextual=False),
             "tra no-sparse no-contextual": functools.partial(tra_attention, sparse=False, contextual=False)}


def oracle(name, q, k, v, extra=None):
    """An attention by loops. extra: the gates of TRA (B, H, T) or of FoX (B, H, S), CoPE's learned positions."""
    (B, H, T, D), S = q.shape, k.size(2)
    out = torch.zeros_like(q)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        i = S - T + t
        scores = [q[b, h, t] @ k[b, h, j] / math.sqrt(D) for j in range(i + 1)]
        logits = {}                                         # of the keys that stay in the softmax
        for j, score in enumerate(scores):
            between = range(j, i + 1)
            if name == "nope":
                logits[j] = score
            elif name == "alibi":
                logits[j] = score - 2 ** (-8 * (h + 1) / H) * (i - j)
            elif name == "fox":
                logits[j] = score + sum(extra[b, h, l] for l in between if l > j)
            elif name == "rope":
                # Pairs as complex numbers, turned by distance times speed.
                query, key = (torch.complex(*x.chunk(2)) for x in (q[b, h, t], k[b, h, j]))
                angle = (i - j) * THETA ** (-torch.arange(0, D, 2, dtype=q.dtype) / D)
                logits[j] = (query * key.conj() * torch.exp(1j * angle)).real.sum() / math.sqrt(D)
            elif name == "cope":
                p = sum(1 / (1 + torch.exp(-scores[l])) for l in between).clamp(max=extra.size(1) - 1)
                low, high = math.floor(p.item()), math.ceil(p.item())
                logits[j] = score + q[b, h, t] @ (extra[:, low] * (1 - (p - low)) + extra[:, high] * (p - low))
            elif score > 0 or "no-sparse" in name:
                n = sum(1 for l in between if scores[l] > 0 or "no-contextual" in name)
                logits[j] = score + extra[b, h, t] * n
        if logits:
            out[b, h, t] = torch.stack(list(logits.values())).softmax(0) @ v[b, h, list(logits)]
    return out


def inputs(name, T, S, B=2, H=2, D=4):
    """Random q, k, v and whatever else this attention takes, as leaves with gradients."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = [randn(B, H, T, D), randn(B, H, S, D), randn(B, H, S, D)]
    if name.startswith("tra") or name == "fox":
        tensors.append(F.logsigmoid(3 + randn(B, H, S if name == "fox" else T)))
    if name == "cope":
        tensors.append(randn(D, S // 2 + 1))                # so few positions that some distances are clamped
    return [x.requires_grad_() for x in tensors]


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_counts_and_positions_past_256_are_exact_in_half_precision(name):
    """bfloat16 cannot hold them. With the identity for v, the output is the weights."""
    leaves = [x.detach().bfloat16() for x in inputs(name, 1, 900, B=1)]
    leaves[2] = torch.eye(900).bfloat16().expand(1, 2, 900, 900)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = FUNCTIONS[name](*leaves)
    want = FUNCTIONS[name](*[x.double() for x in leaves])
    torch.testing.assert_close(got, want.bfloat16(), rtol=0.05, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_irrelevant_keys_are_invisible_to_tra_and_to_no_other(name):
    """One query on eleven keys, and without the five in the middle, whose scores are negative."""
    q, k, v, *more = inputs(name, 1, 11, B=1, H=1)
    is_new = (torch.arange(11) >= 3) & (torch.arange(11) < 8)
    k = torch.where((k @ q.mT > 0) == is_new[:, None], -k, k)
    out = FUNCTIONS[name](q, k, v, *more)
    more = [more[0][..., ~is_new]] if name == "fox" else more
    without = FUNCTIONS[name](q, k[:, :, ~is_new], v[:, :, ~is_new], *more)
    assert torch.allclose(out, without) == (name == "tra")


def test_without_its_parts_an_attention_is_nope_or_alibi():
    q, k, v = inputs("nope", 6, 9)
    nope, alibi = nope_attention(q, k, v), alibi_attention(q, k, v)
    zeros, slopes = torch.zeros(2, 2, 9).double(), -torch.tensor([2.0 ** -4, 2.0 ** -8]).double().view(2, 1)
    plain = FUNCTIONS["tra no-sparse no-contextual"]
    torch.testing.assert_close(plain(q, k, v, zeros[..., :6]), nope)
    torch.testing.assert_close(plain(q, k, v, slopes.expand(2, 2, 6)), alibi)
    torch.testing.assert_close(fox_attention(q, k, v, zeros), nope)
    torch.testing.assert_close(cope_attention(q, k, v, zeros[0, :1].expand(4, 9)), nope)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropout_falls_on_the_weights_and_keeps_their_mean(name):
    q, k, v, *more = inputs(name, 1, 50, B=400, H=1)
    torch.manual_seed(0)
    out = FUNCTIONS[name](q, k, torch.ones_like(v), *more, dropout_p=0.25)[..., 0]
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.05
    assert out.round(decimals=3).unique().numel() > 50                  # on outputs, it would leave two values


# The GPT

def tiny(attn, **kwargs):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(attn=attn, vocab_size=11, n_layer=2, n_head=2, n_embd=16) | kwargs))
    for p in model.parameters():        # so that nothing rests on a zero or a one of the initialisation
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("tra")])
def test_the_tra_layer_normalises_q_and_k_and_has_the_parts_that_its_settings_say(name):
    model = tiny("tra", sparse="no-sparse" not in name, contextual="no-contextual" not in name).double()
    layer, x = model.blocks[0].attn, torch.randn(1, 6, 16).double()
    q, k, v = layer.qkv(x).view(1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q, k = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (q, k))
    gates = torch.sigmoid(x @ layer.forget.weight.T + layer.forget.bias).log().transpose(1, 2)
    torch.testing.assert_close(layer(x), layer.proj(oracle(name, q, k, v, gates).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_the_future_changes_nothing_and_cached_logits_equal_full_logits(attn):
    chunks = [1, 1, 9, 300, 1, 6]
    model, idx = tiny(attn).double(), torch.randint(0, 11, (2, sum(chunks)))
    changed = torch.cat((idx[:, :200], (idx[:, 200:] + 1) % 11), dim=1)
    cache = [{} for _ in model.blocks]
    with torch.no_grad():
        logits = model(idx)[0]
        torch.testing.assert_close(model(changed)[0][:, :200], logits[:, :200])
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits)


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_generate(attn):
    """Greedy generation with the cache is argmax over full passes; samples differ, but for top-k 1."""
    model, idx = tiny(attn).double().train(), torch.randint(0, 11, (2, 5))
    out = model.generate(idx, 8, temperature=0)
    assert model.training and out.shape == (2, 13) and torch.equal(out[:, :5], idx)
    assert torch.equal(model.generate(idx, 8, top_k=1), out)
    assert torch.equal(model.eval()(out)[0][:, 4:-1].argmax(-1), out[:, 5:])
    model(out, out)[1].backward()                   # what was generated can be trained on
    assert not torch.equal(model.generate(idx, 30), model.generate(idx, 30))


def test_model_py_alone_in_a_folder_runs_the_readmes_layer_and_trains_and_generates():
    shutil.copy(HERE / "model.py", ".")
    code = code_of_readme("import torch\nfrom model") + """
from model import GPT
model, idx = GPT(GPTConfig(n_layer=1, n_embd=16)), torch.randint(64, (1, 200))
model(idx, idx)[1].backward()
print(tuple(y.shape), tuple(model.generate(idx, 3).shape))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(2, 100, 256) (1, 203)\n"


# -----------------------------------------------------------------------------
# The tasks

# Small sizes; a task that someone adds takes its laptop sizes. Past 62 symbols, letters and digits do not suffice.
SMALL = {"flipflop": dict(length=8), "copy": dict(length=6, symbols=64), "induct": dict(length=7, symbols=9, pairs=3),
         "instruct": dict(length=4, symbols=5), "wikitext": dict(data="wiki-byte", window=6)}


def parse(words, task, split):
    """Check an example, knowing nothing of how it was made. Returns its length and where its scored words stand."""
    if task.name == "flipflop":
        assert re.fullmatch("w [01]( [wri] [01])* r [01]", " ".join(words))
        scored = [at + 1 for at, word in enumerate(words) if word == "r"]
        for at in scored:
            latest_write = max(i for i in range(at) if words[i] == "w")
            assert words[at] == words[latest_write + 1]
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


@pytest.mark.parametrize("name", ["flipflop", "copy", "induct", "instruct"])
def test_every_example_is_in_the_language_and_scored_where_it_should(name):
    task = TASKS[name](**SMALL[name])
    for split, step in itertools.product(task.splits, range(12)):
        x, y = task.batch(split, 5, step, 3)
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == -1)).all()
        times = float(split.split("-")[-1].removesuffix("x")) if split.endswith("x") else 1
        for ids, targets in zip(x, y):
            words = as_text(task, ids, targets, mark=False).split(" ")
            marked = as_text(task, ids, targets).split(" ")
            length, scored = parse(words, task, split)
            assert length == int(task.length * times) or split == "train" and length < task.length
            assert scored == [at for at, word in enumerate(marked) if word != words[at]]
            assert scored == [at + 1 for at in np.flatnonzero(targets >= 0)]


@pytest.mark.parametrize("name", TASKS)
def test_streams_are_endless_and_seeded_and_training_never_meets_the_tests(name):
    task = TASKS[name]()
    test_set = list(task.splits)[1]                         # as long as in training

    def examples(split, seed, *steps):
        return {tuple(ids) for step in steps for ids in task.batch(split, seed, step, 16)[0]}

    assert examples("train", 3, 10**6) == examples("train", 3, 10**6) != examples("train", 4, 10**6)
    assert not examples("train", 0, *range(60)) & examples(test_set, 0, *range(20))


@pytest.mark.parametrize("name, digest", [("flipflop", "80612196b1d68bc7"), ("copy", "951b9cc0deefe79e"),
                                          ("induct", "cb33892bace6c8e6"), ("instruct", "be5ec439d2e4e09a")])
def test_the_same_seed_gives_the_same_batches_on_every_machine(name, digest):
    task, sha = TASKS[name](), hashlib.sha256()
    for split, step in itertools.product(task.splits, range(3)):
        for array in task.batch(split, 7, step, 4):
            sha.update(array.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == digest


def test_flipflop_has_the_stated_probabilities():
    task = TASKS["flipflop"](length=100)
    for split, p in (("train", 0.8), ("sparse", 0.98), ("dense", 0.1)):
        tokens = task.batch(split, 0, 0, 400)[0][:, 2:-1].ravel()       # without the first and the last instruction
        shares = np.bincount(tokens) / (len(tokens) / 2)                # of w, r and i, and of the bits 0 and 1
        assert shares == pytest.approx([(1 - p) / 2, (1 - p) / 2, p, 0.5, 0.5], abs=0.01)


# -----------------------------------------------------------------------------
# Training, stopping and going on

def tiny_flags(task, flags=""):
    """The command line of a tiny run of TRA in the folder "run". More flags may replace these."""
    sizes = " ".join(f"--{name} {value}" for name, value in SMALL.get(task, {}).items())
    model = "--attn tra --n-layer 1 --n-head 2 --n-embd 16"
    quick = "--batch 4 --steps 6 --examples 5 --log-every 2 --device cpu --out run"
    return f"--task {task} {sizes} {model} {quick} {flags}".split()


def train(task, flags=""):
    """A tiny run by train.py, in this process. Returns what it writes to eval.json."""
    return train_module.train(train_module.parse_flags(tiny_flags(task, flags)))


def read_log(run="run"):
    return [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", [*TASKS, "wikitext"])
@pytest.mark.parametrize("attn", ATTENTIONS)
def test_every_attention_trains_on_every_task(capsys, attn, task):
    record = train(task, f"--attn {attn} --seed 3")
    assert (record["task"], record["attn"], record["seed"]) == (task.replace("wikitext", "wiki-byte"), attn, 3)
    assert [row["step"] for row in read_log()] == [2, 4, 6] and f"| {attn} " in capsys.readouterr().out


def test_a_short_training_learns_flipflop_and_keeps_it_at_four_times_the_length():
    flags = "--attn tra --task flipflop --length 12 --steps 200 --examples 100 --out run"
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
    rates = [train_module.learning_rate(step, dict(lr=1.0, warmup=0.1, steps=100)) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)]) and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and all(a > b for a, b in zip(rates[10:], rates[11:])) and rates[-1] < 0.001


def test_weight_decay_spares_vectors_and_forget_gates():
    model = tiny("tra")
    decayed, _ = train_module.make_optimizer(model, dict(weight_decay=0.2, beta2=0.9)).param_groups
    want = [p for name, p in model.named_parameters() if "norm" not in name and "forget" not in name]
    assert decayed["weight_decay"] == 0.2 and list(map(id, decayed["params"])) == list(map(id, want))


def test_flags_beat_presets_which_beat_defaults_and_flags_name_the_folder():
    flags = "--attn tra --data there/book --scale paper --no-sparse --lr 0.0005 --log-every 3 --seed 7"
    args = train_module.parse_flags(flags.split())
    settings = dict(sparse=False, contextual=True, lr=0.0005, warmup=0.05, n_embd=512, log_every=3)
    assert args == args | settings | {"out": os.path.join("out", "book-tra-paper-no-sparse-lr0.0005-s7")}


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_compiled_and_half_precision_training_have_the_same_losses_with_two_graphs_at_most(monkeypatch, attn):
    """Lengths differ from step to step. The graphs are made and run, without a compiler behind them."""
    from torch._dynamo.testing import CompileCounter
    graphs, losses = CompileCounter(), {}
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    for how in ("--dtype float32", "--compile", "--dtype bfloat16"):
        train("copy", f"--attn {attn} --length 9 --steps 8 --overwrite {how}")
        losses[how] = [row["loss"] for row in read_log()]
    single, compiled, half = losses.values()
    assert compiled == pytest.approx(single, abs=1e-4) and 1 <= graphs.frame_count <= 2
    assert half == pytest.approx(single, abs=0.02) and half != single


def assert_ends_as_if_never_touched(task, flags):
    """The run goes on, and another one is never touched: all that they leave behind is the same."""
    assert train(task, f"{flags} --resume")["results"] == train(task, f"{flags} --out untouched")["results"]
    assert set(os.listdir("run")) == {"ckpt.pt", "log.jsonl", "eval.json"}
    a, b = (eval_module.load_checkpoint(run) for run in ("run", "untouched"))
    for part in ("model", "optimizer", "random", "history"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)
    a, b = ([row | {"tokens_per_second": 0} for row in read_log(run)] for run in ("run", "untouched"))
    assert a == b


def test_a_run_that_dies_again_and_again_ends_as_if_never_touched(monkeypatch):
    """In the first attempt at the first save, in the second at the second, ...; with another optimizer in place."""
    monkeypatch.setattr(train_module, "make_optimizer",
                        lambda model, args: torch.optim.SGD(model.parameters(), momentum=0.9))
    flags = "--dropout 0.2 --eval-every 3"
    for attempt in itertools.count(1):
        resume = "--resume" if os.path.exists("run/ckpt.pt") else ""
        fate = [mock.DEFAULT] * (attempt - 1) + [KeyboardInterrupt]
        with mock.patch("os.replace", wraps=os.replace, side_effect=fate), contextlib.suppress(KeyboardInterrupt):
            train("wikitext", f"{flags} --save-every 0 {resume}")
            break
    assert attempt == 5                                     # it died four times, each time elsewhere
    assert_ends_as_if_never_touched("wikitext", flags)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_script_which_saves_and_goes_on_as_if_never_stopped(monkeypatch, capsys, signum):
    """It comes at the validation after step 3, and is heard after step 4."""
    flags, handlers, measure = "--dropout 0.3 --eval-every 3", {}, eval_module.measure

    def measure_and_signal(*args):
        handlers[signum](signum, None)
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(eval_module, "measure", measure_and_signal)
        patch.setattr(signal, "signal", handlers.__setitem__)
        patch.setattr(sys, "argv", ["train.py", *tiny_flags("copy", flags)])
        runpy.run_path(str(HERE / "train.py"), run_name="__main__")
    assert handlers[signum] == signal.SIG_DFL               # a second one ends the run at once
    assert "stopped after step 4" in capsys.readouterr().out and eval_module.load_checkpoint("run")["step"] == 4
    assert_ends_as_if_never_touched("copy", flags)


def test_an_existing_run_is_not_overwritten_and_resumed_only_as_it_was():
    train("copy")
    for flags, reason in (("", "--resume goes on"), ("--lr 1 --resume", "was started with lr 0.002"),
                          ("--steps 5 --resume", "at step 6 already")):
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
    """A model that is right on some, wrong on others, is given the prompt and generates the rest."""
    train("copy", "--length 2 --symbols 4 --n-layer 2 --n-embd 32 --batch 32 --steps 150")
    model, task = eval_module.load("run", "cpu")
    right, right_tokens = [], []
    for x, y, predicted, _ in eval_module.predictions(model, task, "1x", 2001):
        out = model.generate(x[:, :4], 3, temperature=0)        # <bos> a b <sep>, and then a b <eos>
        right += (out[:, 4:] == y[:, 3:]).all(1).tolist()
        right_tokens += (predicted == y)[:, 3:].flatten().tolist()
    found = eval_module.measure(model, task, "1x", 2001)
    assert len(right) == 2001 and 0 < sum(right) < 2001
    assert found["exact match"] == np.mean(right) and found["right tokens"] == np.mean(right_tokens)


def test_a_text_trains_on_its_first_part_and_predicts_the_tokens_that_follow():
    task = data_module.Text("wiki-byte", window=6)
    first_part = bytes(task.tokens["train"].tolist())
    for ids, targets in zip(*task.batch("train", seed=0, step=0, size=50)):
        assert bytes([*ids, targets[-1]]) in first_part and ids[1:].tolist() == targets[:-1].tolist()


@pytest.mark.parametrize("window", [1, 16, 99, 100, 101, 500])
def test_perplexity_scores_every_token_once_as_a_mean_over_tokens(window):
    model, task = tiny("tra", vocab_size=256), data_module.Text("wiki-byte", window=6)
    tokens = torch.from_numpy(task.tokens["test"][:101].astype("int64"))
    total = 0.0
    for start in range(0, 100, window):
        part = tokens[start:start + window + 1]
        total -= model(part[None, :-1])[0].log_softmax(-1)[0].gather(1, part[1:, None]).sum().item()
    found = eval_module.measure(model, task, str(window), 101)
    assert found["perplexity"] == pytest.approx(math.exp(total / 100), rel=1e-4)


def test_rows_have_mean_and_spread_over_seeds_and_records_older_than_a_setting_had_its_default():
    """The order of rows and the layout are tested on the tables of results/README.md."""
    runs = [(0.2, {}), (0.4, {"forget_bias": 0.0}), (0.9999, {"forget_bias": 3.0, "sparse": False, "reach": 4})]
    records = [{"task": "copy", "attn": "tra", "scale": "laptop", "metric": "exact match", "examples": 100,
                "results": {"2x": value}, "settings": settings} for value, settings in runs]
    assert eval_module.table(records).splitlines()[-2:] == [
        "| tra forget_bias=0.0                   |     2 | 30.0 ± 14.1 |",
        "| tra forget_bias=3.0 no-sparse reach=4 |     1 |        99.9 |"]


def test_eval_finds_runs_measures_again_shows_mistakes_and_continues_a_prompt(capsys):
    def printed(command):
        capsys.readouterr()
        eval_module.main(shlex.split(command))
        return capsys.readouterr().out

    train("copy", "--out out/copy0")
    train("copy", "--out out/copy1 --seed 1")
    train("wikitext", "--out out/text")
    for runs in ("", "out out/copy0/", "out/copy* out/text"):
        assert re.search(r"\| tra +\| +2 \|.*wiki-byte", printed(runs), re.DOTALL)
    assert re.search(r"test set: 50.*\|  2x \|  4x \|", printed("out/copy1 --examples 50 --split 2x,4x"), re.DOTALL)
    mistakes = printed("out/copy1 --mistakes 2")
    assert mistakes.count(" scored tokens are right") == 2 and len(re.findall(r"\[\w+->\S+\]", mistakes)) > 1
    assert re.search(": <bos> a b <sep>( [^ ]+){3}\n$", printed("out/copy1 --prompt '<bos> a b <sep>' --count 3"))
    assert ": the cat" in printed("out/text --prompt 'the cat' --count 9")
    assert re.search(r"\| +6 \| +50 \|", printed("out/text --windows 6,50"))


# -----------------------------------------------------------------------------
# Texts, and bad input

def decoded(folder):
    task = data_module.Text(folder, window=4)
    return [task.decode(task.tokens[split]) for split in ("train", "val", "test")]


def test_a_download_that_fails_leaves_nothing_and_the_next_mirror_is_tried(monkeypatch):
    """Broken off, wrong, and not there; then right."""
    body = Path("copy.zip").read_bytes()
    pages = {"/short": body[:-99], "/wrong": body[:-1] + b"?", "/right": body}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_refused = "python" in self.headers["User-Agent"].lower()     # as one of the real mirrors does
            self.send_response(200 if self.path in pages and not is_refused else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        urls = [f"http://127.0.0.1:{server.server_port}{path}" for path in ("/short", "/wrong", "/gone")]
        monkeypatch.setitem(data_module.WIKITEXTS, "wikitext-2", (hashlib.sha256(body).hexdigest(), urls))
        with pytest.raises(OSError, match="could not fetch wikitext-2"):
            data_module.main([])
        assert not os.path.exists("data")
        urls.append(urls[0].replace("short", "right"))
        data_module.main([])
        server.shutdown()
    assert decoded("data/wikitext-2-byte") == list(WIKI.values())


@pytest.mark.parametrize("name, cat", [("byte", [99, 97, 116]), ("gpt2", [257])])
def test_zip_folder_and_text_file_hold_the_same_text(monkeypatch, name, cat):
    """GPT-2's tokens would have to be fetched. 256 bytes and two merges stand in for them."""
    ranks = {bytes([i]): i for i in range(256)} | {b"ca": 256, b"cat": 257}
    encoding = tiktoken.Encoding("test", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    Path("book.txt").write_bytes("".join(WIKI.values()).encode())
    for source in ("copy.zip", "wiki", "book.txt"):
        data_module.prepare(source, name)
    assert decoded(f"data/copy-{name}") == decoded(f"data/wiki-{name}") == list(WIKI.values())
    assert "".join(decoded(f"data/book-{name}")) == "".join(WIKI.values())
    task = data_module.Text(f"data/wiki-{name}", window=4)
    assert task.encode("cat") == cat and task.decode(cat) == "cat" and cat[-1] in task.tokens["train"]


def test_a_text_that_is_half_prepared_is_never_taken_for_done():
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        data_module.prepare("wiki", out="half")
    with pytest.raises(FileNotFoundError, match="holds no prepared text"):
        data_module.Text("half")
    data_module.prepare("wiki", out="half")


@pytest.mark.parametrize("command, reason", [
    ("train.py", "--attn tra --task copy"),
    ("train.py --attn tra --task copy --pairs 3", "--pairs"),
    ("train.py --attn tra --task copy --steps 1 --examples 1 --data wiki-byte", "--data is a text"),
    ("train.py --attn tra --task copy --n-head 3", "divisible"),
    ("train.py --attn rope --task copy --no-sparse", "parts of TRA"),
    ("train.py --attn tra --task copy --device cuda:99", "does not work here"),
    ("train.py --attn tra --data nowhere", "make one with data.py"),
    ("train.py --attn tra --task copy --resume --out nowhere", "holds no run"),
    ("eval.py .", "ckpt.pt is damaged"),
    ("data.py nowhere.txt", "neither a file nor a folder"),
    ("data.py binary.txt", "not UTF-8"),
    ("data.py short.txt", "too few lines"),
    ("data.py wiki --out wiki-byte", "already there"),
    ("tasks.py --task copy --split 9x", "choose one of train, 1x"),
])
def test_bad_input_gets_one_line_and_an_exit_code(monkeypatch, capsys, command, reason):
    Path("binary.txt").write_bytes(b"\xff\xfe line\n" * 100)
    Path("short.txt").write_text("short")
    Path("ckpt.pt").write_bytes(b"half a checkpoint")
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(signal, "signal", lambda *args: None)           # the scripts would take Ctrl-C from pytest
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
    assert not os.path.exists("evil")


# -----------------------------------------------------------------------------
# The README

def test_the_readme_has_the_two_commands_and_quotes_the_code_its_output_and_the_table(monkeypatch, capsys):
    assert "pip install -r requirements.txt && python train.py --attn tra --task copy\n" in BLOCKS
    assert "pip install -r requirements.txt && pytest\n" in BLOCKS
    assert code_of_readme("mask = ") in (HERE / "model.py").read_text(encoding="utf-8")
    worked_example()
    assert code_of_readme("One query").rstrip() == capsys.readouterr().out.rstrip()
    monkeypatch.chdir(HERE)
    importlib.import_module("extras.campaign").main(["--summary"])
    assert capsys.readouterr().out in README
    eval_module.main(["results/runs.jsonl"])
    assert capsys.readouterr().out in (HERE / "results" / "README.md").read_text(encoding="utf-8")


def test_the_readme_runs_from_top_to_bottom(monkeypatch):
    """Every command in this order, in one folder, then the examples, with small presets and no network."""
    Path("book.txt").write_text("a line of a book\n" * 500)
    byte_tokenizer = data_module.tokenizer("byte")
    monkeypatch.setattr(data_module, "download", lambda name: Path("copy.zip").read_bytes())
    monkeypatch.setattr(data_module, "tokenizer", lambda name: byte_tokenizer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    small = dict(n_layer=2, n_head=4, n_embd=16, batch=2, steps=2, examples=20, length=4, window=4)
    for presets in train_module.PRESETS.values():
        for task, preset in presets.items():
            monkeypatch.setitem(presets, task, preset | small)
    commands = re.findall(r"^(?:.*&& )?python (?:-m )?(.*)", "".join(BLOCKS), re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        name, *words = shlex.split(command.replace("--compile", "").replace("4000", "40"))
        if name == "extras.bench":
            words += ["--windows", "16", "--attn", "tra", "--batch", "1", "--tokens", "4"]
        if name == "train.py":
            train_module.train(train_module.parse_flags(words))
        elif ".png" not in command or importlib.util.find_spec("matplotlib"):
            importlib.import_module(name.removesuffix(".py")).main(words)
    for block in BLOCKS:
        if block.startswith("import "):
            exec(block, {})


def test_the_readmes_own_attention_and_task_work():
    """Pasted where the README says, they train, have flags and rows of their own, and pass the tests."""
    for name in ("model.py", "tasks.py", "data.py", "train.py", "eval.py", "test_model.py", "README.md"):
        shutil.copy(HERE / name, ".")
    for name, above, new in [("model.py", "# To add one", code_of_readme("def near") + "\n\n"),
                             ("model.py", '"tra": TRA', '"near": Near, '),
                             ("model.py", "\n    def __post_init__", code_of_readme("reach")),
                             ("tasks.py", "# To add one", code_of_readme("@dataclass") + "\n\n"),
                             ("tasks.py", '"flipflop": FlipFlop', '"repeat": Repeat, ')]:
        before, after = Path(name).read_text(encoding="utf-8").split(above)
        Path(name).write_text(before + new + above + after, encoding="utf-8")
    code = """
import sys, eval, pytest, tasks, train
tasks.main("--task repeat --length 3 --times 4 --plain --split 2x --count 1".split())
flags = "--attn near --task repeat --reach 4 --times 3 --length 4 --steps 3 --examples 5 --n-embd 16 --device cpu"
train.train(train.parse_flags(flags.split()))
eval.main([])
sys.exit(pytest.main(["-q", "-k", "near and (copy or future) or repeat and streams", "test_model.py"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"<bos>((?: \w){6}) <sep>\1\1\1\1 <eos>\n", result.stdout)
    assert "-reach4-" in result.stdout and "| near " in result.stdout
