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
V vocabulary. Every *_attention takes q (B,H,T,D) and k, v (B,H,S,D), is causal, scales by 1/sqrt(D) and returns (B,H,T,D);
dropout_p is 0 except in training.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def causal_mask(T, S, device):
    """(T, S), True where query i may see key j. Aligned to the bottom right: the last query sees every key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def sdpa(q, k, v, dropout_p, bias=None):
    """softmax(q k^T / sqrt(D) + bias) v over the causal keys, by torch's kernel, fused where it can be; bias is (T, S) or (B, H, T, S)."""
    T, S = q.size(2), k.size(2)
    if bias is None and T in (1, S):                        # a single query sees every key
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=T == S)
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
            return attention(*map(widen, (q, k, v, *args)), **{name: widen(x) for name, x in kwargs.items()}).to(v.dtype)
    return wrapped


def rope_attention(q, k, v, theta, dropout_p=0.0):
    """RoPE: turn q and k by angles that grow with their position, so that q_i . k_j depends on i - j.

        A_ij = softmax over j <= i of  R(i) q_i . R(j) k_j / sqrt(D)
    """
    S, D = k.shape[2:]
    wide = torch.promote_types(k.dtype, torch.float32)                                      # positions need float32
    speed = theta ** (-torch.arange(0, D, 2, device=k.device, dtype=wide) / D)              # (D/2,)
    angle = torch.arange(S, device=k.device, dtype=wide)[:, None] * speed                   # (S, D/2)
    cos, sin = angle.cos(), angle.sin()

    def rotate(x):
        c, s = cos[-x.size(2):], sin[-x.size(2):]                                           # x holds the last positions
        a, b = x.to(wide).chunk(2, dim=-1)                                                  # (B, H, T, D/2) each
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
    T, S = q.size(2), k.size(2)
    if T > 256:         # 256 rows at a time, with the keys that they see: without gradients, T x S never exists as a whole
        return torch.cat([cope_attention(q[:, :, t - 256:t], k[:, :, :S - T + t], v[:, :, :S - T + t], pos_emb, dropout_p)
                          for t in range(256, T + 256, 256)], dim=2)
    mask = causal_mask(T, S, q.device)                                                      # (T, S)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                              # (B, H, T, S)
    gates = scores.sigmoid() * mask
    pos = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.size(-1) - 1)                # (B, H, T, S)
    by_entry = q @ pos_emb                                                                  # (B, H, T, npos)
    low, high = pos.floor().long(), pos.ceil().long()
    part = pos - low                                                                        # 0 at low, 1 at high
    bias = by_entry.gather(-1, low) * (1 - part) + by_entry.gather(-1, high) * part
    weights = (scores + bias).masked_fill(~mask, -torch.inf).softmax(-1)
    return F.dropout(weights, dropout_p) @ v


def tra_plain(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0):
    """TRA: keys that do not matter leave the softmax, and distance counts only the keys that stay.

        S_ij    = q_i . k_j / sqrt(D)                                   (q and k arrive RMS-normalised)
        keep_ij = S_ij > 0 and j <= i
        n_ij    = number of kept keys l with j <= l <= i                (the nearest kept key has distance 1)
        A_ij    = softmax over kept j of  S_ij + f_i * n_ij             (a row that keeps nothing is all zeros)

    log_forget is f (B, H, T) <= 0, one gate per head and query. The two ablations are independent: sparse=False leaves
    every causal key in the softmax, contextual=False counts every causal key: n_ij = i - j + 1.
    """
    T, S = q.size(2), k.size(2)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                              # (B, H, T, S)
    relevant = (scores > 0).tril(S - T)                                                     # and not later than the query
    keep = relevant if sparse else causal_mask(T, S, q.device)
    counted = (relevant if contextual else causal_mask(T, S, q.device)).to(scores.dtype)
    n = counted.sum(-1, keepdim=True) - counted.cumsum(-1) + counted                        # all, minus those up to j, plus j
    logits = scores + log_forget.unsqueeze(-1) * n
    # With -inf, a row without keys would be NaN. So the smallest finite number, then zero: it is all zeros, and so is its gradient.
    weights = torch.where(keep, logits, torch.finfo(logits.dtype).min).softmax(-1) * keep
    return F.dropout(weights, dropout_p) @ v


