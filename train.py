"""
Train any attention on any task, then measure it on sequences longer than it ever saw.

    python train.py --attn tra --task copy                    # a laptop: minutes, then a table
    python train.py --attn rope --task flipflop --seed 1
    python train.py --attn tra --task copy --scale paper      # the paper's setting, for a GPU
    python train.py --attn tra --task copy --no-contextual    # TRA without its contextual distance
    python train.py --attn tra --task copy --resume           # after Ctrl-C, a crash or a full disk; it ends as if never stopped

A run is a folder, out/{task}-{attn}-s{seed}/ (with what is switched off after {attn}, such as tra-no-sparse):
    ckpt.pt     config, weights, optimizer, random state, step, flags
    log.jsonl   one JSON object a line: step, loss, learning rate, gradient norm, tokens per second; or step and a validation
    eval.json   the final table; eval.py reads it
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, fields

import torch

from eval import (FORMAT, MACHINE, bad_checkpoint, check_tensors, evaluate, label, load_checkpoint, load_model, open_task, pick_device, record,
                  replace_file, summarise, table, validate)
from model import ATTENTIONS, GPT, GPTConfig
from tasks import TASKS, Parser, add_size_flags, fail, integer, number, script

# The settings of each experiment. Those that are not here are in DEFAULTS, and the tasks' own sizes in tasks.py.
MINI = dict(n_layer=4, n_head=4, n_embd=256, batch=128, lr=1e-4, steps=100_000)       # the paper's, for the synthetic tasks
PRESETS = {
    "flipflop": {"laptop": dict(n_layer=2, n_head=4, n_embd=64, embd_std=1.0, batch=32, lr=2e-3, beta2=0.98, steps=800),
                 "paper": dict(MINI, batch=64, steps=25_000)},
    "copy": {"laptop": dict(n_layer=2, n_head=4, n_embd=128, batch=32, lr=2e-3, beta2=0.9, steps=10_500, examples=2000),
             "paper": MINI},
    "induct": {"laptop": dict(n_layer=3, n_head=4, n_embd=128, forget_bias=3.0, batch=32, lr=2e-3, beta2=0.98, steps=4000),
               "paper": MINI},
    "instruct": {"laptop": dict(n_layer=3, n_head=8, n_embd=128, forget_bias=2.0, dropout=0.0, batch=32, lr=2e-3, beta2=0.98, steps=9000),
                 "paper": MINI},
    "wikitext": {"laptop": dict(n_layer=4, n_head=4, n_embd=128, batch=32, lr=2e-3, steps=800, data="data/wikitext-103-byte", window=128,
                                eval_every=100, examples=131_072),
                 "paper": dict(n_layer=8, n_head=8, n_embd=512, batch=64, lr=1e-4, steps=100_000, data="data/wikitext-103", window=128,
                               eval_every=1000, examples=2**32 - 1)},
}
PRESETS = {task: PRESETS["copy"] for task in TASKS} | PRESETS           # a task that someone adds takes copy's
DEFAULTS = dict(seed=0, accumulate=1, weight_decay=0.01, beta2=0.999, warmup=0.05, grad_clip=1.0, examples=500,
                device="auto", dtype="auto", compile=False, log_every=50, eval_every=0, save_every=60.0,
                **{field.name: field.default for field in fields(GPTConfig) if field.name not in ("attn", "vocab_size", "n_layer", "n_head", "n_embd")})
FILES = ("ckpt.pt", "log.jsonl", "eval.json")           # of a run
# A resumed run may change these; everything else stays as it was started.
CHANGEABLE = ("steps", "data", "device", *MACHINE)


def sizes_of(task, scale):
    """The sizes of a synthetic task; those of a text are in its preset."""
    return TASKS[task].scales[scale] if task in TASKS else {}


def parse_flags(words=None, run=None):
    """The flags as a dict; None for those not given. The words come from the command line, or from a run's checkpoint."""
    parser = Parser(prog="train.py", description=__doc__, epilog="presets:\n" + "\n".join(
        f"  {task:9s} {scale:7s} " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in {**preset, **sizes_of(task, scale)}.items())
        for task, scales in PRESETS.items() for scale, preset in scales.items()))
    default = lambda name: f"(default {DEFAULTS[name]})"
    group = parser.add_argument_group("experiment")
    group.add_argument("--attn", choices=ATTENTIONS, help="the attention to train; the top of model.py names their papers")
    group.add_argument("--task", choices=PRESETS, help="what to train it on; see python tasks.py --task NAME, and for wikitext python data.py --help")
    group.add_argument("--scale", choices=("auto", "laptop", "paper"), help="which preset; auto (default): paper with CUDA, else laptop")
    group.add_argument("--seed", type=integer(0), metavar="N", help=f"seed of the weights, the data and the dropout {default('seed')}")
    group.add_argument("--out", metavar="DIR", help="folder of the run (default out/{task}-{attn}-s{seed})")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="go on with the run in that folder; flags left out are as it was started")
    either.add_argument("--overwrite", action="store_true", help="start anew, even if that folder holds a run")
    group.add_argument("--examples", type=integer(1), metavar="N", help=f"in each test set {default('examples')}, or the preset's; wikitext: tokens of the test "
                       "text, and more than it has means all of it")
    group = parser.add_argument_group("size of the task (default: the preset's)")
    add_size_flags(group)
    group.add_argument("--data", metavar="DIR", help="wikitext: a folder that data.py prepared")
    group.add_argument("--window", type=integer(1, 2**20), metavar="N", help="wikitext: tokens in a training sequence")
    group = parser.add_argument_group("model (sizes default to the preset's)")
    group.add_argument("--n-layer", type=integer(1, 1000), metavar="N", help="blocks")
    group.add_argument("--n-head", type=integer(1), metavar="N", help="attention heads in each")
    group.add_argument("--n-embd", type=integer(1), metavar="N", help="width; divisible by --n-head")
    group.add_argument("--dropout", type=number(0, 0.99), metavar="P", help=f"on attention weights and MLP hidden units {default('dropout')}, or the preset's")
    group.add_argument("--embd-std", type=number(1e-6, 1e3), metavar="X", help=f"standard deviation of the token embeddings at the start {default('embd_std')}, or the preset's")
    group.add_argument("--rope-theta", type=number(1, 1e12), metavar="X", help=f"RoPE: base of the speeds at which pairs turn {default('rope_theta')}")
    group.add_argument("--cope-npos", type=integer(1), metavar="N", help=f"CoPE: number of learned positions {default('cope_npos')}")
    group.add_argument("--forget-bias", type=number(-100, 100), metavar="X", help="TRA and FoX: added to the bias of the forget gates at the start; "
                       f"the higher, the less is forgotten at first {default('forget_bias')}, or the preset's")
    group.add_argument("--sparse", action=argparse.BooleanOptionalAction, help="TRA: irrelevant keys leave the softmax (default), or stay")
    group.add_argument("--contextual", action=argparse.BooleanOptionalAction, help="TRA: distance counts relevant keys (default), or all")
    group = parser.add_argument_group("optimisation (AdamW; linear warm-up, then cosine decay to zero)")
    group.add_argument("--steps", type=integer(1), metavar="N", help="updates (default: the preset's)")
    group.add_argument("--batch", type=integer(1), metavar="N", help="sequences per update (default: the preset's)")
    group.add_argument("--accumulate", type=integer(1), metavar="N", help=f"run each batch in N parts, to save memory {default('accumulate')}")
    group.add_argument("--lr", type=number(0, 100), metavar="X", help="peak learning rate (default: the preset's)")
    group.add_argument("--warmup", type=number(0, 1), metavar="X", help=f"share of the steps in which the learning rate rises {default('warmup')}")
    group.add_argument("--weight-decay", type=number(0, 100), metavar="X", help=f"AdamW's {default('weight_decay')}")
    group.add_argument("--beta2", type=number(0, 0.999999), metavar="X", help=f"AdamW's decay of squared gradients {default('beta2')}, or the preset's")
    group.add_argument("--grad-clip", type=number(0, 1e9), metavar="X", help=f"largest norm of the gradient; 0: no limit {default('grad_clip')}")
    group = parser.add_argument_group("machine")
    group.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, mps")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="auto (default): bfloat16 autocast on CUDA, else float32")
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the model for training (needs a C++ compiler, or Triton on CUDA)")
    group.add_argument("--log-every", type=integer(1), metavar="N", help=f"steps between lines of the log {default('log_every')}")
    group.add_argument("--eval-every", type=integer(0), metavar="N", help="steps between validations: loss on the validation text, or exact match on 100 "
                       f"examples of the first test set; 0: none {default('eval_every')}, or the preset's")
    group.add_argument("--save-every", type=number(0, 1e9), metavar="SECONDS", help=f"between checkpoints {default('save_every')}")
    if run:
        parser.error = lambda message: bad_checkpoint(run, message)
    return vars(parser.parse_args(words))


