"""
Four synthetic tasks for length generalisation: train on short sequences, test on longer ones.

flipflop   remember one bit for as long as it takes        Liu et al. 2023, arXiv 2306.00946
copy       repeat a sequence, symbols with replacement     Zhou et al. 2023, arXiv 2310.16028
induct     find a symbol, say what followed it
instruct   copy, reverse, first or last, as told

    python tasks.py --task copy                                       # a few examples, scored tokens in [brackets]
    python tasks.py --task flipflop --split sparse --count 3 --seed 7
    python tasks.py --task induct --plain                             # one example per line, nothing else

Every batch is a pure function of (split, seed, step, size): streams never end, a run can continue anywhere, and test examples
come from generators that training never uses, because the number of the split is part of the generator's seed.
A batch is x, y, both int64 (B, T): y holds the token after x, and -1 where nothing is scored.
"""

import argparse
import functools
import os
import re
import string
import sys
from dataclasses import dataclass, fields

import numpy as np


def fail(message):
    """What a user can put right: one line on stderr, exit code 2."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def script(main):
    """Around a script's main(): what a user or the machine can cause ends in one line, whatever the script was doing."""
    @functools.wraps(main)
    def run():
        sys.stdout = sys.stdout or open(os.devnull, "w")        # closed, as by >&-
        sys.stdout.reconfigure(errors="backslashreplace")       # a file name or a sign that the terminal cannot show
        try:
            main()
            sys.stdout.flush()
        except KeyboardInterrupt:
            fail("interrupted")
        except BrokenPipeError:                                 # piped into head: nobody is left to read
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(2) from None
        except OSError as error:
            fail(error)
        except (MemoryError, RuntimeError) as error:            # torch says RuntimeError, and CUDA a kind of it
            if not isinstance(error, MemoryError) and not re.search("out of memory|(allocate|enough) memory|overflow", str(error)):
                raise
            fail(f"out of memory: {error}"[:300])
    return run


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong command line gets one line instead of a page."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        fail(f"{message} (see python {self.prog} --help)")


def integer(low, high=2**32 - 1):
    """An argparse type: a whole number between low and high."""
    def parse(text):
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value
    return parse


def number(low, high):
    """An argparse type: a finite number from low to high."""
    def parse(text):
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value
    parse.__name__ = f"number from {low:g} to {high:g}"     # argparse names the type in its message
    return parse


SYMBOLS = list(string.ascii_lowercase + string.ascii_uppercase + string.digits)


@dataclass(frozen=True)
class Task:
    """What the tasks share. A task has a vocabulary, splits, the sizes for each scale, and sample().

    splits maps a name to what sample() needs to make that kind of example; the first, "train", is for training, the
    others are test sets. sample(rng, size, spec) returns tokens (B, T+1) and a mask of the tokens that are scored.
    """
    length: int
    metric = "exact match"
    least = {}                  # the smallest value of a size, where it is not 1

    def __post_init__(self):
        for field in fields(self):
            least, value = self.least.get(field.name, 1), getattr(self, field.name)
            if not isinstance(value, int) or not least <= value <= 10**5:
                fail(f"--{field.name} must be a number from {least} to {10**5} for {self.name}, not {value!r}")

    @property
    def name(self):
        return type(self).__name__.lower()

    @property
    def vocab_size(self):
        return len(self.vocab)

    @property
    def sizes(self):
        return vars(self)

    def batch(self, split, seed, step, size):
        rng = np.random.default_rng([list(self.splits).index(split), seed, step])
        tokens, scored = self.sample(rng, size, self.splits[split])
        return tokens[:, :-1], np.where(scored, tokens, -1)[:, 1:]

    def symbol_names(self):
        return (SYMBOLS + [f"s{i}" for i in range(len(SYMBOLS), self.symbols)])[:self.symbols]

    def multiples(self, of):
        """{"1x": L, "1.5x": 1.5 L, ...}: test lengths by name."""
        return {f"{m:g}x": int(m * self.length) for m in of}