@full_precision
def tra_attention(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0):
    """tra_plain for fewer than two blocks of queries, else tra_blocked, further down: the same up to rounding, and faster there."""
    form = tra_plain if q.size(2) < 2 * BLOCK else tra_blocked
    return form(q, k, v, log_forget, sparse, contextual, dropout_p)


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
    distance = pos[S - T:, None] - pos                                                      # (T, S)
    return sdpa(q, k, v, dropout_p, bias=(-slope[:, None, None] * distance).unsqueeze(0))


@full_precision
def fox_attention(q, k, v, log_forget, dropout_p=0.0):
    """FoX: every token in between forgets a little. Gates come from the keys passed over, not from the query as in TRA.

        A_ij = softmax over j <= i of  q_i . k_j / sqrt(D) + sum of f_l over j < l <= i

    log_forget is f (B, H, S) <= 0, one gate per head and position.
    """
    total = log_forget.cumsum(-1)                                                           # (B, H, S)
    return sdpa(q, k, v, dropout_p, bias=total[..., -q.size(2):, None] - total[..., None, :])


# On a first reading, go on at remember(): from here to there is tra_plain once more, only faster.

BLOCK = 64      # queries, and keys, in a block


@torch.compiler.disable     # how far it goes depends on the data
def tra_blocked(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0, tell_reach=False):
    """tra_plain without T x S tensors, forward or backward, and without the work that forgetting makes pointless.

    Each block of queries walks leftward over the blocks of keys, from its own on, with a running count and softmax. On the
    way f_i * n_ij only falls, and S_ij <= |q_i| max|k_j| / sqrt(D) = b_i. So when query i has counted n keys, each key still
    ahead weighs at most exp(b_i + f_i * n). A block stops when, for all its queries, the number of keys times that is at
    most eps (of the dtype) times the weight so far: what is skipped moves the output by no more than 2 eps max|v|, which is rounding error.
    A query that has kept nothing has no weight so far, and walks on. With tell_reach, also returns how many blocks to the left
    each block of queries walked, (B, H, blocks).
    """
    B, H, T, D = q.shape
    S = k.size(2)
    f = log_forget.unsqueeze(-1)                                                            # (B, H, T, 1)
    with torch.no_grad():
        bound = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[..., None, None] / math.sqrt(D)
        enough = bound + math.log(S / torch.finfo(q.dtype).eps)         # done when enough + f n <= log of the weight so far

    before, after = (S - T) % BLOCK, -S % BLOCK             # padding to whole blocks; no query sees what is after the end
    queries, keys = (before + T + after) // BLOCK, (S + after) // BLOCK                     # blocks per head
    left = torch.arange(keys - queries, keys, device=q.device).repeat(B * H)                # (N,), N = B * H * queries: blocks of keys to the left of each
    own = left + torch.arange(0, B * H * keys, keys, device=q.device).repeat_interleave(queries)       # (N,): the block of keys of its own tokens

    def blocks(x, before, fill=0.0):
        if before or after:
            x = F.pad(x, (0, 0, before, after), value=fill)
        return x.reshape(-1, BLOCK, x.size(-1))                                             # (N, BLOCK, D)

    seed = torch.randint(2**62, ()).item() if dropout_p else None           # backward draws the same masks again
    v = v / (1 - dropout_p) if dropout_p else v                             # masks are 0 or 1, so v is scaled instead
    out, reach = TRABlocks.apply(blocks(q, before), blocks(k, 0), blocks(v, 0), blocks(f, before), blocks(enough, before, -torch.inf),
                                 own, left, (sparse, contextual, dropout_p, seed))
    out = out.view(B, H, -1, v.size(-1))[:, :, before:before + T]
    return (out, reach.view(B, H, -1)) if tell_reach else out


