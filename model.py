"""
A GPT whose attention is one of six: TRA, RoPE and CoPE side by side, then NoPE, ALiBi and FoX.

TRA    Threshold Relative Attention   Opper et al. 2025       arXiv 2503.23174
RoPE   rotary positions               Su et al. 2021          arXiv 2104.09864
CoPE   contextual positions           Golovneva et al. 2024   arXiv 2405.18719
NoPE   no positions at all            Kazemnejad et al. 2023  arXiv 2305.19466
ALiBi  linear distance bias           Press et al. 2021       arXiv 2108.12409
FoX    Forgetting Transformer         Lin et al. 2025         arXiv 2503.02130

    python model.py      # TRA on one query and five keys, by the numbers

Axes: B batch, H heads, T queries, S keys (the queries are the last T of the S positions), D head width, C model width,
V vocabulary. Every *_attention takes q (B,H,T,D) and k, v (B,H,S,D), is causal, scales by 1/sqrt(D) and returns
(B,H,T,D); dropout_p is 0 except in training. Copied out alone, this file works without the others.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

# -----------------------------------------------------------------------------
# What the attentions share


def causal_mask(T, S, device):
    """(T, S), True where query i may see key j. Aligned to the bottom right: the last query sees every key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def sdpa(q, k, v, dropout_p, bias=None):
    """softmax(q k^T / sqrt(D) + bias) v over the causal keys, by torch's own kernels; bias (T, S) or (B, H, T, S)."""
    T, S = q.size(2), k.size(2)
    if bias is None and T == S:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    if bias is None and T == 1:         # a single query sees every key
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    mask = causal_mask(T, S, q.device)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)


