"""
WikiText-103, or any text of your own, as token ids on disk: fetch, check, tokenise, memory-map, batch.

    python data.py                                           # fetch WikiText-103 (192 MB), GPT-2 tokens, data/wikitext-103/
    python data.py --from wikitext-103-raw-v1.zip            # the same from a copy of the zip, raw or tokenised
    python data.py --tokenizer byte                          # the same as bytes, for the laptop scale, data/wikitext-103-byte/
    python data.py --from FOLDER --tokenizer byte            # wiki.{train,valid,test}.raw or .tokens; nothing is fetched
    python data.py --from book.txt --out data/book           # any UTF-8 text, split 90/5/5 by position

The folder then holds train.bin, val.bin, test.bin (token ids as little-endian uint16, no header) and meta.json:

    format              version of this layout
    tokenizer           "gpt2" or "byte", with its vocab_size
    tokens, bytes       per split: token ids, and bytes of text (nats per token * tokens / bytes / ln 2 = bits per byte)
    source, sha256      where the text came from; of the zip, of the text file, or of the folder's three files in a row

WikiText-103 (Merity et al. 2016, arXiv 1609.07843) is text of Wikipedia, under CC BY-SA 3.0 and GFDL.
"""

import codecs
import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

from tasks import Parser, fail, script

MIRRORS = [
    "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
    "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/"
    "3555105b17ae31cc619a136fac72dbe2865c3738/wikitext-103-raw-v1.zip",
]
SHA256 = "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"  # the raw zip
SHA256_TOKENS = "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"  # the tokenised zip
SPLITS = {"train": "train", "val": "valid", "test": "test"}  # our name: WikiText's
VOCAB_SIZE = {"gpt2": 50257, "byte": 256}
META = {"format": int, "tokenizer": str, "vocab_size": int, "tokens": dict, "bytes": dict, "source": str, "sha256": str}
FORMAT = 1
STREAM = 103  # keeps batch()'s random numbers apart from those of other users of the same seed
CHUNK = 1 << 18  # bytes of text that a thread gets at a time
# The last printable ASCII character before a space or newline. No piece of GPT-2's pattern reaches from such a character into white
# space, so a text cut there gives the same tokens as the uncut text, on any number of cores.
CUT = re.compile(r".*[!-~](?=[ \n])", re.DOTALL)
BROKEN = zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError  # what a damaged or encrypted zip, or bad text, raises


def encoding(name):
    """The tiktoken Encoding gpt2, fetched the first time, or byte: the 256 single bytes, never fetched."""
    if name == "byte":
        ranks = {bytes([b]): b for b in range(256)}
        return tiktoken.Encoding("byte", pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens={})
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # whatever the network or a broken cache makes tiktoken raise
        fail(f"could not fetch the GPT-2 vocabulary ({type(e).__name__}): connect once, or set TIKTOKEN_CACHE_DIR to a copy of another "
             "machine's tiktoken cache, or do without: python data.py --from PATH --tokenizer byte fetches nothing")


@contextlib.contextmanager
def progress(label):
    """Yields show(done, total): a bar with the time left on a terminal, a line every ten seconds anywhere else."""
    terminal, start = sys.stdout.isatty(), time.monotonic()
    last = start

    def show(done, total):
        nonlocal last
        now = time.monotonic()
        if now - last < (0.1 if terminal else 10):
            return
        last, share, text = now, done / max(total, done), f"{label} {done / 1e6:.0f} MB"
        if total:  # some servers do not say
            left = round((now - start) * (1 - share) / share)
            text = f"{label} [{'#' * int(24 * share):24}] {share:4.0%} of {total / 1e6:.0f} MB, {left // 60}:{left % 60:02} left"
        print(f"\r{text:79}" if terminal else text, end="" if terminal else "\n", flush=True)

    try:
        yield show
    finally:
        if terminal:  # whatever comes next, an error too, starts on a clean line
            print(f"\r{'':79}\r", end="", flush=True)


def fetch(url):
    """Yields (block, bytes so far, bytes announced or 0). A ConnectionError means the network, and any other OSError does not."""
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (compatible; data.py)"})  # Python's own gets a 403
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            done, total = 0, int(answer.headers["Content-Length"] or 0)
            while block := answer.read(CHUNK):
                done += len(block)
                yield block, done, total
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise ConnectionError(e) from e
    if done < total:
        raise ConnectionError(f"broke off after {done} of {total} bytes")