def pick(x, rows):
    """x[rows], four times as fast on a CPU."""
    return x.index_select(0, rows)


def walk(q, k, f, own, reach, sparse, contextual, dropout_p, seed):
    """In step s, each block of queries that reaches so far meets the block of keys s to the left of its own.

    Yields, for some of them at a time: which rows of q and of k; a softmax within the block, its logsumexp, the distances n;
    and the dropout mask. Boolean masks are avoided: masked_fill takes longer than a matrix product.
    """
    hide = torch.finfo(q.dtype).min / 4
    ones = torch.ones(BLOCK, BLOCK, dtype=q.dtype, device=q.device)
    triangle = ones.tril()
    count = torch.zeros_like(f)                                                             # (N, BLOCK, 1), keys so far
    generator = torch.Generator(q.device).manual_seed(seed) if dropout_p else None
    at_once = 64 if q.device.type == "cpu" else 4096        # what a cache holds, or what keeps a GPU busy
    step = 0
    while len(walking := (reach >= step).nonzero().squeeze(1)):
        seen = triangle if step == 0 else ones              # only its own block holds keys that come after a query
        for rows in walking.split(at_once):                                                 # (R,)
            keys = pick(own, rows) - step
            scores = (pick(q, rows) @ pick(k, keys).mT).div_(math.sqrt(q.size(-1)))         # (R, BLOCK, BLOCK)
            if step == 0:
                scores.add_(1 - seen, alpha=hide)                                           # the keys after a query
            relevant = scores.sign().relu_()                                                # 1 if S > 0 and j <= i, else 0
            n = pick(count, rows) + (relevant if contextual else seen) @ triangle           # faster than cumsum
            count[rows] = n[..., :1]                                                        # from the leftmost key on
            if sparse:
                F.threshold_(scores, 0, hide)                                               # S > 0 or hidden
            logits = torch.addcmul(scores, pick(f, rows), n)
            weights = logits.softmax(-1)
            lse = logits.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()      # max weight = exp(max logit - lse)
            mask = torch.empty_like(scores).uniform_(generator=generator).gt_(dropout_p) if dropout_p else None
            yield rows, keys, weights, lse, n, mask
        step += 1