def widen(x):
    """Half precision to float32; everything else as it is."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


def full_precision(attention):
    """Run an attention in float32 (float64 stays) under any autocast: bfloat16 cannot count past 256."""
    @functools.wraps(attention)
    def wrapped(q, k, v, *args, **kwargs):
        with torch.autocast(q.device.type, enabled=False):
            kwargs = {name: widen(x) for name, x in kwargs.items()}
            return attention(*map(widen, (q, k, v, *args)), **kwargs).to(v.dtype)
    return wrapped


# -----------------------------------------------------------------------------
# The six attentions as functions


@full_precision
def tra_plain(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0):
    """TRA: keys that do not matter leave the softmax, and distance counts only the keys that stay.

        S_ij        = q_i . k_j / sqrt(D)                               (q and k arrive RMS-normalised)
        relevant_ij = S_ij > 0 and j <= i
        n_ij        = number of relevant keys l with j <= l <= i        (the nearest one has distance 1)
        A_ij        = softmax over relevant j of  S_ij + f_i * n_ij     (a row without any is all zeros)

    log_forget is f (B, H, T) <= 0, the log of a forget gate per head and query: 0 forgets nothing. Two ablations are
    independent: sparse=False takes the softmax over all j <= i, contextual=False counts all keys, n_ij = i - j + 1.
    """
    mask = causal_mask(q.size(2), k.size(2), q.device)                              # (T, S)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                      # (B, H, T, S)
    relevant = (scores > 0) & mask
    keep = relevant if sparse else mask
    n = count_back(relevant if contextual else mask, scores.dtype)
    logits = scores + log_forget.unsqueeze(-1) * n
    # finfo.min instead of -inf: a softmax over no keys would be NaN. Multiplied by keep, such a row is zero.
    weights = torch.where(keep, logits, torch.finfo(logits.dtype).min).softmax(-1) * keep
    return F.dropout(weights, dropout_p) @ v


def count_back(counted, dtype):
    """How many keys are counted from each key up to the query, itself included. Keys after the query must be False."""
    counted = counted.to(dtype)
    return counted.sum(-1, keepdim=True) - counted.cumsum(-1) + counted


def tra_attention(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0):
    """tra_plain or, where that pays, a faster form of it from extras/. They agree up to rounding."""
    attention = tra_plain
    if q.size(2) >= (1024 if q.is_cuda else 128):
        try:
            from extras.fast import tra_for_long_sequences
            attention = tra_for_long_sequences(q.device)
        except ImportError:
            pass        # model.py on its own
    return attention(q, k, v, log_forget, sparse, contextual, dropout_p)


def rope_attention(q, k, v, theta, dropout_p=0.0):
    """RoPE: turn q and k by angles that grow with their position, so that q_i . k_j depends on i - j.

        A_ij = softmax over j <= i of  R(i) q_i . R(j) k_j / sqrt(D)
    """
    S, D = k.shape[2:]
    wide = torch.promote_types(k.dtype, torch.float32)                              # positions need float32
    inv_freq = theta ** (-torch.arange(0, D, 2, device=k.device, dtype=wide) / D)   # (D/2,)
    angle = torch.arange(S, device=k.device, dtype=wide)[:, None] * inv_freq        # (S, D/2)
    cos, sin = angle.cos(), angle.sin()

    def rotate(x):
        c, s = cos[-x.size(2):], sin[-x.size(2):]                                   # x holds the last positions
        a, b = x.to(wide).chunk(2, dim=-1)                                          # (B, H, T, D/2) each
        return torch.cat((a * c - b * s, a * s + b * c), dim=-1).to(x.dtype)

    return sdpa(rotate(q), rotate(k), v, dropout_p)


@full_precision
def cope_attention(q, k, v, pos_emb, dropout_p=0.0):
    """CoPE: distance is a sum of soft gates, and a learned vector e[p] says what a distance p means to a query.

        S_ij = q_i . k_j / sqrt(D)
        p_ij = sum of sigmoid(S_il) over j <= l <= i, at most npos - 1
        A_ij = softmax over j <= i of  S_ij + q_i . e[p_ij]             (e between two entries is interpolated)

    pos_emb is (D, npos). As in the paper's listing, the position term is not divided by sqrt(D).
    """
    T, S, rows = q.size(2), k.size(2), 256
    if T > rows:
        # A few rows at a time, with the keys that they see: evaluation then never holds all of T x S.
        parts = [cope_attention(q[:, :, t - rows:t], k[:, :, :S - T + t], v[:, :, :S - T + t], pos_emb, dropout_p)
                 for t in range(rows, T + rows, rows)]
        return torch.cat(parts, dim=2)
    mask = causal_mask(T, S, q.device)                                              # (T, S)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                      # (B, H, T, S)
    gates = scores.sigmoid() * mask
    pos = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.size(-1) - 1)        # (B, H, T, S)
    by_entry = q @ pos_emb                                                          # (B, H, T, npos)
    low, high = pos.floor().long(), pos.ceil().long()
    share = pos - low                                                               # 0 at low, 1 at high
    bias = by_entry.gather(-1, low) * (1 - share) + by_entry.gather(-1, high) * share
    weights = (scores + bias).masked_fill(~mask, -torch.inf).softmax(-1)
    return F.dropout(weights, dropout_p) @ v


def nope_attention(q, k, v, dropout_p=0.0):
    """NoPE: nothing but the causal mask.  A_ij = softmax over j <= i of  q_i . k_j / sqrt(D)"""
    return sdpa(q, k, v, dropout_p)


@full_precision
def alibi_attention(q, k, v, dropout_p=0.0):
    """ALiBi: subtract the distance, times a slope per head, m_h = 2^(-8h/H) with h = 1..H.

        A_ij = softmax over j <= i of  q_i . k_j / sqrt(D) - m_h * (i - j)
    """
    H, T, S = q.size(1), q.size(2), k.size(2)
    slope = 2.0 ** (-8 / H * torch.arange(1, H + 1, device=q.device, dtype=q.dtype))        # (H,)
    pos = torch.arange(S, device=q.device, dtype=q.dtype)
    distance = pos[S - T:, None] - pos                                              # (T, S)
    return sdpa(q, k, v, dropout_p, bias=(-slope[:, None, None] * distance).unsqueeze(0))


@full_precision
def fox_attention(q, k, v, log_forget, dropout_p=0.0):
    """FoX: every token in between forgets a little. Gates come from the keys passed over, not from the query as in TRA.

        A_ij = softmax over j <= i of  q_i . k_j / sqrt(D) + sum of f_l over j < l <= i

    log_forget is f (B, H, S) <= 0, one gate per head and position.
    """
    total = log_forget.cumsum(-1)                                                   # (B, H, S)
    return sdpa(q, k, v, dropout_p, bias=total[..., -q.size(2):, None] - total[..., None, :])


# -----------------------------------------------------------------------------
# The six attentions as layers, (B, T, C) -> (B, T, C)


def remember(cache, name, new):
    """Append new (B, H, T, ...) to what the cache holds under this name and return all of it. No cache: just new."""
    if cache is None:
        return new
    cache[name] = torch.cat((cache[name], new), dim=2) if name in cache else new
    return cache[name]


class Attention(nn.Module):
    """Projections in and out, heads and cache, which all six share. A subclass says in attend() how q, k and v meet.

    attend() gets x (B, T, C) and q (B, H, T, D) of the new tokens, k and v (B, H, S, D) of all tokens so far, and the
    cache, where anything else that belongs to keys must be remembered, as FoX does with its gates.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    @property
    def dropout_p(self):
        return self.config.dropout if self.training else 0.0

    def heads(self, x):
        """x (B, T, C) -> q, k, v, (B, H, T, D) each."""
        return self.qkv(x).view(*x.shape[:2], 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x, cache=None):
        q, k, v = self.heads(x)                                                     # (B, H, T, D) each
        k, v = remember(cache, "k", k), remember(cache, "v", v)                     # (B, H, S, D)
        y = self.attend(x, q, k, v, cache)                                          # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))