def settings(given):
    """Fill in what was not given: from the run that is resumed, else from the preset and the defaults."""
    resume, overwrite, out = given.pop("resume"), given.pop("overwrite"), given.pop("out")
    if not out and given["attn"] and given["task"]:
        named = {**DEFAULTS, **{k: v for k, v in given.items() if v is not None}}
        out = os.path.join("out", f"{named['task']}-{label(named)}-s{named['seed']}")
    ckpt = load_checkpoint(out) if resume and out else None
    if ckpt:
        # A file can hold anything: its flags go through the parser as if they were typed.
        kept = {name: ckpt["args"].get(name) for name in given}
        started = parse_flags([f"--{'no-' if value is False else ''}{name.replace('_', '-')}" + ("" if isinstance(value, bool) else f"={value}")
                               for name, value in kept.items() if value is not None], run=out)
        for name, value in given.items():
            if value is None or value == "auto" and name not in CHANGEABLE:
                given[name] = started[name]
            elif value != started[name] and name not in CHANGEABLE:
                fail(f"--{name.replace('_', '-')} is {value}, but {out} was started " + ("without it" if started[name] is None else f"with {started[name]}"))
    if not (given["attn"] and given["task"]):
        fail("--attn and --task are needed, for example: python train.py --attn tra --task copy")
    held = [name for name in FILES if os.path.exists(path := os.path.join(out, name)) and os.path.getsize(path)]
    if held and not resume and not overwrite:
        fail(f"{out} already holds a run ({', '.join(held)}): " + ("--resume goes on with it, " if "ckpt.pt" in held else "")
             + "--overwrite starts anew, --out goes elsewhere")
    if given["scale"] in (None, "auto"):
        given["scale"] = "paper" if torch.cuda.is_available() else "laptop"
    # The task's sizes are written down too: a preset that changes later must not change a run that goes on.
    args = {**given, **DEFAULTS, **PRESETS[given["task"]][given["scale"]], **sizes_of(given["task"], given["scale"]),
            **{name: value for name, value in given.items() if value is not None}}
    if ckpt and not 0 <= ckpt["step"] <= args["steps"]:
        fail(f"--steps {args['steps']} is fewer than the {ckpt['step']} that {out} has done")
    return out, args, ckpt