class TRABlocks(torch.autograd.Function):
    """Forward merges the softmaxes of the blocks. Backward walks again, as far, and computes the weights anew. As keep and n
    are piecewise constant, the gradients are those of softmax attention, and for f_i the sum of dlogit_ij * n_ij.
    """

    @staticmethod
    def forward(ctx, q, k, v, f, enough, own, left, settings):
        out = q.new_zeros(*q.shape[:2], v.size(-1))                                         # (N, BLOCK, D)
        lse = torch.full_like(f, torch.finfo(f.dtype).min / 8)      # nothing kept yet; a hidden key's logit is lower still
        reach = torch.zeros_like(own)                                                       # (N,)
        for rows, keys, weights, lse_here, n, mask in walk(q, k, f, own, reach, *settings):
            out_here = (weights if mask is None else weights * mask) @ pick(v, keys)        # (R, BLOCK, D)
            lse_now = torch.logaddexp(pick(lse, rows), lse_here)                            # (R, BLOCK, 1)
            out[rows] = pick(out, rows).lerp(out_here, (lse_here - lse_now).exp())          # by their shares of the weight
            lse[rows] = lse_now
            done = (pick(enough, rows) + pick(f, rows) * n[..., :1] <= lse_now).all(1).squeeze(1)      # (R,)
            reach[rows] += ~done & (pick(reach, rows) < pick(left, rows))
        ctx.save_for_backward(q, k, v, f, own, reach, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(reach)
        return out, reach

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, f, own, reach, out, lse = ctx.saved_tensors
        dq, dk, dv, df = map(torch.zeros_like, (q, k, v, f))
        inner = (dout * out).sum(-1, keepdim=True)                      # (N, BLOCK, 1), the sum of A_ij dA_ij over j
        scale = 1 / math.sqrt(q.size(-1))
        with torch.autocast(q.device.type, enabled=False):
            for rows, keys, weights, lse_here, n, mask in walk(q, k, f, own, reach, *ctx.settings):
                weights.mul_((lse_here - pick(lse, rows)).exp())                            # now of the whole row
                dout_here = pick(dout, rows)
                dweights = dout_here @ pick(v, keys).mT                                     # (R, BLOCK, BLOCK)
                dv.index_add_(0, keys, (weights if mask is None else weights * mask).mT @ dout_here)
                if mask is not None:
                    dweights.mul_(mask)
                dlogits = dweights.sub_(pick(inner, rows)).mul_(weights)
                dq.index_add_(0, rows, dlogits @ pick(k, keys), alpha=scale)
                dk.index_add_(0, keys, dlogits.mT @ pick(q, rows), alpha=scale)
                df.index_add_(0, rows, (dlogits * n).sum(-1, keepdim=True))
        return dq, dk, dv, df, None, None, None, None


def remember(cache, name, new):
    """Append new (B, H, T, ...) to what the cache holds under this name and return all of it; without a cache, just new.

    It is written in place, where there is room, so that a token does not cost a copy of all before it. That is for use without
    gradients; and whoever wants to go on in two ways from one cache needs copy.deepcopy.
    """
    if cache is None:
        return new
    room, used = cache.get(name, (new[:, :, :0], 0))
    total = used + new.size(2)
    if total > room.size(2):
        more = new.new_empty(*new.shape[:2], total - used + 256, *new.shape[3:])
        room = torch.cat((room[:, :, :used], more), dim=2)
    room[:, :, used:total] = new
    cache[name] = room, total
    return room[:, :, :total]


class Attention(nn.Module):
    """What all six share: projections in and out, heads, cache. A subclass says in attend() how q, k and v meet.

    attend() gets x (B, T, C) and q (B, H, T, D) of the new tokens, k and v (B, H, S, D) of all tokens so far, and the cache,
    where whatever else belongs to keys must be remembered, as in FoX.
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
        q, k, v = self.heads(x)                                                             # (B, H, T, D) each
        k, v = remember(cache, "k", k), remember(cache, "v", v)                             # (B, H, S, D)
        y = self.attend(x, q, k, v, cache)                                                  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))


class RoPE(Attention):
    def attend(self, x, q, k, v, cache):
        return rope_attention(q, k, v, self.config.rope_theta, dropout_p=self.dropout_p)


class CoPE(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.pos_emb = nn.Parameter(torch.zeros(config.n_embd // config.n_head, config.cope_npos))     # (D, npos)

    def attend(self, x, q, k, v, cache):
        return cope_attention(q, k, v, self.pos_emb, dropout_p=self.dropout_p)


class ForgetGate(nn.Linear):
    """x (B, T, C) -> f = logsigmoid(w . x + b), (B, H, T)."""

    def __init__(self, config):
        super().__init__(config.n_embd, config.n_head)
        with torch.no_grad():
            self.bias += config.forget_bias

    def forward(self, x):
        return F.logsigmoid(widen(super().forward(x))).transpose(1, 2)


class TRA(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.forget = ForgetGate(config)

    def heads(self, x):
        qkv = super().heads(x)                                                              # (3, B, H, T, D)
        q, k = F.rms_norm(qkv[:2].contiguous(), qkv.shape[-1:])                             # contiguous: faster, both passes
        return q, k, qkv[2]

    def attend(self, x, q, k, v, cache):
        return tra_attention(q, k, v, self.forget(x), self.config.sparse, self.config.contextual, dropout_p=self.dropout_p)


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
        return fox_attention(q, k, v, remember(cache, "log_forget", self.forget(x)), dropout_p=self.dropout_p)


# To add one: a function above, a class like these, an entry here. Flags, tests and tables find it by themselves.
ATTENTIONS = {"tra": TRA, "rope": RoPE, "cope": CoPE, "nope": NoPE, "alibi": ALiBi, "fox": FoX}


@dataclass(frozen=True)
class GPTConfig:
    attn: str = "tra"
    vocab_size: int = 64
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    dropout: float = 0.01
    embd_std: float = 0.3           # of the token embeddings at the start
    rope_theta: float = 500_000.0
    cope_npos: int = 64
    forget_bias: float = 0.0        # TRA and FoX: added to the gates' bias at the start; the higher, the less is forgotten at first
    sparse: bool = True             # TRA: keys with a score that is not positive leave the softmax
    contextual: bool = True         # TRA: distance counts only keys with a positive score

    def __post_init__(self):
        if self.attn not in ATTENTIONS:
            raise ValueError(f"unknown attention {self.attn!r}; choose one of {', '.join(ATTENTIONS)}")
        for name in ("vocab_size", "n_layer", "n_head", "n_embd", "cope_npos"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {getattr(self, name)!r}")
        for name in ("sparse", "contextual"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} must be divisible by n_head {self.n_head}")
        if self.attn == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(f"RoPE turns pairs: n_embd / n_head must be even, not {self.n_embd // self.n_head}")
        if ATTENTIONS[self.attn] is not TRA and not (self.sparse and self.contextual):
            raise ValueError(f"sparse and contextual are parts of tra; {self.attn} has none to switch off")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if not math.isfinite(self.forget_bias):
            raise ValueError(f"forget_bias must be finite, not {self.forget_bias}")
        for name in ("embd_std", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


class MLP(nn.Module):
    """SwiGLU: one half of the hidden units gates the other; each half is 2 C wide."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)                                           # (B, T, 2C) each
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
    """Token embedding, blocks, norm, untied output. No absolute positions and no maximum length: any model runs at any T."""

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
        x = self.embed(idx)                                                                 # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        logits = self.head(self.norm(x))                                                    # (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Yield new tokens (B, 1) that continue idx (B, T), one at a time; temperature 0 always takes the likeliest."""
        was_training = self.training
        self.eval()
        cache = [{} for _ in self.blocks]
        try:
            for _ in range(max_new_tokens):
                logits = self(idx, cache=cache)[0][:, -1].float()                           # (B, V)
                if top_k is not None:
                    logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
                if temperature < 1e-6:
                    idx = logits.argmax(-1, keepdim=True)                                   # (B, 1)
                else:
                    idx = torch.multinomial((logits / temperature).softmax(-1), num_samples=1)
                yield idx
        finally:
            self.train(was_training)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) and what continues it, (B, T + max_new_tokens); an ordinary tensor, whereas stream yields inference tensors."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, temperature, top_k)), dim=1)