class ForgetGate(nn.Linear):
    """x (B, T, C) -> f = logsigmoid(w . x + b), (B, H, T)."""

    def __init__(self, config):
        super().__init__(config.n_embd, config.n_head)
        self.bias.data += config.forget_bias

    def forward(self, x):
        return F.logsigmoid(widen(super().forward(x))).transpose(1, 2)


class TRA(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.forget = ForgetGate(config)

    def heads(self, x):
        qkv = super().heads(x)                                                      # (3, B, H, T, D)
        # No learned scale. One call on contiguous memory is faster.
        q, k = F.rms_norm(qkv[:2].contiguous(), qkv.shape[-1:])
        return q, k, qkv[2]

    def attend(self, x, q, k, v, cache):
        config = self.config
        return tra_attention(q, k, v, self.forget(x), config.sparse, config.contextual, dropout_p=self.dropout_p)


class RoPE(Attention):
    def attend(self, x, q, k, v, cache):
        return rope_attention(q, k, v, self.config.rope_theta, dropout_p=self.dropout_p)


class CoPE(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.pos_emb = nn.Parameter(torch.zeros(config.n_embd // config.n_head, config.cope_npos))      # (D, npos)

    def attend(self, x, q, k, v, cache):
        return cope_attention(q, k, v, self.pos_emb, dropout_p=self.dropout_p)


class NoPE(Attention):
    def attend(self, x, q, k, v, cache):
        return nope_attention(q, k, v, dropout_p=self.dropout_p)


class ALiBi(Attention):
    def attend(self, x, q, k, v, cache):
        return alibi_attention(q, k, v, dropout_p=self.dropout_p)


class FoX(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.forget = ForgetGate(config)

    def attend(self, x, q, k, v, cache):
        log_forget = remember(cache, "log_forget", self.forget(x))                  # (B, H, S)
        return fox_attention(q, k, v, log_forget, dropout_p=self.dropout_p)


# To add one: a function, a class and an entry here; a setting of its own is a field of GPTConfig.
ATTENTIONS = {"tra": TRA, "rope": RoPE, "cope": CoPE, "nope": NoPE, "alibi": ALiBi, "fox": FoX}

# -----------------------------------------------------------------------------
# The GPT around them


def setting(default, help):
    """A field of GPTConfig. train.py makes a flag of it, with this help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class GPTConfig:
    attn: str = setting("tra", "which attention: a name in ATTENTIONS")
    vocab_size: int = setting(64, "number of different tokens")
    n_layer: int = setting(4, "blocks")
    n_head: int = setting(4, "attention heads in each block")
    n_embd: int = setting(256, "width of the model; divisible by the number of heads")
    dropout: float = setting(0.01, "on attention weights and on the MLP's hidden units")
    embd_std: float = setting(0.3, "standard deviation of the token embeddings at the start")
    rope_theta: float = setting(500_000.0, "RoPE: base of the rotation frequencies")
    cope_npos: int = setting(64, "CoPE: number of learned positions")
    forget_bias: float = setting(0.0, "TRA, FoX: added to the gates' bias at the start; higher forgets less")
    sparse: bool = setting(True, "TRA: keys whose score is not positive leave the softmax")
    contextual: bool = setting(True, "TRA: distance counts only keys with a positive score")

    def __post_init__(self):
        if self.attn not in ATTENTIONS:
            raise ValueError(f"unknown attention {self.attn!r}; choose one of {', '.join(ATTENTIONS)}")
        if min(self.vocab_size, self.n_layer, self.n_head, self.n_embd) < 1 or self.n_embd % self.n_head:
            raise ValueError(f"n_layer {self.n_layer}, n_head {self.n_head} and n_embd {self.n_embd} must be at least "
                             "1, and n_embd divisible by n_head")
        if self.attn == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(f"RoPE turns pairs: n_embd / n_head must be even, not {self.n_embd // self.n_head}")
        if not (self.sparse and self.contextual) and not issubclass(ATTENTIONS[self.attn], TRA):
            raise ValueError(f"sparse and contextual are parts of TRA; {self.attn} has none to switch off")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")


class MLP(nn.Module):
    """SwiGLU: one half of the hidden units gates the other; each half is 2 C wide."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)                                   # (B, T, 2C) each
        return self.down(self.dropout(F.silu(gate) * value))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.n_embd)
        self.attn = ATTENTIONS[config.attn](config)
        self.norm2 = nn.RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token embedding, blocks, norm, untied output. No absolute positions, so any model runs at any length."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=config.embd_std)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) -> logits (B, T, V) and the mean loss over the targets that are not -1 (None without targets).

        cache, a list with one dict per block, holds the keys of earlier calls; idx then continues where they ended.
        """
        x = self.embed(idx)                                                         # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        logits = self.head(self.norm(x))                                            # (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue idx (B, T) to (B, T + max_new_tokens); temperature 0 always takes the likeliest token."""
        was_training = self.training
        self.eval()
        cache, tokens = [{} for _ in self.blocks], [idx]
        with torch.inference_mode():
            for _ in range(max_new_tokens):
                logits = self(tokens[-1], cache=cache)[0][:, -1].float()            # (B, V)
                if top_k is not None:
                    logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
                if temperature < 1e-6:
                    tokens.append(logits.argmax(-1, keepdim=True))                  # (B, 1)
                else:
                    tokens.append(torch.multinomial((logits / temperature).softmax(-1), num_samples=1))
        self.train(was_training)
        return torch.cat(tokens, dim=1)         # outside of inference mode: a tensor that a model can be trained on


def worked_example():
    """One query, five keys; then two irrelevant keys come in, and the others do not notice.

    With D = 1 and q = 1 the keys are the scores, and with the identity as v attention returns its weights.
    """
    f = -0.5
    for scores in ([1.5, -0.4, 0.2, -2.0, 0.9], [1.5, -0.4, -1.0, 0.2, -2.0, -0.1, 0.9]):
        print(f"One query, {len(scores)} keys from oldest to newest, forget gate f = {f}\n")
        k = torch.tensor(scores)
        v = torch.eye(len(scores))
        A = tra_attention(torch.ones(1, 1, 1, 1), k.view(1, 1, -1, 1), v[None, None], torch.full((1, 1, 1), f))
        n = torch.where(k > 0, count_back(k > 0, k.dtype), math.nan)
        for name, row in {"score S": k, "distance n": n, "S + f n": k + f * n, "weight A": A.flatten()}.items():
            print(f"{name:10s}", *(f"{x:7.4g}".replace("nan", "  -") for x in row.tolist()))
        print()


if __name__ == "__main__":
    worked_example()