def download(path):
    """Puts the raw zip at path, from the first mirror that delivers the right sha256, and returns the address."""
    reasons = []
    for url in MIRRORS:
        host, digest = url.split("/")[2], hashlib.sha256()
        try:
            with open(path, "wb") as f, progress(f"fetching from {host}") as show:
                for block, done, total in fetch(url):
                    f.write(block)
                    digest.update(block)
                    show(done, total)
            if digest.hexdigest() == SHA256:
                return url
            reasons.append(f"{host}: wrong sha256")
        except ConnectionError as e:
            reasons.append(f"{host}: {e}")
        print(reasons[-1], flush=True)
    fail(f"could not fetch WikiText-103 ({'; '.join(reasons)}): try again later, or give a copy of the zip or any text with --from "
         "(and --tokenizer byte if GPT-2's vocabulary cannot be fetched either)")


def sha256(paths):
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()


def cut_near(f, size, percent):
    """Where to cut a text: at the line end nearest to percent of its size or, where lines are long, between two characters."""
    at, reach = size * percent // 100, min(size // 50, 1 << 20)
    f.seek(at - reach)
    near = f.read(2 * reach)
    ends = [i + 1 - reach for i in (near.rfind(b"\n", 0, reach), near.find(b"\n", reach)) if i >= 0]
    if ends:
        return at + min(ends, key=abs)
    for at in range(at, max(at - 4, -1), -1):
        f.seek(at)
        if f.read(1)[0] & 0xC0 != 0x80:  # not inside a UTF-8 character
            break
    return at


def open_text(path):
    size = path.stat().st_size
    if not size:
        fail(f"{path} is empty")
    with open(path, "rb") as f:
        cuts = [0, cut_near(f, size, 90), cut_near(f, size, 95), size]
    if len(set(cuts)) < 4:
        fail(f"{path} is too short to be split into train, val and test: {size} bytes")
    return path.name, sha256([path]), {s: (path, lambda: open(path, "rb"), a, b - a) for s, a, b in zip(SPLITS, cuts, cuts[1:])}


def open_wiki(path):
    """A folder or a zip of the three WikiText files. Zip members are read by exact name, never extracted, so no path in one can harm."""
    name, zipped, patterns = path.resolve().name, not path.is_dir(), ("wiki.{}.raw", "wiki.{}.tokens")
    if zipped:
        digest, patterns = sha256([path]), ("wikitext-103-raw/wiki.{}.raw", "wikitext-103/wiki.{}.tokens")
        if digest not in (SHA256, SHA256_TOKENS):
            name += " (not one of the published zips)"
            print(f"{path} is not one of the two published WikiText-103 zips, by its sha256: its text is taken as it is", flush=True)
        try:
            with zipfile.ZipFile(path) as archive:
                sizes = {info.filename: info.file_size for info in archive.infolist()}
        except BROKEN as e:
            fail(f"{path} is a broken zip ({e}): fetch it again")
    else:
        sizes = {p.name: p.stat().st_size for p in path.iterdir() if p.is_file()}
    pattern = max(patterns, key=lambda p: sum(p.format(theirs) in sizes for theirs in SPLITS.values()))
    files = {split: pattern.format(theirs) for split, theirs in SPLITS.items()}
    for file in files.values():
        if not sizes.get(file):
            fail(f"{path}: {file} is {'empty' if file in sizes else 'missing'}")
    if not zipped:
        digest = sha256(path / file for file in files.values())
    opener = lambda file: lambda: zipfile.ZipFile(path).open(file) if zipped else open(path / file, "rb")
    return name, digest, {split: (f"{path}: {file}", opener(file), 0, sizes[file]) for split, file in files.items()}


def open_source(path):
    """What is at path: (name, sha256, {split: (what to call it in an error, opener of a binary stream, start, bytes)})."""
    if not path.is_file() and not path.is_dir():
        fail(f"{path}: no such file or folder")
    return open_wiki(path) if path.is_dir() or path.suffix.lower() == ".zip" or zipfile.is_zipfile(path) else open_text(path)