def worked_example():
    """One query, five keys. With D = 1 and q = 1 the keys are the scores, and v = identity returns the weights."""
    def weights(scores, forget):
        k = torch.tensor(scores).view(1, 1, -1, 1)
        v = torch.eye(len(scores)).view(1, 1, len(scores), -1)
        return tra_attention(torch.ones(1, 1, 1, 1), k, v, torch.full((1, 1, 1), forget)).flatten().tolist()

    def show(name, values, form="{:8.4f}"):
        print(f"{name:10s}" + "".join("       -" if v is None else form.format(v) for v in values))

    scores, forget = [1.5, -0.4, 0.2, -2.0, 0.9], -0.5
    kept = [s > 0 for s in scores]
    n = [sum(kept[j:]) if kept[j] else None for j in range(len(scores))]
    print(f"One query, five keys from oldest to newest, forget gate f = {forget}\n")
    show("score S", scores, "{:8.1f}")
    show("kept S > 0", kept, "{:8d}")
    show("distance n", n, "{:8d}")
    show("S + f n", [None if d is None else s + forget * d for s, d in zip(scores, n)])
    show("weight A", weights(scores, forget))
    print("\nThe same with two irrelevant keys put in (scores -1.0 and -0.1): the others do not notice\n")
    longer = scores[:2] + [-1.0] + scores[2:4] + [-0.1] + scores[4:]
    show("score S", longer, "{:8.1f}")
    show("weight A", weights(longer, forget))


if __name__ == "__main__":
    from tasks import script
    script(worked_example)()
