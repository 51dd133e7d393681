"""
Four synthetic tasks for length generalisation: train on short sequences, test on longer ones.

flipflop   remember one bit for as long as it takes        Liu et al. 2023, arXiv 2306.00946
copy       repeat a sequence in which symbols may recur    Zhou et al. 2023, arXiv 2310.16028
induct     find a symbol, say what followed it
instruct   copy, reverse, first or last, as told

    python tasks.py --task copy                                       # a few examples, scored tokens in [brackets]
    python tasks.py --task flipflop --split sparse --count 3 --seed 7
    python tasks.py --task induct --plain                             # one example per line, nothing else

Every batch is a pure function of (split, seed, step, size): streams never end, a run can continue anywhere, and test
examples come from generators that training never uses, because the number of the split is part of the generator's seed.
A batch is x, y, both int64 (B, T): y holds the token after x, and -1 where nothing is scored.
"""

import argparse
import string
import sys
from dataclasses import asdict, dataclass, field, fields

import numpy as np

LETTERS = [*string.ascii_letters, *string.digits]


@dataclass(frozen=True)
class Task:
    """What the tasks share. A task has fields (its sizes), sample(), and maybe markers, a vocab or splits of its own.

    Every field becomes a flag; its default is the laptop's size. splits maps the name of a test set to its spec, which
    tells sample() what to make: here a length. The first one, "train", is for training, and its None means any length.
    (Append new splits at the end: the number of a split is part of its seed.)

    sample(rng, size, spec) returns tokens (B, T+1) of size examples, and a mask of those that are scored.
    """
    length: int = field(default=16, metadata={"help": "longest training sequence, in symbols"})
    markers = ["<bos>", "<sep>", "<eos>"]       # the first tokens; the symbols come after them
    metric, unit = "exact match", "examples"    # what eval.py reports, and what it counts
    validation = "1x", 100                      # a quick look during training: a test set, and how many examples of it

    def __post_init__(self):
        for size, value in asdict(self).items():
            least = 2 if size == "length" else 1            # flipflop needs w and r, induct a pair
            if type(value) is int and value < least:
                raise ValueError(f"the {size} of {self.name} must be at least {least}, not {value}")

    @property
    def name(self):
        return next(name for name, kind in TASKS.items() if kind is type(self))

    @property
    def vocab(self):
        return self.markers + LETTERS[:self.symbols] + [f"s{i}" for i in range(len(LETTERS), self.symbols)]

    @property
    def vocab_size(self):
        return len(self.vocab)

    @property
    def splits(self):
        return {"train": None} | self.multiples((1, 1.5, 2, 3, 4, 6))

    def batch(self, split, seed, step, size):
        """x, y: size examples. Another seed or step makes others."""
        if split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; choose one of {', '.join(self.splits)}")
        rng = np.random.default_rng([list(self.splits).index(split), seed, step])
        tokens, scored = self.sample(rng, size, self.splits[split])
        return tokens[:, :-1], np.where(scored, tokens, -1)[:, 1:]

    def test(self, split, count):
        """Yield the first count examples of a test set, about 8,192 tokens at a time; the same ones for every run."""
        size = max(1, 8192 // self.batch(split, 0, 0, 1)[0].shape[1])
        for step, start in enumerate(range(0, count, size)):
            x, y = self.batch(split, 0, step, size)
            yield x[:count - start], y[:count - start]

    def encode(self, text):
        """Tokens as words, with spaces between them, to token ids."""
        unknown = [word for word in text.split() if word not in self.vocab]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not in the vocabulary of {self.name}: {' '.join(self.vocab)}")
        return [self.vocab.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(self.vocab[i] for i in ids)

    def multiples(self, factors):
        """{"1x": L, "1.5x": 1.5 L, ...}: test lengths by name."""
        return {f"{factor:g}x": int(factor * self.length) for factor in factors}


@dataclass(frozen=True)
class FlipFlop(Task):
    """n instructions, a bit after each: w writes it, i ignores it, r reads what was written last. Scored: bits after r.

        w 1 i 0 r [1] i 1 w 0 r [0]        (length n = 6)

    The first instruction is w, the last r; between them i has probability p, and w and r share the rest.
    """
    length: int = field(default=64, metadata={"help": "instructions in a training sequence"})
    vocab = ["w", "r", "i", "0", "1"]
    validation = "iid", 100

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
        scored = np.stack((np.zeros_like(what, dtype=bool), what == 1), axis=2).reshape(size, 2 * n)
        return tokens, scored


@dataclass(frozen=True)
class Copy(Task):
    """Repeat what came before <sep>. Symbols may recur, so looking up the previous symbol is not enough.

        <bos> c a c f <sep> [c] [a] [c] [f] [<eos>]        (length 4)

    Training practises long sequences more: it draws two lengths and takes the longer one.
    """
    symbols: int = field(default=48, metadata={"help": "number of different symbols"})

    def sample(self, rng, size, spec):
        n = rng.integers(1, self.length + 1, 2).max() if spec is None else spec
        x = rng.integers(3, 3 + self.symbols, (size, n), dtype=np.int64)
        bos, sep, eos = (np.full((size, 1), token) for token in range(3))
        tokens = np.hstack((bos, x, sep, x, eos))
        return tokens, np.broadcast_to(np.arange(2 * n + 3) > n + 1, tokens.shape)


@dataclass(frozen=True)
class Induct(Task):
    """After <sep> come queries, each answered by the symbol that followed it in the context, where it stands just once.

        <bos> d b a c e b <sep> a [c] d [b]        (length 6, two pairs)

    The queried symbols are placed once each, never side by side, and the rest is filled from the others. So an answer
    is never itself a query, and any length works.
    """
    length: int = field(default=20, metadata={"help": "longest training sequence, in symbols"})
    symbols: int = field(default=16, metadata={"help": "number of different symbols"})
    pairs: int = field(default=6, metadata={"help": "queries with their answers in a sequence"})
    markers = ["<bos>", "<sep>"]

    def __post_init__(self):
        super().__post_init__()
        if self.symbols <= self.pairs:
            raise ValueError(f"induct needs more symbols than pairs, not {self.symbols} and {self.pairs}")

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

    The answer to an empty sequence is <eos> alone: <first> <sep> [<eos>]. After its answer a row is filled with <eos>,
    unscored. Training practises most what is hardest: long answers twice as often, and the longest of three lengths.
    """
    length: int = field(default=10, metadata={"help": "longest training sequence, in symbols"})
    symbols: int = field(default=16, metadata={"help": "number of different symbols"})
    markers = ["<copy>", "<reverse>", "<first>", "<last>", "<sep>", "<eos>"]
    practice = [0, 0, 1, 1, 2, 3]       # training draws its instructions from these
    validation = "copy-1x", 100

    @property
    def splits(self):
        return {"train": None} | {f"{name.strip('<>')}-{by}": (i, n) for i, name in enumerate(self.markers[:4])
                                  for by, n in self.multiples((1, 2, 4, 10)).items()}

    def sample(self, rng, size, spec):
        if spec is None:
            spec = rng.choice(self.practice, size), rng.integers(0, self.length + 1, 3).max()
        what, n = np.broadcast_to(spec[0], size)[:, None], spec[1]                      # (B, 1)
        x = rng.integers(6, 6 + self.symbols, (size, n), dtype=np.int64)
        sep, eos = np.full((size, 1), 4), np.full((size, n + 1), 5)
        answer = np.where(what == 0, x, np.where(what == 1, x[:, ::-1], np.where(what == 2, x[:, :1], x[:, -1:])))
        answer = np.hstack((answer, eos[:, :1]))                                        # (B, n + 1)
        ends = np.where(what < 2, n, min(n, 1))                                         # where <eos> stands
        at = np.arange(n + 1)
        tokens = np.hstack((what, x, sep, np.where(at < ends, answer, eos)))
        return tokens, np.hstack((np.zeros((size, n + 2), dtype=bool), at <= ends))


# To add one: a class like these and an entry here. Its sizes become flags, and train.py gives it the preset of copy.
TASKS = {"flipflop": FlipFlop, "copy": Copy, "induct": Induct, "instruct": Instruct}


def as_text(task, x, y, predicted=None, mark=True):
    """One example on a line, scored tokens in [brackets]; where predicted is wrong, as [right->predicted]."""
    words, last = [task.decode([x[0]])], np.flatnonzero(y >= 0)[-1]         # what comes after the last one is padding
    for at in range(last + 1):
        word = task.decode([y[at] if y[at] >= 0 else x[at + 1]])
        if mark and y[at] >= 0:
            is_right = predicted is None or predicted[at] == y[at]
            word = f"[{word}]" if is_right else f"[{word}->{task.decode([predicted[at]])}]"
        words.append(word)
    return " ".join(words)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="tasks.py", description=__doc__, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True, help="whose examples to show")
    parser.add_argument("--split", default="train", help="train (default), or a test set such as sparse-4x or 1.5x")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="how many examples (default 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the stream they come from (default 0)")
    parser.add_argument("--plain", action="store_true", default=False, help="tokens and single spaces, nothing else")
    for name, size in {size.name: size for task in TASKS.values() for size in fields(task)}.items():
        how = dict(action=argparse.BooleanOptionalAction) if size.type is bool else dict(type=size.type)
        parser.add_argument("--" + name.replace("_", "-"), help=size.metadata.get("help"), **how)
    sizes = vars(parser.parse_args(argv))
    name, split, count, seed, plain = (sizes.pop(flag) for flag in ("task", "split", "count", "seed", "plain"))
    unknown = sizes.keys() - TASKS[name].__dataclass_fields__
    if unknown:
        raise ValueError(f"{name} has no {' or '.join(unknown)}; see --help")
    task = TASKS[name](**sizes)
    for step in range(count):
        x, y = task.batch(split, seed, step, 1)
        print(as_text(task, x[0], y[0], mark=not plain))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
