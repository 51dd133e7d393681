"""
TRA in Triton for one GPU: tra_plain up to rounding, in memory linear in the length, deterministic, without host syncs.

tra_blocked in fast.py explains the walk over the keys and where it stops. CUDA capability 8 or more is needed. No GPU
was at hand: the kernel was checked in Triton's interpreter and compiled for sm_80, sm_86 and sm_90 (test_kernel.py),
never run. Therefore check_against_plain_form() comes before its first use.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from extras.fast import tra_blocked
from model import full_precision, tra_plain

COUNTS_PER_KEY = 64     # in a table of the backward pass: 134 MB at 65,536 tokens with 8 heads
REGISTERS = 255         # in a thread; unless told, the assembler spills some to run more blocks at once


@triton.jit
def tile(X, row, N: tl.constexpr, D: tl.constexpr):
    """Pointers to N rows of X (rows, D), from this row on."""
    return X + row * D + tl.arange(0, N)[:, None] * D + tl.arange(0, D)


@triton.jit
def matmul(a, b):
    # float32 takes three TF32 products. A single one errs by 1e-3, and small scores would get the wrong sign.
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def meet(q, k, f, count, i, j, seed, S, scale, sparse, contextual, P: tl.constexpr):
    """Queries i (BM,) meet keys j (BN,): logits, -inf where a key is not kept; distances; new count; dropout mask."""
    scores = matmul(q, tl.trans(k)) * scale                                         # (BM, BN)
    seen = j[None, :] <= i[:, None]
    relevant = seen & (scores > 0)
    # A product with a triangle sums over the keys from j on, faster than cumsum. 0 and 1 are exact in float16.
    counted = tl.where(contextual, relevant, seen).to(tl.float16)
    n = count[:, None] + tl.dot(counted, (j[:, None] >= j[None, :]).to(tl.float16))
    logits = tl.where(tl.where(sparse, relevant, seen), scores + f[:, None] * n, float("-inf"))
    mask = 1.0
    if P > 0:
        mask = (tl.rand(seed, i[:, None] * S + j[None, :]) >= P).to(tl.float32) / (1 - P)
    return logits, n, tl.max(n, 1), mask


@triton.jit(do_not_specialize=["seed"])
def forward_kernel(Q, K, V, GATE, THRESHOLD, OUT, LSE, LOW, seed, T, S, scale, sparse, contextual,
                   P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A block of queries walks leftward over the blocks of keys, down to key LOW."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)      # longest walks first
    first, m = head * T + block * BM, tl.arange(0, BM)
    q, f, threshold = tl.load(tile(Q, first, BM, D)), tl.load(GATE + first + m), tl.load(THRESHOLD + first + m)
    out, count = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32)
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    low, done = S - T + block * BM + BM, 0
    while (low > 0) & (done == 0):
        low -= BN
        k, v = tl.load(tile(K, head * S + low, BN, D)), tl.load(tile(V, head * S + low, BN, D))
        logits, n, count, mask = meet(q, k, f, count, S - T + block * BM + m, low + tl.arange(0, BN),
                                      seed + head, S, scale, sparse, contextual, P)
        new_top = tl.maximum(top, tl.max(logits, 1))
        shrink, weights = tl.exp(top - new_top), tl.exp(logits - new_top[:, None])
        top, total = new_top, total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + matmul((weights * mask).to(v.dtype), v)
        done = tl.min((threshold + f * count <= top + tl.log(total)).to(tl.int32), 0)
    out /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(tile(OUT, first, BM, D), out.to(OUT.dtype.element_ty))
    # In the backward pass, infinity gives every key of a row that keeps nothing the weight 0.
    tl.store(LSE + first + m, tl.where(total > 0, top + tl.log(total), float("inf")))
    tl.store(LOW + first // BM, low)


@triton.jit
def meet_again(q, k, v, dout, f, LSE, INNER, count, i, j, seed, S, scale, sparse, contextual, P: tl.constexpr):
    """In the backward pass: the weights after dropout, the gradient of the logits, the distances, the new count."""
    logits, n, count, mask = meet(q, k, f, count, i, j, seed, S, scale, sparse, contextual, P)
    weights = tl.exp(logits - tl.load(LSE)[:, None])
    dlogits = weights * (matmul(dout, tl.trans(v)) * mask - tl.load(INNER)[:, None])
    return weights * mask, dlogits, n, count


@triton.jit(do_not_specialize=["seed"])
def backward_q_kernel(Q, K, V, DOUT, GATE, LSE, INNER, LOW, COUNT, DQ, DGATE, part, rows, seed, T, S, scale, sparse,
                      contextual, P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dq and df, on the same walk. COUNT (heads, blocks of keys, rows): how many keys were counted before a block."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, m = part + block * BM, tl.arange(0, BM)
    first = head * T + begin
    q, dout, f = tl.load(tile(Q, first, BM, D)), tl.load(tile(DOUT, first, BM, D)), tl.load(GATE + first + m)
    dq, df, count = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    start, low = S - T + begin + BM, tl.load(LOW + first // BM)
    while start > low:
        start -= BN
        k, v = tl.load(tile(K, head * S + start, BN, D)), tl.load(tile(V, head * S + start, BN, D))
        tl.store(COUNT + (head * S + start) // BN * rows + block * BM + m, count)
        _, dlogits, n, count = meet_again(
            q, k, v, dout, f, LSE + first + m, INNER + first + m, count, S - T + begin + m,
            start + tl.arange(0, BN), seed + head, S, scale, sparse, contextual, P)
        df += tl.sum(dlogits * n, 1)
        dq += matmul(dlogits.to(k.dtype), k)
    tl.store(tile(DQ, first, BM, D), (dq * scale).to(DQ.dtype.element_ty))
    tl.store(DGATE + first + m, df)


@triton.jit(do_not_specialize=["seed"])
def backward_k_kernel(Q, K, V, DOUT, GATE, LSE, INNER, LOW, COUNT, DK, DV, part, rows, seed, T, S, scale, sparse,
                      contextual, P: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Adds to dk and dv of one block of keys what this part of the queries contributes."""
    start, head, m = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64), tl.arange(0, BM)
    keys = head * S + start
    k, v = tl.load(tile(K, keys, BN, D)), tl.load(tile(V, keys, BN, D))
    dk, dv = tl.load(tile(DK, keys, BN, D)), tl.load(tile(DV, keys, BN, D))
    for begin in range(tl.maximum(start - (S - T), part) // BM * BM, tl.minimum(part + rows, T), BM):
        first = head * T + begin
        if tl.load(LOW + first // BM) <= start:
            q, dout, f = tl.load(tile(Q, first, BM, D)), tl.load(tile(DOUT, first, BM, D)), tl.load(GATE + first + m)
            count = tl.load(COUNT + keys // BN * rows + begin - part + m)
            weights, dlogits, _, _ = meet_again(
                q, k, v, dout, f, LSE + first + m, INNER + first + m, count, S - T + begin + m,
                start + tl.arange(0, BN), seed + head, S, scale, sparse, contextual, P)
            dk += matmul(tl.trans(dlogits.to(q.dtype)), q) * scale
            dv += matmul(tl.trans(weights.to(dout.dtype)), dout)
    tl.store(tile(DK, keys, BN, D), dk)
    tl.store(tile(DV, keys, BN, D), dv)


class FusedTRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, threshold, settings):
        _, T, *_, BM, _ = settings
        heads = q.size(0) * q.size(1)
        out, lse = torch.empty_like(q), torch.empty_like(f)
        low = torch.empty(heads, T // BM, dtype=torch.int32, device=q.device)
        forward_kernel[T // BM, heads](q, k, v, f, threshold, out, lse, low, *settings, maxnreg=REGISTERS)
        ctx.save_for_backward(q, k, v, f, out, lse, low)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, f, out, lse, low = ctx.saved_tensors
        _, T, S, *_, BM, BN = ctx.settings
        heads = len(low)
        inner = (dout.float() * out.float()).sum(-1)        # (B, H, T), the sum of A_ij dA_ij over j
        dq, df = torch.empty_like(q), torch.empty_like(f)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        # The counts at the edges of the blocks of keys are kept for some rows at a time: memory linear in S.
        rows = min(T, COUNTS_PER_KEY * BN)
        count = torch.empty(heads, S // BN, rows, device=q.device)
        inputs = q, k, v, dout.contiguous(), f, lse, inner, low, count
        for part in range(0, T, rows):
            end = min(part + rows, T)
            backward_q_kernel[(end - part) // BM, heads](*inputs, dq, df, part, rows, *ctx.settings, maxnreg=REGISTERS)
            backward_k_kernel[(S - T + end) // BN, heads](*inputs, dk, dv, part, rows, *ctx.settings, maxnreg=REGISTERS)
        return dq, dk.to(k.dtype), dv.to(v.dtype), df, None, None


def block_sizes(dtype, width):
    """BM queries and BN keys, as many as the registers hold. Only float32 wider than 64 does not quite fit."""
    return (64, 32) if dtype != torch.float32 and width <= 64 else (16, 16)


@torch.compiler.disable
def tra_fused(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0):
    """tra_plain, up to rounding. q and k take the dtype of v; counts, logits and softmax are float32."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    (T, D), S, scale = q.shape[2:], k.size(2), 1 / math.sqrt(q.size(-1))
    width = max(16, triton.next_power_of_2(D))
    if width > 128 or v.dtype == torch.float64:         # no room in the registers
        return full_precision(tra_blocked)(q, k, v, log_forget, sparse, contextual, dropout_p)
    # A query is done when threshold + f n <= log of its weight so far.
    norm_q, norm_k = (torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32) for x in (q, k))
    threshold = norm_q * norm_k.amax(-1, keepdim=True) * scale + math.log(S / torch.finfo(torch.float32).eps)

    # Padding to whole blocks. No query sees what is after the end, and zeros in D change nothing.
    BM, BN = block_sizes(v.dtype, width)
    before, after, wider = (S - T) % BM, -S % BM, width - D

    def pad(x, *amounts, value=0.0):
        return (F.pad(x, amounts, value=value) if any(amounts) else x).contiguous()

    q, k, v = pad(q, 0, wider, before, after), pad(k, 0, wider, 0, after), pad(v, 0, wider, 0, after)
    f, threshold = pad(log_forget.float(), before, after), pad(threshold, before, after, value=-torch.inf)
    # The seed comes from the CPU's generator, so that nothing waits for the GPU.
    seed = torch.randint(2**31, ()).item() if dropout_p else 0
    settings = seed, q.size(2), k.size(2), scale, sparse, contextual, dropout_p, width, BM, BN
    with torch.cuda.device_of(q):
        return FusedTRA.apply(q, k, v, f, threshold, settings)[:, :, before:before + T, :D]


@torch.inference_mode(False)
@torch.enable_grad()
def check_against_plain_form(device, half=torch.bfloat16):
    """Raise RuntimeError unless tra_fused agrees with tra_plain in float64, in the output and in every gradient."""
    # q and k hold -1, 0 and 1, and sqrt(D) is a power of two: scores are exact in any precision, and many are 0.
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randint(-1, 2, (1, 2, n, 64), generator=generator) for n in (37, 200, 200, 37))
    f = (-torch.rand(1, 2, 37, generator=generator) ** 4).bfloat16()
    results = {}
    for dtype, attention in ((torch.float64, tra_plain), (torch.float32, tra_fused), (half, tra_fused)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v, f)]
        out = attention(*leaves)
        results[dtype] = out, *torch.autograd.grad(out, leaves, dout.to(out))
    for dtype, tolerance in ((torch.float32, 1e-4), (half, 2e-2)):
        for name, got, want in zip(("output", "dq", "dk", "dv", "df"), results[dtype], results[torch.float64]):
            error = ((got - want).abs().max() / want.abs().max()).item()
            if not error <= tolerance:
                raise RuntimeError(f"the fused kernel's {name} is off by {error:.0e} of its largest entry, {dtype}")