def chunks(stream, size):
    """Reads size bytes of UTF-8 as strings of about CHUNK bytes, cut where it makes no difference (or, failing that, anywhere)."""
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    while size:
        block = stream.read(min(CHUNK, size))
        if not block:
            raise EOFError("ends too early")
        size -= len(block)
        try:
            text += decoder.decode(block, final=not size)
        except UnicodeDecodeError as e:
            raise ValueError(f"not UTF-8 text at byte {stream.tell() - len(e.object) + e.start}") from e
        found = CUT.match(text) if size else None
        end = found.end() if found else len(text)
        yield text[:end]
        text = text[end:]


def tokenise(enc, part, path, threads):
    """Writes the token ids of one part of a source to path, safely on disk, and returns how many they are."""
    label, opener, start, size = part
    encode = lambda text: enc.encode_to_numpy(text, disallowed_special=()).astype("<u2").tobytes()
    try:
        # Threads are enough to fill all cores, and cost nothing for a small text: tiktoken lets go of Python's lock while it encodes.
        with opener() as stream, open(path, "wb") as f, ThreadPoolExecutor(threads) as pool, progress(path.stem) as show:
            stream.seek(start)
            texts = chunks(stream, size)
            while group := list(itertools.islice(texts, 4 * threads)):  # pool.map alone would read the whole text ahead
                f.writelines(pool.map(encode, group))
                show(stream.tell() - start, size)
            f.flush()
            os.fsync(f.fileno())
            return f.tell() // 2
    except BROKEN as e:
        fail(f"{label}: {e}")


@contextlib.contextmanager
def workshop(out):
    """
    A temporary folder inside out, removed whatever happens. A killed run leaves its own behind: the sign that .bin files without a
    meta.json are unfinished. Both are cleared, once this run's own folder stands there. Without the sign, such files are not ours.
    """
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    killed = list(out.glob(".partial-*"))
    strange = [out / f"{split}.bin" for split in SPLITS if (out / f"{split}.bin").exists()]
    if strange and not killed:
        fail(f"{strange[0]} is there without a meta.json: choose another --out, or delete it first")
    folder = Path(tempfile.mkdtemp(prefix=".partial-", dir=out))
    try:
        for file in strange:
            file.unlink()
        for old in killed:
            shutil.rmtree(old, ignore_errors=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # it holds the data now
                out.rmdir()


def prepare(source, out, tokenizer, threads):
    """Fills the folder out from source (None: a mirror), unless that is done. meta.json comes last, and only it makes .bin files count."""
    if out.exists() and not out.is_dir():
        fail(f"{out} is not a folder: choose another --out")
    name, digest, parts = open_source(source) if source else (None, SHA256, None)
    if (out / "meta.json").exists():
        meta, _ = load(out)
        sizes = {split: part[-1] for split, part in parts.items()} if source else meta["bytes"]
        if (meta["sha256"], meta["bytes"], meta["tokenizer"]) != (digest, sizes, tokenizer):
            fail(f"{out} already holds {meta['source']} as {meta['tokenizer']} tokens: choose another --out, or delete it first")
        return print(f"{out} is ready, nothing to do: {meta['tokens']['train']:,} {tokenizer} tokens to train on")
    enc = encoding(tokenizer)
    with workshop(out) as folder:
        if not source:
            name = download(folder / "raw.zip")
            _, _, parts = open_wiki(folder / "raw.zip")
        meta = dict(format=FORMAT, tokenizer=tokenizer, vocab_size=VOCAB_SIZE[tokenizer], tokens={}, bytes={}, source=name, sha256=digest)
        for split, part in parts.items():
            meta["bytes"][split], meta["tokens"][split] = part[-1], tokenise(enc, part, folder / f"{split}.bin", threads)
            print(f"{split}: {meta['bytes'][split]:,} bytes, {meta['tokens'][split]:,} {tokenizer} tokens", flush=True)
        with open(folder / "meta.json", "w", encoding="ascii") as f:
            f.write(json.dumps(meta, indent=2) + "\n")
            f.flush()
            os.fsync(f.fileno())
        for file in [f"{split}.bin" for split in SPLITS] + ["meta.json"]:
            os.replace(folder / file, out / file)
    print(f"{out} is ready")


def load(folder):
    """A prepared folder, checked: (meta, {"train": memory map of uint16 token ids, "val": ..., "test": ...})."""
    path, again = Path(folder) / "meta.json", "delete the folder and prepare it again with data.py"
    try:
        meta = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        flag = " --tokenizer byte" * str(Path(folder)).endswith("-byte")
        fail(f"{path} does not exist: prepare the text with python data.py{flag} --out {folder}")
    except (OSError, ValueError, RecursionError) as e:
        fail(f"{path} cannot be read ({e}): {again}")
    for field, kind in META.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(field), kind):
            fail(f"{path}: {field} is missing or wrong: {again}")
        if field == "format" and meta[field] != FORMAT:
            fail(f"{path} has format {meta[field]}, and this data.py knows {FORMAT}: update the project, or {again}")
    if meta["vocab_size"] != VOCAB_SIZE.get(meta["tokenizer"]):
        fail(f"{path}: tokenizer or vocab_size is unknown: {again}")
    splits = {}
    for split in SPLITS:
        path, count, size = Path(folder) / f"{split}.bin", meta["tokens"].get(split), meta["bytes"].get(split)
        if not (isinstance(count, int) and isinstance(size, int) and 0 < count <= size):
            fail(f"{folder}: meta.json's tokens or bytes of {split} are missing or wrong: {again}")
        try:
            if path.stat().st_size != 2 * count:
                fail(f"{path} has {path.stat().st_size} bytes, but meta.json says {count} tokens of two bytes each: {again}")
            splits[split] = np.memmap(path, dtype="<u2", mode="r")
        except OSError as e:
            fail(f"{path} cannot be read ({e.strerror}): {again}")
        if splits[split].max() >= meta["vocab_size"]:
            fail(f"{path} holds token {splits[split].max()}, beyond the vocabulary of {meta['vocab_size']}: {again}")
    return meta, splits