def learning_rate(step, args):
    """Linear warm-up over the first steps, then half a cosine down to zero; step counts from 0."""
    warm = max(1, round(args["warmup"] * args["steps"]))
    if step < warm:
        return args["lr"] * (step + 1) / warm
    return args["lr"] * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args["steps"] - warm)))


def random_states(kind):
    """The generators that dropout draws from; the data needs none, being a function of seed and step."""
    states = {"cpu": torch.get_rng_state()}
    if kind != "cpu":
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def restore(ckpt, optimizer, kind):
    """Put optimizer and random generators back where they were; raises if the checkpoint's do not fit."""
    params, state = optimizer.param_groups[0]["params"], ckpt["optimizer"]["state"]
    if type(state) is not dict or len(state) != (len(params) if ckpt["step"] else 0):
        raise ValueError(f"the optimizer's state is not that of {len(params)} tensors")
    for i, p in enumerate(params[:len(state)]):
        check_tensors(state[i], {"step": torch.tensor(0.0), "exp_avg": p, "exp_avg_sq": p})
        if state[i]["step"] != ckpt["step"]:
            raise ValueError("optimizer and model are not from the same step")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if type(ckpt["since_log"]) is not list or not all(type(loss) is float and math.isfinite(loss) for loss in ckpt["since_log"]):
        raise ValueError("since_log is not a list of finite numbers")
    torch.set_rng_state(ckpt["random"]["cpu"])
    if kind != "cpu" and kind in ckpt["random"]:        # not, if the run comes from another kind of device
        torch.get_device_module(kind).set_rng_state(ckpt["random"][kind])


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def end_of_step(log, last_step):
    """The byte where the log's last whole line up to a step ends. A killed run may have written more lines, or half a one."""
    log.seek(0)
    end = position = 0
    for line in log:
        position += len(line)
        try:
            if json.loads(line)["step"] <= last_step and line.endswith(b"\n"):
                end = position
        except Exception:       # a line can hold anything
            pass
    return end


