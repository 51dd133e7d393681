"""
Train any attention on any task, then measure it on sequences longer than it ever saw.

    python train.py --attn tra --task copy                    # a laptop: minutes, then a table
    python train.py --attn rope --task flipflop --seed 1
    python train.py --attn tra --task copy --scale paper      # the paper's setting, for a GPU
    python train.py --attn tra --task copy --no-contextual    # TRA without its contextual distance

A run is a folder, out/{task}-{attn}-s{seed}/:
    ckpt.pt     config, weights, optimizer, random state, step, flags
    log.jsonl   one JSON object a line: step, loss, learning rate, gradient norm, tokens per second
    eval.json   the final table; eval.py reads it
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict

import torch

from eval import FORMAT, evaluate, label, load_checkpoint, load_model, pick_device, record, table
from model import ATTENTIONS, GPT, GPTConfig
from tasks import TASKS, Parser, add_size_flags, fail, integer, make_task

# The settings of each experiment. Those that are not here are in DEFAULTS, and the tasks' own sizes in tasks.py.
PRESETS = {
    "flipflop": {"laptop": dict(n_layer=2, n_head=4, n_embd=64, batch=32, lr=2e-3, beta2=0.98, steps=300),
                 "paper": dict(n_layer=4, n_head=4, n_embd=256, batch=64, lr=1e-4, steps=25_000)},
    "copy": {"laptop": dict(n_layer=2, n_head=4, n_embd=128, batch=32, lr=2e-3, beta2=0.98, steps=9000),
             "paper": dict(n_layer=4, n_head=4, n_embd=256, batch=128, lr=1e-4, steps=100_000)},
    "induct": {"laptop": dict(n_layer=2, n_head=4, n_embd=128, batch=32, lr=2e-3, beta2=0.98, steps=5000),
               "paper": dict(n_layer=4, n_head=4, n_embd=256, batch=128, lr=1e-4, steps=100_000)},
    "instruct": {"laptop": dict(n_layer=3, n_head=4, n_embd=128, batch=48, lr=2e-3, beta2=0.98, steps=6000),
                 "paper": dict(n_layer=4, n_head=4, n_embd=256, batch=128, lr=1e-4, steps=100_000)},
}
DEFAULTS = dict(scale="auto", seed=0, accumulate=1, weight_decay=0.01, beta2=0.999, warmup=0.05, grad_clip=1.0, examples=500,
                device="auto", dtype="auto", compile=False, log_every=50, save_every=60.0,
                **{name: getattr(GPTConfig, name) for name in ("dropout", "rope_theta", "cope_npos", "sparse", "contextual")})
# A resumed run may change these; everything else stays as it was started.
FREE = ("steps", "examples", "device", "compile", "log_every", "save_every")


def number(low, high):
    """An argparse type: a finite number from low to high."""
    def parse(text):
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value
    parse.__name__ = f"number from {low:g} to {high:g}"     # argparse names the type in its message
    return parse


def parse_flags():
    """The flags as a dict; None for those not given."""
    parser = Parser(prog="train.py", description=__doc__, epilog="presets:\n" + "\n".join(
        f"  {task:9s} {scale:7s} " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in {**preset, **TASKS[task].scales[scale]}.items())
        for task, scales in PRESETS.items() for scale, preset in scales.items()))
    told = lambda name: f"(default {DEFAULTS[name]})"
    group = parser.add_argument_group("experiment")
    group.add_argument("--attn", choices=ATTENTIONS, help="the attention to train")
    group.add_argument("--task", choices=TASKS, help="what to train it on; see python tasks.py --task NAME")
    group.add_argument("--scale", choices=("auto", "laptop", "paper"), help="which preset; auto (default): paper with CUDA, else laptop")
    group.add_argument("--seed", type=integer(0), metavar="N", help=f"of the weights, the data and the dropout {told('seed')}")
    group.add_argument("--out", metavar="DIR", help="folder of the run (default out/{task}-{attn}-s{seed})")
    group.add_argument("--resume", action="store_true", help="go on with the run in that folder; flags left out are as it was started")
    group.add_argument("--overwrite", action="store_true", help="start anew, even if that folder holds a run")
    group.add_argument("--examples", type=integer(1), metavar="N", help=f"of each test set, at the end {told('examples')}")
    group = parser.add_argument_group("size of the task (default: the preset's)")
    add_size_flags(group)
    group = parser.add_argument_group("model (sizes default to the preset's)")
    group.add_argument("--n-layer", type=integer(1), metavar="N")
    group.add_argument("--n-head", type=integer(1), metavar="N")
    group.add_argument("--n-embd", type=integer(1), metavar="N", help="width; divisible by --n-head")
    group.add_argument("--dropout", type=number(0, 0.99), metavar="P", help=f"on attention weights and MLP hidden units {told('dropout')}")
    group.add_argument("--rope-theta", type=number(1, 1e12), metavar="X", help=f"RoPE: slowest turn {told('rope_theta')}")
    group.add_argument("--cope-npos", type=integer(1), metavar="N", help=f"CoPE: number of learned positions {told('cope_npos')}")
    group.add_argument("--no-sparse", dest="sparse", action="store_const", const=False, help="TRA: leave every key in the softmax")
    group.add_argument("--no-contextual", dest="contextual", action="store_const", const=False, help="TRA: count every key as distance")
    group = parser.add_argument_group("optimisation (AdamW; linear warm-up, then cosine decay to zero)")
    group.add_argument("--steps", type=integer(1), metavar="N", help="updates (default: the preset's)")
    group.add_argument("--batch", type=integer(1), metavar="N", help="sequences per update (default: the preset's)")
    group.add_argument("--accumulate", type=integer(1), metavar="N", help=f"run each batch in N parts, to save memory {told('accumulate')}")
    group.add_argument("--lr", type=number(0, 100), metavar="X", help="peak learning rate (default: the preset's)")
    group.add_argument("--warmup", type=number(0, 1), metavar="X", help=f"share of the steps {told('warmup')}")
    group.add_argument("--weight-decay", type=number(0, 100), metavar="X", help=told("weight_decay"))
    group.add_argument("--beta2", type=number(0, 0.999999), metavar="X", help=told("beta2"))
    group.add_argument("--grad-clip", type=number(0, 1e9), metavar="X", help=f"largest norm of the gradient; 0: no limit {told('grad_clip')}")
    group = parser.add_argument_group("machine")
    group.add_argument("--device", help="auto (default), cpu, cuda, cuda:1, mps")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="auto (default): bfloat16 autocast on CUDA, else float32")
    group.add_argument("--compile", action="store_const", const=True, help="torch.compile the training step (needs a C++ compiler, or Triton on CUDA)")
    group.add_argument("--log-every", type=integer(1), metavar="N", help=f"steps between lines of the log {told('log_every')}")
    group.add_argument("--save-every", type=number(0, 1e9), metavar="SECONDS", help=f"between checkpoints {told('save_every')}")
    return vars(parser.parse_args())


def settings(given):
    """Fill in what was not given: from the run that is resumed, else from the preset and the defaults."""
    resume, overwrite, out = given.pop("resume"), given.pop("overwrite"), given.pop("out")
    if out is None:
        if not (given["attn"] and given["task"]):
            fail("--attn and --task are needed, for example: python train.py --attn tra --task copy")
        named = {**DEFAULTS, **{k: v for k, v in given.items() if v is not None}}
        out = os.path.join("out", f"{named['task']}-{label(named)}-s{named['seed']}")
    if resume:
        ckpt = load_checkpoint(out)
        args = {**ckpt["args"]}
        for name, value in given.items():
            if value is not None and value != args.get(name):
                if name not in FREE:
                    fail(f"--{name.replace('_', '-')} is {value}, but {out} was started with {args.get(name)}")
                args[name] = value
        if args["steps"] < ckpt["step"]:
            fail(f"--steps {args['steps']} is fewer than the {ckpt['step']} that {out} has done")
        return out, args, ckpt
    if not (given["attn"] and given["task"]):
        fail("--attn and --task are needed, for example: python train.py --attn tra --task copy")
    held = [name for name in ("ckpt.pt", "log.jsonl", "eval.json") if os.path.exists(os.path.join(out, name))]
    if held and not overwrite:
        fail(f"{out} already holds a run ({', '.join(held)}): --resume goes on with it, --overwrite starts anew, --out goes elsewhere")
    args = {**DEFAULTS, **{k: v for k, v in given.items() if v is not None}}
    if args["scale"] == "auto":
        args["scale"] = "paper" if torch.cuda.is_available() else "laptop"
    return out, {**given, **DEFAULTS, **PRESETS[args["task"]][args["scale"]], **args}, None


def learning_rate(step, args):
    """Linear warm-up over the first steps, then half a cosine down to zero; step counts from 0."""
    warm = max(1, round(args["warmup"] * args["steps"]))
    if step < warm:
        return args["lr"] * (step + 1) / warm
    return args["lr"] * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, args["steps"] - warm)))


def replace_file(path, write):
    """write(file) into a temporary file, flush it to disk, put it in the place of path: whole, or not at all."""
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        fail(f"could not write {path}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}; what was there before is untouched")


def random_states(device):
    """The generators that dropout draws from; the data needs none, being a function of seed and step."""
    states = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def log_lines(path, last_step):
    """The lines of a log up to a step, without those that a killed run left unfinished."""
    def step(line):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return math.inf
    if last_step == 0 or not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        return [line for line in file if step(line) <= last_step]


def seconds_per_step(model, get_batch, autocast):
    """A few forward and backward passes on the clock, nothing updated."""
    for step in range(5):
        if step == 1:           # the first one warms up
            start = time.perf_counter()
        with autocast:
            loss = model(*get_batch(step))[1]
        loss.backward()
        loss.item()             # waits for a GPU
    model.zero_grad()
    return (time.perf_counter() - start) / 4


def train(out, args, ckpt):
    """Train from scratch, or from a checkpoint; test; write everything into the folder out."""
    device = pick_device(args["device"])
    kind = torch.device(device).type
    if args["dtype"] == "auto":
        args["dtype"] = "bfloat16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=args["dtype"] == "bfloat16")
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")      # TF32

    task = make_task(args["task"], args["scale"], length=args["length"], symbols=args["symbols"], pairs=args["pairs"])
    torch.manual_seed(args["seed"])
    if ckpt:
        model = load_model(out, ckpt)
    else:
        try:
            model = GPT(GPTConfig(vocab_size=len(task.vocab), **{k: args[k] for k in (
                "attn", "n_layer", "n_head", "n_embd", "dropout", "rope_theta", "cope_npos", "sparse", "contextual")}))
        except ValueError as error:
            fail(error)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, args["beta2"]), weight_decay=args["weight_decay"])
    trained = torch.compile(model) if args["compile"] else model        # the same weights; evaluation uses the plain one


    def get_batch(step):
        x, y = task.batch("train", args["seed"], step, args["batch"])
        return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    first = ckpt["step"] if ckpt else 0
    seconds = seconds_per_step(model, get_batch, autocast) * (args["steps"] - first)
    print(f"{args['task']} with {label(args)}, {args['scale']} scale, seed {args['seed']}: {sum(p.numel() for p in model.parameters()):,} "
          f"parameters, steps {first} to {args['steps']} of {args['batch']} sequences on {device} in {args['dtype']}, about {clock(seconds)} -> {out}")
    torch.manual_seed(args["seed"])
    since_log = []                                      # losses since the last line of the log
    if ckpt:
        optimizer.load_state_dict(ckpt["optimizer"])
        torch.set_rng_state(ckpt["random"]["cpu"])
        if kind != "cpu":
            torch.get_device_module(device).set_rng_state(ckpt["random"]["device"])
        since_log = ckpt["since_log"]

    os.makedirs(out, exist_ok=True)
    ckpt_path, log_path, eval_path = (os.path.join(out, name) for name in ("ckpt.pt", "log.jsonl", "eval.json"))
    kept = log_lines(log_path, first)                   # of a resumed run: what came before its checkpoint
    replace_file(log_path, lambda file: file.writelines(kept))
    log = open(log_path, "a", encoding="utf-8")

    def save(step):
        log.flush()
        os.fsync(log.fileno())
        replace_file(ckpt_path, lambda file: torch.save({
            "format": FORMAT, "config": asdict(model.config), "model": model.state_dict(), "step": step, "args": args,
            "optimizer": optimizer.state_dict(), "random": random_states(device), "since_log": since_log}, file))

    stopped = []                                        # the first Ctrl-C is heard between two steps, a second one at once

    def ask_to_stop(number, frame):
        stopped.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask_to_stop)

    def leave(step):
        fail(f"stopped at step {step}; to go on: python train.py --resume --out {out}")

    terminal = sys.stdout.isatty()
    start = saved = shown = time.perf_counter()
    tokens = 0
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

        # once in a while: log, show, save
        done = step + 1
        tokens += x.numel()
        since_log.append(loss)
        now = time.perf_counter()
        speed, left = tokens / (now - start), (now - start) / (done - first) * (args["steps"] - done)
        mean = sum(since_log) / len(since_log)
        if done % args["log_every"] == 0:
            log.write(json.dumps({"step": done, "loss": mean, "lr": lr, "grad_norm": norm, "tokens_per_second": round(speed)}) + "\n")
            log.flush()
            since_log.clear()
        if terminal and now - shown > 0.2 or not since_log or done == args["steps"]:
            print(f"step {done}/{args['steps']}  loss {mean:.4f}  {speed:,.0f} tokens/s  {clock(left)} left",
                  end="   \r" if terminal else "\n", flush=True)
            shown = now
        if done == args["steps"] or stopped or now - saved > args["save_every"]:
            save(done)
            saved = now
        if stopped:
            leave(done)
    log.close()

    results = {}
    for split in list(task.splits)[1:]:
        results |= evaluate(model, task, args["examples"], device, [split])
        print(f"testing {split}: {results[split]:.3f}".ljust(70), end="\r" if terminal else "\n", flush=True)
        if stopped:
            leave(args["steps"])
    found = record(args, task, args["examples"], results)
    replace_file(eval_path, lambda file: file.write((json.dumps(found, indent=1) + "\n").encode()))
    print(f"trained and tested in {clock(time.perf_counter() - start)}".ljust(70) + "\n\n" + table([found]), end="")


def main():
    try:
        train(*settings(parse_flags()))
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
