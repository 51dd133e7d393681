"""
Time and memory, side by side in one process: a training step, attention alone, generation. With runs of a text, their
perplexity pass.

    python -m extras.bench --attn rope,tra
    python -m extras.bench --windows 1024,4096 --batch 4 --dropout 0
    python -m extras.bench out/wikitext-2-byte-* --windows 4096,16384
    python -m extras.bench --json bench.json                # for a picture: python -m extras.plot speed bench.json

The contestants take turns, round after round, and the best of each counts: so warming up, and whatever else the machine
does, is left out. Ratios are to the first row of a table, which is RoPE or torch's own attention. On CUDA the forward
passes run under the autocast of train.py: bfloat16 where the GPU has it.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from eval import find_runs, load, load_checkpoint, make_record, markdown, measure, name_rows, pick_device
from extras.fast import tra_blocked, tra_for_long_sequences
from extras.plot import layers_of, skipped_share
from model import ATTENTIONS, GPT, GPTConfig, TRA, full_precision, nope_attention, tra_plain

# -----------------------------------------------------------------------------
# Clocks


def precision(device):
    """The dtype of train.py's autocast."""
    is_native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float32


def with_autocast(device, function, *args, **kwargs):
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision(device) == torch.bfloat16):
        return function(*args, **kwargs)


def seconds_of(run, device):
    """The time of one call. A GPU works while Python goes on, so we wait for it before and after."""
    wait = torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def peak_memory(run, device):
    """Bytes that one call holds at most, beside what was there before; None on MPS, which does not count them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # or the profiler announces itself
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def time_side_by_side(what, window, batch, contestants, device, more=lambda name: {}, rounds=6):
    """A row for each of {name: function}: best time, memory, more(name). One that fails says why; the rest goes on."""
    rows = [dict(what=what, name=name, window=window, batch=batch) for name in contestants]
    for row in rows * rounds:
        if "failure" in row:
            continue
        run = contestants[row["name"]]
        try:
            row["seconds"] = min(row.get("seconds", math.inf), seconds_of(run, device))
            if "peak_bytes" not in row:
                row.update(peak_bytes=peak_memory(run, device), **more(row["name"]))
        except RuntimeError as error:
            row["failure"] = str(error).strip().splitlines()[0][:60]        # CUDA out of memory, for example
    for row in rows:
        if "failure" not in row:
            row["tokens_per_second"] = window * batch / row["seconds"]
            row["ratio"] = row["seconds"] / rows[0].get("seconds", math.nan)
    return rows


# -----------------------------------------------------------------------------
# What is measured


@torch.no_grad()
def skipped_blocks(model, idx):
    """The share of key blocks that TRA skips when the model reads idx (B, T), as a column; none for the others."""
    if not isinstance(model.blocks[0].attn, TRA):
        return {}
    shares = [skipped_share(*attn.heads(x), attn.forget(x), attn.config.sparse, attn.config.contextual)
              for attn, x in layers_of(model, idx)]
    return {"skipped": torch.stack(shares).mean().item()}


def bench_step(attns, window, batch, dropout, device):
    """A training step of the paper's mini model on random tokens. The learning rate is 0, so that nothing changes."""
    x, y = torch.randint(256, (2, batch, window), device=device)

    def step(model, optimizer):
        loss = with_autocast(device, model, x, y)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    models = {attn: GPT(GPTConfig(attn=attn, vocab_size=256, dropout=dropout)).to(device) for attn in attns}
    steps = {attn: partial(step, model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True))
             for attn, model in models.items()}
    return time_side_by_side("training step", window, batch, steps, device,
                             more=lambda attn: skipped_blocks(models[attn], x))


def bench_attention(window, batch, backward, device):
    """Attention alone, 8 heads of width 64. The gates are at -0.5, or at 0, where nothing is forgotten or skipped."""
    q, k, v = torch.randn(3, batch, 8, window, 64, device=device)
    q, k = F.rms_norm(q, (64,)), F.rms_norm(k, (64,))
    f = torch.full((batch, 8, window), -0.5, device=device)
    skipped = {"skipped": skipped_share(q, k, v, f).mean().item()}
    q, k, v = (tensor.to(precision(device)).requires_grad_(backward) for tensor in (q, k, v))
    f, zero = f.requires_grad_(backward), torch.zeros_like(f).requires_grad_(backward)
    out_gradient = torch.randn_like(v)

    def attend(attention, *gates):
        out = with_autocast(device, attention, q, k, v, *gates)
        if backward:
            torch.autograd.grad(out, (q, k, v, *gates), out_gradient)

    # model.py's choice for long sequences: the fused kernel where it works, else blocks
    long_form = tra_for_long_sequences(f.device)
    name = long_form.__name__.replace("_", " ")
    calls = {"sdpa": partial(attend, nope_attention), name: partial(attend, long_form, f)}
    if device.type == "cuda" or window <= 4096:
        calls[f"{name}, gates at 0"] = partial(attend, long_form, zero)
    if window <= 4096:
        calls["tra plain"] = partial(attend, tra_plain, f)
    if device.type == "cuda" and window <= 4096:
        calls["tra plain, compiled"] = partial(attend, torch.compile(tra_plain, dynamic=False), f)
    if device.type == "cuda":
        calls["tra blocked"] = partial(attend, full_precision(tra_blocked), f)
    what = "attention, forward and backward" if backward else "attention, forward"
    return time_side_by_side(what, window, batch, calls, device,
                             more=lambda call: skipped if call in (name, "tra blocked") else {})