def lock(file, out):
    """Two processes that write one run would ruin it. The system ends the lock with the process, however that ends."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another process is training in {out}")
    except (ImportError, OSError):                      # Windows; a file system without locks
        pass


def seconds_per_step(model, get_batch, parts, autocast):
    """A few forward and backward passes on the clock, nothing updated. Of each batch one part: more may not fit into memory."""
    tokens = 0
    for step in range(5):
        if step == 1:           # the first one warms up
            start = time.perf_counter()
        x, y = (tensor.chunk(parts) for tensor in get_batch(step))
        with autocast:
            loss = model(x[0], y[0])[1]
        loss.backward()
        loss.item()             # waits for a GPU
        tokens += x[0].numel() * (step > 0)
    model.zero_grad()
    per_token = (time.perf_counter() - start) / tokens
    return per_token * sum(get_batch(step)[0].numel() for step in range(100)) / 100        # batches differ in length


def train(out, args, ckpt):
    """Train from scratch, or from a checkpoint; test; write everything into the folder out."""
    device = pick_device(args["device"])
    kind = torch.device(device).type
    if args["dtype"] == "auto":
        args["dtype"] = "bfloat16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=args["dtype"] == "bfloat16")

    task = open_task(args)
    if ckpt and ckpt.get("sizes") != task.sizes:
        fail(f"{out} was trained on {ckpt.get('sizes')}, and now there is {task.sizes}")
    torch.manual_seed(args["seed"])
    try:
        config = GPTConfig(vocab_size=task.vocab_size, **{field.name: args[field.name] for field in fields(GPTConfig) if field.name != "vocab_size"})
    except ValueError as error:
        fail(error)
    model = load_model(out, ckpt) if ckpt else GPT(config)
    if model.config != config:
        bad_checkpoint(out, "flags and config are not the same")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, args["beta2"]), weight_decay=args["weight_decay"], fused=True)
    if args["compile"]:
        torch._functorch.config.view_replay_for_aliased_outputs = False     # torch 2.13 fails there at a second length
        try:
            torch.compile(torch.sin)(torch.ones(2, device=device))          # a trifle, to see whether a compiler is there
        except Exception as error:
            fail(f"--compile does not work here, leave it out: {str(error).splitlines()[0][:200]}")
    trained = torch.compile(model) if args["compile"] else model        # the same weights; evaluation uses the plain one

    def get_batch(step):
        x, y = task.batch("train", args["seed"], step, args["batch"])
        return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    first = ckpt["step"] if ckpt else 0
    seconds = seconds_per_step(model, get_batch, args["accumulate"], autocast) * (args["steps"] - first)
    print(f"{args['task']} with {label(args)}, {args['scale']} scale, seed {args['seed']}: {sum(p.numel() for p in model.parameters()):,} "
          f"parameters, steps {first} to {args['steps']} of {args['batch']} sequences on {device} in {args['dtype']}, about {clock(seconds)} -> {out}", flush=True)
    torch.manual_seed(args["seed"])
    since_log = []                                      # losses since the last line of the log
    if ckpt:
        try:
            restore(ckpt, optimizer, kind)
            since_log += ckpt["since_log"]
        except Exception as error:                      # a damaged file can raise nearly anything
            bad_checkpoint(out, error)

    os.makedirs(out, exist_ok=True)
    ckpt_path, log_path, eval_path = (os.path.join(out, name) for name in FILES)
    log = open(log_path, "a+b")
    lock(log, out)

    def save(step):
        if not all(p.isfinite().all() for p in model.parameters()):
            fail(f"weights that are not finite after step {step}: stopped; the last checkpoint in {out} is from before. Try a lower --lr")
        log.flush()
        os.fsync(log.fileno())                          # the log is never behind the checkpoint
        replace_file(ckpt_path, lambda file: torch.save({
            "format": FORMAT, "config": asdict(model.config), "model": model.state_dict(), "step": step, "args": args, "sizes": task.sizes,
            "optimizer": optimizer.state_dict(), "random": random_states(kind), "since_log": since_log}, file))

    stopped = []                                        # the first Ctrl-C is heard between two steps, a second one at once

    def ask_to_stop(signum, frame):
        stopped.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, ask_to_stop)

    # From its first second on, a folder holds one run that can go on: a new checkpoint, then what does not belong to it goes.
    save(first)
    log.truncate(end_of_step(log, first))
    if first < args["steps"] and os.path.exists(eval_path):
        os.remove(eval_path)

    def leave(step):
        fail(f"stopped at step {step}; to go on: python train.py --resume --out {shlex.quote(out)}")

    terminal = sys.stdout.isatty()
    start = saved = shown = time.perf_counter()
    tokens, checked = 0, ""

    def progress(text):
        print(text[:79].ljust(79) if terminal else text, end="\r" if terminal else "\n", flush=True)

    def write_log(**row):
        log.write(json.dumps(row).encode() + b"\n")
        log.flush()

    for step in range(first, args["steps"]):
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # one update: the mean loss over all scored tokens of a batch, in parts
        x, y = get_batch(step)
        scored, loss = (y >= 0).sum(), 0.0
        for x_part, y_part in zip(x.chunk(args["accumulate"]), y.chunk(args["accumulate"])):
            with autocast:
                part = trained(x_part, y_part)[1] * ((y_part >= 0).sum() / scored)
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args["grad_clip"] or math.inf).item()
        if not math.isfinite(loss + norm):
            fail(f"loss {loss}, gradient norm {norm} at step {step + 1}, learning rate {lr:.2e}: stopped; "
                 f"the last checkpoint in {out} is from before. Try a lower --lr")
        optimizer.step()
        optimizer.zero_grad()

        # once in a while: log, validate, show, save
        done = step + 1
        tokens += x.numel()
        since_log.append(loss)
        now = time.perf_counter()
        speed, left = tokens / (now - start), (now - start) / (done - first) * (args["steps"] - done)
        mean = sum(since_log) / len(since_log)
        if done % args["log_every"] == 0 or done == args["steps"]:
            write_log(step=done, loss=mean, lr=lr, grad_norm=norm, tokens_per_second=round(speed))
            since_log.clear()
        if args["eval_every"] and done % args["eval_every"] == 0:
            name, value = validate(model, task, device)
            model.train()
            write_log(**{"step": done, name: value})
            checked = f"  {name} {value:.4f}"
        if terminal and now - shown > 0.2 or not since_log:
            progress(f"step {done}/{args['steps']}  loss {mean:.4f}{checked}  {speed:,.0f} tokens/s  {clock(left)} left")
            shown = now
        if done == args["steps"] or stopped or now - saved > args["save_every"]:
            save(done)
            saved = time.perf_counter()
        if stopped:
            leave(done)

    results = {}
    for split in list(task.splits)[1:]:
        results |= evaluate(model, task, args["examples"], device, [split])
        progress(f"testing {split}: {results[split]:.3f}")
        if stopped:
            leave(args["steps"])
    found = record(args, task, args["examples"], results)
    replace_file(eval_path, lambda file: file.write((json.dumps(found, indent=1) + "\n").encode()))
    log.close()                                         # and with it the lock
    print(f"trained and tested in {clock(time.perf_counter() - start)}".ljust(79 * terminal) + "\n\n" + table(summarise([found])), end="")


@script
def main():
    out, args, ckpt = settings(parse_flags())
    try:
        train(out, args, ckpt)
    except BrokenPipeError:     # stdout, not the disk
        raise
    except OSError as error:
        fail(f"could not write to {out}: {error.strerror or error}; what was saved there before is untouched")


if __name__ == "__main__":
    main()
