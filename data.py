"""
WikiText-2, WikiText-103 or any text of your own, as token ids on disk.

    python data.py                                      # WikiText-2 (4.7 MB) as bytes: the laptop preset trains on it
    python data.py wikitext-103 --tokenizer gpt2        # WikiText-103 (192 MB) as GPT-2 tokens: the paper's setting
    python data.py book.txt                             # any UTF-8 text, split 90/5/5; makes data/book-byte/
    python data.py copy.zip --out data/wikitext-2-byte  # a copy of WikiText's zip, or a folder with its three files

A prepared folder holds train.bin, val.bin, test.bin (token ids as little-endian uint16, no header) and meta.json:
source and sha256 of the text, tokenizer, vocab_size, and the number of tokens in each split.

WikiText (Merity et al. 2016, arXiv 1609.07843) is text of Wikipedia, under CC BY-SA 3.0 and GFDL.
"""

import argparse
import functools
import hashlib
import http.client
import io
import json
import os
import sys
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HUB = "https://huggingface.co/datasets"
WIKITEXTS = {       # name: the sha256 of its zip, and its mirrors
    "wikitext-2": ("ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11", [
        "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
        f"{HUB}/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9/wikitext-2-raw-v1.zip"]),
    "wikitext-103": ("91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794", [
        "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
        f"{HUB}/mattdangerw/wikitext-103-raw/resolve/3555105b17ae31cc619a136fac72dbe2865c3738/"
        "wikitext-103-raw-v1.zip"]),
}
SPLITS = {"train": "train", "val": "valid", "test": "test"}         # our name: WikiText's
VOCAB_SIZE = {"byte": 256, "gpt2": 50257}

# -----------------------------------------------------------------------------
# From text to token ids


def tokenizer(name):
    """encode: text -> array of ids, and decode: ids -> bytes. GPT-2's vocabulary is fetched the first time."""
    if name == "byte":
        return (lambda text: np.frombuffer(text.encode(), dtype=np.uint8)), bytes
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:          # the network, or a broken cache, in many ways
        raise OSError(f"could not fetch GPT-2's vocabulary ({type(error).__name__}): connect once, or set "
                      "TIKTOKEN_CACHE_DIR to a copy of another machine's cache, or use --tokenizer byte") from error
    return (lambda text: gpt2.encode_to_numpy(text, disallowed_special=())), gpt2.decode_bytes