def bench_generation(attns, count, device):
    """Greedy generation from one token, with the cache and without."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def generate_without_cache(model):
        idx = start
        for _ in range(count):
            idx = torch.cat((idx, model(idx)[0][:, -1:].argmax(-1)), dim=1)

    calls = {}
    for attn in attns:
        model = GPT(GPTConfig(attn=attn, vocab_size=256)).to(device).eval()
        calls[f"{attn}, cache"] = partial(with_autocast, device, model.generate, start, count, temperature=0)
        calls[f"{attn}, no cache"] = partial(with_autocast, device, generate_without_cache, model)
    return time_side_by_side("generation", count, 1, calls, device, rounds=3)


def bench_runs(runs, window, batch, device):
    """The perplexity pass of trained runs over the start of their test text, RoPE first."""
    loaded = [load(run, device) for run in runs]
    records = [make_record(load_checkpoint(run)["args"], task, {}) for run, (_, task) in zip(runs, loaded)]
    names = [f"{name}, seed {record['seed']}" for name, record in zip(name_rows(records), records)]
    models = dict(sorted(zip(names, loaded), key=lambda item: item[1][0].config.attn != "rope"))
    passes = {name: partial(with_autocast, device, measure, model, task, str(window), batch * window + 1)
              for name, (model, task) in models.items()}

    def more(name):
        model, task = models[name]
        x, _ = next(iter(task.test(str(window), window + 1)))
        return skipped_blocks(model, torch.from_numpy(x).to(device)) | {"perplexity": passes[name]()["perplexity"]}

    return time_side_by_side("perplexity pass", window, batch, passes, device, more)


def measurements(args, device):
    """Yield the rows of one table after the other."""
    if args.runs:
        windows = args.windows or [4096, 16384]
        for window in windows:
            yield bench_runs(find_runs(args.runs), window, 2 * max(windows) // window, device)
        return
    is_cuda = device.type == "cuda"
    attns = sorted(args.attn.split(","), key=lambda attn: attn != "rope")
    tokens = 32_768 if is_cuda else 4096                # in a training step
    for window in args.windows or ([256, 1024, 4096, 16384, 65536] if is_cuda else [256, 1024]):
        if is_cuda or window <= 4096:
            yield bench_step(attns, window, args.batch or max(1, tokens // window), args.dropout, device)
    for backward in (False, True):
        for window in args.windows or ([1024, 4096, 16384, 65536] if is_cuda else [1024, 4096, 16384]):
            yield bench_attention(window, args.batch or 1, backward, device)
    yield bench_generation(attns, args.tokens, device)


# -----------------------------------------------------------------------------


def table(rows):
    """A Markdown table. Columns that no row has are left out."""
    columns = {"ratio": ("ratio", 1, ".2f"), "tokens/s": ("tokens_per_second", 1, ",.0f"),
               "peak memory, MB": ("peak_bytes", 2**-20, ",.0f"), "key blocks skipped, %": ("skipped", 100, ".0f"),
               "perplexity": ("perplexity", 1, ".2f")}
    columns = {title: how for title, how in columns.items() if any(row.get(how[0]) is not None for row in rows)}
    cells = [["", "window", "batch", "time, ms", *columns]]
    for row in rows:
        time_or_failure = row.get("failure") or f"{1000 * row['seconds']:,.1f}"
        cells.append([row["name"], f"{row['window']:,}", str(row["batch"]), time_or_failure])
        for key, factor, form in columns.values():
            cells[-1].append("" if row.get(key) is None else format(factor * row[key], form))
    return "\n".join([f"{rows[0]['what']}:", "", *markdown(cells), ""])


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m extras.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="runs of a text: measure their perplexity pass instead")
    add("--attn", default=",".join(ATTENTIONS), metavar="A,A", help="these attentions (default: all)")
    add("--windows", metavar="N,N", type=lambda text: sorted(map(int, text.split(","))),
        help="these windows; without CUDA, training is measured up to 4,096")
    add("--batch", type=int, metavar="N", help="sequences (default 1; training 4,096 tokens, or 32,768 on CUDA)")
    add("--dropout", type=float, default=GPTConfig.dropout, metavar="P", help="in the training step (default "
        "%(default)s); with 0, torch's fused kernels serve the other attentions on a CPU, too")
    add("--tokens", type=int, default=512, metavar="N", help="to generate (default 512)")
    add("--json", metavar="FILE", help="also write every number to this file")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    args = parser.parse_args(argv)
    device = torch.device(pick_device(args.device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = str(precision(device)).removeprefix("torch.")
    about = f"{name}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {dtype}"
    print(about + "\n", flush=True)
    rows = []
    for new in measurements(args, device):
        print(table(new), flush=True)
        rows += new
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
