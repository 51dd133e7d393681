"""
TRA for long sequences: tra_plain without T x S tensors, and without the work that forgetting makes pointless.

model.py calls tra_for_long_sequences() from 128 queries on (1,024 on CUDA). Blocks with a running softmax are
FlashAttention's idea (arXiv 2205.14135); to stop where the rest is provably forgotten is that of Adaptive Computation
Pruning (arXiv 2504.06949), carried over to TRA.
"""

import functools
import math
import warnings

import torch
import torch.nn.functional as F

from model import full_precision

BLOCK = 64      # queries, and keys, in a block


@torch.compiler.disable
@functools.cache
def tra_for_long_sequences(device):
    """The fused kernel where it works, else blocks. The kernel is compared with tra_plain before its first use."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        try:
            from extras.kernel import check_against_plain_form, tra_fused
            check_against_plain_form(device)
            return tra_fused
        except Exception as error:      # no Triton, no compiler, a GPU it does not suit: there is another way
            warnings.warn(f"TRA's fused kernel is not used on {device}, tra_blocked is: {error}")
    return full_precision(tra_blocked)


@torch.compiler.disable     # how far it goes depends on the data
def tra_blocked(q, k, v, log_forget, sparse=True, contextual=True, dropout_p=0.0, return_reach=False):
    """tra_plain, up to rounding, by blocks of queries and keys.

    Each block of queries walks leftward over the blocks of keys, from its own on, with a running count and softmax. On
    the way f_i * n_ij only falls, and S_ij <= |q_i| max|k_j| / sqrt(D) = b_i. So when query i has counted n keys, each
    key still ahead weighs at most exp(b_i + f_i * n). A block stops when, for all its queries, the number of keys times
    that is at most eps (of the dtype) times the weight so far: the keys that are skipped move the output by no more
    than 2 eps max|v|, which is rounding error. A query that has kept nothing so far walks on.

    With return_reach, also returns how many blocks to the left each block of queries walked, (B, H, blocks).
    """
    B, H, T, D = q.shape
    S = k.size(2)
    longest_key = k.detach().norm(dim=-1).amax(-1)[..., None, None]                 # (B, H, 1, 1)
    bound = q.detach().norm(dim=-1, keepdim=True) * longest_key / math.sqrt(D)
    # A query is done when threshold + f n <= log of its weight so far.
    threshold = bound + math.log(S / torch.finfo(q.dtype).eps)                      # (B, H, T, 1)

    # Padding to whole blocks. No query sees what is after the end.
    before, after = (S - T) % BLOCK, -S % BLOCK

    def in_blocks(x, before=0, fill=0.0):
        x = F.pad(x, (0, 0, before, after), value=fill)
        return x.reshape(-1, BLOCK, x.size(-1))                                     # (N, BLOCK, D)

    # For each block of queries: the block of keys that holds its own tokens, and how many are to the left of that.
    key_blocks = (S + after) // BLOCK                                               # per head
    own = torch.arange(B * H * key_blocks, device=q.device).view(-1, key_blocks)[:, (S - T) // BLOCK:].flatten()
    left = own % key_blocks                                                         # (N,)

    # The backward pass draws the same dropout masks again. They are 0 or 1; v is scaled instead.
    seed = torch.randint(2**62, ()).item() if dropout_p else 0
    out, reach = TRABlocks.apply(
        in_blocks(q, before), in_blocks(k), in_blocks(v / (1 - dropout_p)), in_blocks(log_forget.unsqueeze(-1), before),
        in_blocks(threshold, before, -torch.inf), own, left, (sparse, contextual, dropout_p, seed))
    out = out.view(B, H, -1, v.size(-1))[:, :, before:before + T]
    return (out, reach.view(B, H, -1)) if return_reach else out


def take(x, rows):
    """x[rows], four times as fast on a CPU."""
    return x.index_select(0, rows)


def walk(q, k, f, own, reach, sparse, contextual, dropout_p, seed):
    """In step s, each block of queries that reaches so far meets the block of keys s to the left of its own.

    Yields, for some of them at a time: which rows of q and of k; a softmax within the block, its logsumexp, the
    distances n; and the dropout mask. Boolean masks are avoided: masked_fill takes longer than a matrix product.
    """
    hidden = torch.finfo(q.dtype).min / 4
    ones = torch.ones(BLOCK, BLOCK, dtype=q.dtype, device=q.device)
    triangle = ones.tril()
    count = torch.zeros_like(f)                                                     # (N, BLOCK, 1), keys so far
    generator = torch.Generator(q.device).manual_seed(seed)
    at_once = 64 if q.device.type == "cpu" else 4096        # what a cache holds, or what keeps a GPU busy
    step = 0
    while len(walking := (reach >= step).nonzero().squeeze(1)):
        seen = triangle if step == 0 else ones              # only its own block holds keys that come after a query
        for rows in walking.split(at_once):                                         # (R,)
            keys = take(own, rows) - step
            scores = (take(q, rows) @ take(k, keys).mT).div_(math.sqrt(q.size(-1)))         # (R, BLOCK, BLOCK)
            if step == 0:
                scores.add_(1 - seen, alpha=hidden)                                 # the keys after a query
            relevant = scores.sign().relu_()                                        # 1 if S > 0 and j <= i, else 0
            # A product with the triangle sums over the keys from j on, faster than cumsum.
            n = take(count, rows) + (relevant if contextual else seen) @ triangle
            count[rows] = n[..., :1]                                                # from the leftmost key on
            if sparse:
                F.threshold_(scores, 0, hidden)
            logits = torch.addcmul(scores, take(f, rows), n)
            weights = logits.softmax(-1)
            # The largest weight is exp(largest logit - lse).
            lse = logits.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
            mask = torch.empty_like(scores).uniform_(generator=generator).gt_(dropout_p) if dropout_p else None
            yield rows, keys, weights, lse, n, mask
        step += 1


class TRABlocks(torch.autograd.Function):
    """Forward merges the softmaxes of the blocks. Backward walks again, as far, and computes the weights anew.

    keep and n are piecewise constant. So the gradients are those of softmax attention, and df_i = sum_j dlogit_ij n_ij.
    """

    @staticmethod
    def forward(ctx, q, k, v, f, threshold, own, left, settings):
        out = q.new_zeros(*q.shape[:2], v.size(-1))                                 # (N, BLOCK, D)
        # Nothing is kept yet. The logit of a hidden key is lower still.
        lse = torch.full_like(f, torch.finfo(f.dtype).min / 8)
        reach = torch.zeros_like(own)                                               # (N,)
        for rows, keys, weights, lse_here, n, mask in walk(q, k, f, own, reach, *settings):
            out_here = (weights if mask is None else weights * mask) @ take(v, keys)        # (R, BLOCK, D)
            lse_now = torch.logaddexp(take(lse, rows), lse_here)                    # (R, BLOCK, 1)
            out[rows] = take(out, rows).lerp(out_here, (lse_here - lse_now).exp())  # by their shares of the weight
            lse[rows] = lse_now
            done = (take(threshold, rows) + take(f, rows) * n[..., :1] <= lse_now).all(1).squeeze(1)    # (R,)
            reach[rows] += ~done & (take(reach, rows) < take(left, rows))
        ctx.save_for_backward(q, k, v, f, own, reach, out, lse)
        ctx.settings = settings
        return out, reach

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, f, own, reach, out, lse = ctx.saved_tensors
        dq, dk, dv, df = map(torch.zeros_like, (q, k, v, f))
        inner = (dout * out).sum(-1, keepdim=True)          # (N, BLOCK, 1), the sum of A_ij dA_ij over j
        scale = 1 / math.sqrt(q.size(-1))
        with torch.autocast(q.device.type, enabled=False):
            for rows, keys, weights, lse_here, n, mask in walk(q, k, f, own, reach, *ctx.settings):
                weights.mul_((lse_here - take(lse, rows)).exp())                    # now of the whole row
                dout_here = take(dout, rows)
                dweights = dout_here @ take(v, keys).mT                             # (R, BLOCK, BLOCK)
                dv.index_add_(0, keys, (weights if mask is None else weights * mask).mT @ dout_here)
                if mask is not None:
                    dweights.mul_(mask)
                dlogits = dweights.sub_(take(inner, rows)).mul_(weights)
                dq.index_add_(0, rows, dlogits @ take(k, keys), alpha=scale)
                dk.index_add_(0, keys, dlogits.mT @ take(q, rows), alpha=scale)
                df.index_add_(0, rows, (dlogits * n).sum(-1, keepdim=True))
        return dq, dk, dv, df, None, None, None, None