def split_text(text):
    """One text into three: 90, 5 and 5 percent, cut at the ends of lines."""
    cuts = [0] + [text.rfind(b"\n", 0, len(text) * percent // 100) + 1 for percent in (90, 95)] + [len(text)]
    if len(set(cuts)) < 4:
        raise ValueError(f"the text has too few lines to be split 90/5/5 between them: {len(text)} bytes")
    return {split: text[a:b] for split, a, b in zip(SPLITS, cuts, cuts[1:])}


def download(name):
    """The zip of a WikiText, from the first address that delivers the right sha256."""
    sha256, urls = WIKITEXTS[name]
    for url in urls:
        # One of them is known to refuse Python's own User-Agent.
        request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (compatible; data.py)"})
        content = bytearray()
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                while block := answer.read(1 << 22):
                    content += block
                    print(f"{url}: {len(content):,} of {answer.headers['Content-Length']} bytes", flush=True)
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
            print(f"{url}: these {len(content):,} bytes have the wrong sha256")
        except (OSError, http.client.HTTPException) as error:
            print(f"{url}: {error}")
    raise OSError(f"could not fetch {name}: try again later, or prepare a copy of the zip, or any text of your own")


def read_source(source):
    """The three parts of a text as bytes."""
    path = Path(source)
    if path.is_dir():
        files = {file.name: file.read_bytes for file in path.iterdir()}
    else:
        content = download(source) if source in WIKITEXTS else path.read_bytes()
        if not zipfile.is_zipfile(io.BytesIO(content)):
            return split_text(content)
        # Members of a zip are read, never extracted to a path of their choice.
        archive = zipfile.ZipFile(io.BytesIO(content))
        files = {name.split("/")[-1]: functools.partial(archive.read, name) for name in archive.namelist()}
    texts = {split: read() for split, theirs in SPLITS.items() for name, read in sorted(files.items())
             if name in (f"wiki.{theirs}.raw", f"wiki.{theirs}.tokens")}
    if len(texts) < len(SPLITS):
        raise ValueError(f"{path} does not hold wiki.train, wiki.valid and wiki.test, each .raw or .tokens")
    return texts


def prepare(source, tokenizer_name="byte", out=None):
    """Make a folder of token ids from a text. meta.json comes last: without it a folder does not count as prepared."""
    if source not in WIKITEXTS and not Path(source).exists():
        raise FileNotFoundError(f"{source} is neither a file nor a folder, nor one of {', '.join(WIKITEXTS)}")
    name = source if source in WIKITEXTS else Path(source).resolve().stem
    out = Path(out or f"data/{name}-{tokenizer_name}")
    if (out / "meta.json").exists():
        raise FileExistsError(f"{out} is already there: train on it, delete it first, or choose another --out")
    encode, _ = tokenizer(tokenizer_name)
    texts = read_source(source)
    meta = dict(source=name, sha256=hashlib.sha256(b"".join(texts.values())).hexdigest(), tokenizer=tokenizer_name,
                vocab_size=VOCAB_SIZE[tokenizer_name], tokens={})
    out.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        ids = encode(text.decode())
        ids.astype("<u2").tofile(out / f"{split}.bin")
        meta["tokens"][split] = len(ids)
        print(f"{split}: {len(text):,} bytes, {len(ids):,} {tokenizer_name} tokens", flush=True)
    (out / "meta.tmp").write_text(json.dumps(meta, indent=1) + "\n")
    os.replace(out / "meta.tmp", out / "meta.json")
    print(f"{out} is ready: python train.py --attn tra --data {out}")


# -----------------------------------------------------------------------------
# From token ids to batches


@dataclass
class Text:
    """A prepared text as a task like those of tasks.py. Every token is scored, and the measure is perplexity.

        x   the cat sat on          y   cat sat on the          (window 4)

    Its test sets are windows of 1, 2, 4 ... 32 times the training window over one and the same test text.
    """
    data: str = field(metadata={"help": "a folder that data.py prepared"})
    window: int = field(default=128, metadata={"help": "tokens in a training sequence"})
    metric, unit = "perplexity", "tokens"
    validation = "val", 32_769          # tokens: the first, and 256 windows of 128

    def __post_init__(self):
        folder = Path(self.data)
        if not (folder / "meta.json").exists():
            raise FileNotFoundError(f"{self.data} holds no prepared text: make one with data.py, see its --help")
        meta = json.loads((folder / "meta.json").read_text())
        self.name, self.vocab_size, self.tokenizer = folder.resolve().name, meta["vocab_size"], meta["tokenizer"]
        self.tokens = {split: np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r") for split in SPLITS}
        shortest = min(map(len, self.tokens.values()))
        if not 0 < self.window < shortest:
            raise ValueError(f"--window {self.window} does not fit {self.data}, where a split has {shortest:,} tokens")
        windows = [self.window << i for i in range(6)]
        self.splits = {"train": self.window} | {str(w): w for w in windows if w < len(self.tokens["test"])}

    def encode(self, text):
        return tokenizer(self.tokenizer)[0](text).tolist()

    def decode(self, ids):
        return tokenizer(self.tokenizer)[1]([int(i) for i in ids]).decode(errors="replace")

    def batch(self, split, seed, step, size):
        """Random windows of the training text, and the tokens that follow. Tests do not come from here."""
        tokens = self.tokens["train"]
        # 103 keeps this stream apart from those of other tasks. Another number would make other runs.
        starts = np.random.default_rng([103, seed, step]).integers(len(tokens) - self.window, size=size)
        rows = tokens[starts[:, None] + np.arange(self.window + 1)].astype(np.int64)       # (size, window + 1)
        return rows[:, :-1], rows[:, 1:]

    def test(self, split, count):
        """Cut the first count tokens into consecutive windows: every token but the very first is scored once."""
        if split != "val" and not (split.isdigit() and int(split)):
            raise ValueError(f"{split!r} is not a window: give a number of tokens")
        tokens = self.tokens["val" if split == "val" else "test"][:count].astype(np.int64)
        window = self.window if split == "val" else int(split)
        size = max(1, 8192 // window) * window
        whole = (len(tokens) - 1) // window * window
        for start in range(0, whole, size):
            ids = tokens[start:min(start + size, whole) + 1]
            yield ids[:-1].reshape(-1, window), ids[1:].reshape(-1, window)
        if whole < len(tokens) - 1:                     # the rest is a shorter window
            yield tokens[None, whole:-1], tokens[None, whole + 1:]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="wikitext-2", metavar="wikitext-2 | wikitext-103 | PATH",
                        help="what to prepare (default wikitext-2); PATH is a UTF-8 text file, a zip or a folder")
    parser.add_argument("--tokenizer", choices=VOCAB_SIZE, default="byte", help="bytes (default), or GPT-2's tokens")
    parser.add_argument("--out", metavar="DIR", help="folder to make (default data/{name of the text}-{tokenizer})")
    args = parser.parse_args(argv)
    prepare(args.source, args.tokenizer, args.out)


if __name__ == "__main__":
    try:
        main()
    except UnicodeDecodeError as error:
        sys.exit(f"error: the text is not UTF-8, save it as UTF-8 first: {error}")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")