@dataclass(frozen=True)
class FlipFlop(Task):
    """n instructions, a bit after each: w writes it, i ignores it, r reads what was written last. Scored: bits after r.

        w 1 i 0 r [1] i 1 w 0 r [0]        (length n = 6)

    The first instruction is w, the last r; between them i has probability p, and w and r share the rest.
    """
    vocab = ["w", "r", "i", "0", "1"]
    scales = {"laptop": dict(length=64), "paper": dict(length=256)}
    least = {"length": 2}

    @property
    def splits(self):
        n = self.length
        return {"train": (0.8, n), "iid": (0.8, n), "sparse": (0.98, n), "dense": (0.1, n),
                "iid-4x": (0.8, 4 * n), "sparse-4x": (0.98, 4 * n), "dense-4x": (0.1, 4 * n)}

    def sample(self, rng, size, spec):
        p, n = spec
        u = rng.random((size, n))
        what = np.where(u < p, 2, np.where(u < (1 + p) / 2, 0, 1))                      # i, w, r
        what[:, 0], what[:, -1] = 0, 1
        bits = rng.integers(0, 2, (size, n), dtype=np.int64)
        latest = np.maximum.accumulate(np.where(what == 0, np.arange(n), 0), axis=1)    # index of the last write so far
        bits = np.where(what == 1, np.take_along_axis(bits, latest, 1), bits)
        tokens = np.stack((what, bits + 3), axis=2).reshape(size, 2 * n)
        scored = np.stack((np.zeros_like(what), what == 1), axis=2).reshape(size, 2 * n) == 1
        return tokens, scored


@dataclass(frozen=True)
class Copy(Task):
    """Say again what came before <sep>. Symbols may repeat, so that finding the last symbol is not enough.

        <bos> c a c f <sep> [c] [a] [c] [f] [<eos>]        (length 4)
    """
    symbols: int
    scales = {"laptop": dict(length=16, symbols=48), "paper": dict(length=50, symbols=64)}

    @property
    def vocab(self):
        return ["<bos>", "<sep>", "<eos>"] + self.symbol_names()

    @property
    def splits(self):
        return {"train": None} | self.multiples((1, 1.5, 2, 3, 4, 6))

    def sample(self, rng, size, spec):
        n = rng.integers(1, self.length + 1) if spec is None else spec
        x = rng.integers(3, 3 + self.symbols, (size, n), dtype=np.int64)
        bos, sep, eos = (np.full((size, 1), token) for token in range(3))
        tokens = np.hstack((bos, x, sep, x, eos))
        return tokens, np.broadcast_to(np.arange(2 * n + 3) > n + 1, tokens.shape)