def batch(tokens, seed, step, size, window):
    """Random windows and the tokens that follow, (x, y), both int64 (size, window): a pure function of seed and step."""
    starts = np.random.default_rng([STREAM, seed, step]).integers(len(tokens) - window, size=size)
    rows = np.asarray(tokens)[starts[:, None] + np.arange(window + 1)].astype(np.int64)  # (size, window + 1)
    return rows[:, :-1], rows[:, 1:]


class WikiText:
    """
    A prepared text as a task like those of tasks.py, but for what is scored: every token, by perplexity.

        x   the cat sat on          y   cat sat on the          (window 4)

    Its test sets are windows of 1, 2, 4 ... 32 times the training window over one and the same test text.
    """
    name, metric = "wikitext", "perplexity"

    def __init__(self, data, window):
        if type(window) is not int or window < 1:
            fail(f"--window must be a whole number of at least 1, not {window!r}")
        self.data, self.window = data, window
        self.meta, self.tokens = load(data)
        self.vocab_size = self.meta["vocab_size"]
        self.splits = {"train": window} | {str(window << i): window << i for i in range(6)}
        self.sizes = {"tokenizer": self.meta["tokenizer"], "sha256": self.meta["sha256"][:12], "window": window}
        for split, tokens in self.tokens.items():
            if len(tokens) <= window:
                fail(f"{data}: the {split} text has {len(tokens)} tokens, too few for a window of {window}: prepare a longer text, or choose a smaller --window")

    def batch(self, split, seed, step, size):
        return batch(self.tokens["train"], seed, step, size, self.window)


@script
def main():
    parser = Parser(prog="data.py", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, metavar="PATH",
                        help="a WikiText-103 zip, a folder of wiki.*.raw or .tokens, or a UTF-8 text file; default: fetch the raw zip")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to fill; default: data/wikitext-103, with byte data/wikitext-103-byte")
    parser.add_argument("--tokenizer", choices=list(VOCAB_SIZE), default="gpt2",
                        help="gpt2 (default): 50,257 tokens, for paper scale; byte: 256 tokens, for laptop scale, nothing to fetch")
    args = parser.parse_args()
    out = args.out or Path("data/wikitext-103" + ("-byte" if args.tokenizer == "byte" else ""))
    try:
        prepare(args.source, out, args.tokenizer, os.cpu_count() or 1)
    except BrokenPipeError:     # stdout, not the disk
        raise
    except OSError as e:
        fail(f"{e.filename or out}: {e.strerror or e}")


if __name__ == "__main__":
    main()