@dataclass(frozen=True)
class Induct(Task):
    """After <sep> come queries, each answered by the symbol that followed it in the context, where it stands just once.

        <bos> d b a c e b <sep> a [c] d [b]        (length 6, two pairs)

    The queried symbols are placed once each, never side by side, and the rest is filled from the others. So an answer is
    never itself a query, and any length works.
    """
    symbols: int
    pairs: int
    scales = {"laptop": dict(length=20, symbols=16, pairs=6), "paper": dict(length=50, symbols=64, pairs=8)}
    least = {"length": 2}

    def __post_init__(self):
        super().__post_init__()
        if self.symbols <= self.pairs:
            fail(f"--symbols {self.symbols} must be more than --pairs {self.pairs}: the rest of the context needs others")

    @property
    def vocab(self):
        return ["<bos>", "<sep>"] + self.symbol_names()

    @property
    def splits(self):
        return {"train": None} | self.multiples((1, 1.5, 2, 3, 4, 6))

    def sample(self, rng, size, spec):
        n = rng.integers(2, self.length + 1) if spec is None else spec
        K = min(self.pairs, n // 2)
        order = rng.permuted(np.tile(np.arange(self.symbols), (size, 1)), axis=1) + 2   # (B, symbols)
        queries, others = order[:, :K], order[:, K:]
        x = np.take_along_axis(others, rng.integers(0, self.symbols - K, (size, n), dtype=np.int64), 1)
        # K of n - K places, in order, then spread by one each: K of n - 1 places, no two of them neighbours.
        where = np.sort(rng.permuted(np.tile(np.arange(n - K), (size, 1)), axis=1)[:, :K], axis=1) + np.arange(K)
        where = rng.permuted(where, axis=1)
        np.put_along_axis(x, where, queries, 1)
        answers = np.take_along_axis(x, where + 1, 1)
        bos, sep = (np.full((size, 1), token) for token in range(2))
        tokens = np.hstack((bos, x, sep, np.stack((queries, answers), axis=2).reshape(size, 2 * K)))
        at = np.arange(tokens.shape[1]) - (n + 2)
        return tokens, np.broadcast_to((at > 0) & (at % 2 == 1), tokens.shape)


@dataclass(frozen=True)
class Instruct(Task):
    """The first token says what to do with the sequence: copy it, reverse it, or name its first or its last symbol.

        <reverse> c a f <sep> [f] [a] [c] [<eos>]        <last> c a f <sep> [f] [<eos>]        (length 3)

    Of nothing, every instruction makes nothing: <first> <sep> [<eos>]. After its answer a row is filled with <eos>, unscored.
    Training practises most what is hardest: long answers twice as often as short ones, and the longest of three lengths drawn.
    """
    symbols: int
    scales = {"laptop": dict(length=10, symbols=16), "paper": dict(length=50, symbols=64)}
    instructions = ["copy", "reverse", "first", "last"]
    practice = [0, 0, 1, 1, 2, 3]       # training draws from these

    @property
    def vocab(self):
        return [f"<{name}>" for name in self.instructions] + ["<sep>", "<eos>"] + self.symbol_names()

    @property
    def splits(self):
        tests = {f"{name}-{by}": (i, n) for i, name in enumerate(self.instructions)
                 for by, n in self.multiples((1, 2, 4, 10)).items()}
        return {"train": None} | tests

    def sample(self, rng, size, spec):
        what, n = (rng.choice(self.practice, size), rng.integers(0, self.length + 1, 3).max()) if spec is None else spec
        what = np.broadcast_to(what, size)[:, None]                                     # (B, 1)
        x = rng.integers(6, 6 + self.symbols, (size, n), dtype=np.int64)
        sep, eos = np.full((size, 1), 4), np.full((size, n + 1), 5)
        answer = np.where(what == 0, x, np.where(what == 1, x[:, ::-1], np.where(what == 2, x[:, :1], x[:, -1:])))
        answer = np.hstack((answer, eos[:, :1]))                                        # (B, n + 1)
        ends = np.where(what < 2, n, min(n, 1))                                         # where <eos> stands
        at = np.arange(n + 1)
        tokens = np.hstack((what, x, sep, np.where(at < ends, answer, eos)))
        return tokens, np.hstack((np.zeros((size, n + 2), dtype=bool), at <= ends))


# To add one: a class like these, an entry here. train.py gives it the preset of copy, unless it has one of its own there.
TASKS = {"flipflop": FlipFlop, "copy": Copy, "induct": Induct, "instruct": Instruct}
SIZES = list(dict.fromkeys(field.name for task in TASKS.values() for field in fields(task)))        # the names of all tasks' sizes


def add_size_flags(group):
    """The sizes a task can have, as flags; left out, they come from the task's scale."""
    group.add_argument("--length", type=integer(0), metavar="L", help="training length: symbols, or instructions for flipflop")
    group.add_argument("--symbols", type=integer(0), metavar="N", help="number of different symbols (copy, induct, instruct)")
    group.add_argument("--pairs", type=integer(0), metavar="N", help="query/answer pairs in a sequence (induct)")


def make_task(name, scale, **sizes):
    """The task of this name at a scale, with any size that is not None put in its place."""
    task = TASKS[name]
    known = [field.name for field in fields(task)]
    for size, value in sizes.items():
        if value is not None and size not in known:
            fail(f"--{size} means nothing to {name}; its sizes are {', '.join('--' + k for k in known)}")
    return task(**task.scales[scale] | {size: value for size, value in sizes.items() if value is not None})


def show(task, x, y, mark=True):
    """One example as text, scored tokens in [brackets] if marked. Every example ends with a scored token; padding is left out."""
    end = np.flatnonzero(y >= 0)[-1] + 1
    names = [task.vocab[t] for t in (*x[:end], y[end - 1])]
    scored = [False, *(y[:end] >= 0)]
    return " ".join(f"[{name}]" if mark and s else name for name, s in zip(names, scored))


@script
def main():
    parser = Parser(prog="tasks.py", description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True, help="whose examples to show")
    parser.add_argument("--split", default="train", help="train (default) or a test set, such as sparse-4x, 1.5x, reverse-10x; a wrong name lists them all")
    parser.add_argument("--count", type=integer(1), default=3, metavar="N", help="how many examples (default 3)")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of the stream they come from (default 0)")
    parser.add_argument("--plain", action="store_true", help="one example per line, tokens separated by single spaces")
    parser.add_argument("--scale", choices=("laptop", "paper"), default="laptop", help="whose sizes to take (default laptop)")
    add_size_flags(parser)
    args = parser.parse_args()
    task = make_task(args.task, args.scale, **{name: getattr(args, name) for name in SIZES})
    if args.split not in task.splits:
        fail(f"{args.task} has no split {args.split!r}; choose one of {', '.join(task.splits)}")
    for step in range(args.count):
        x, y = task.batch(args.split, args.seed, step, 1)
        print(show(task, x[0], y[0], mark=not args.plain))


if __name__ == "__main__":
    main()
