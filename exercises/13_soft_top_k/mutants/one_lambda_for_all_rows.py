HINT = "per_row"

import torch


class SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count, temperature):
        logits = x / temperature
        share = torch.tensor(count / x.shape[-1], dtype=x.dtype).logit()
        lower, upper = share - logits.amax(), share - logits.amin()
        for _ in range(80):
            middle = (lower + upper) / 2
            too_much = torch.sigmoid(logits + middle).sum() > count * x[..., 0].numel()
            lower, upper = torch.where(too_much, lower, middle), torch.where(too_much, middle, upper)
        soft = torch.sigmoid(logits + (lower + upper) / 2)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx, grad_soft):
        (soft,) = ctx.saved_tensors
        w = soft * (1 - soft)
        total = w.sum(-1, keepdim=True)
        shared = (w * grad_soft).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
        return w * (grad_soft - shared) / ctx.temperature, None, None


def soft_top_k(x, count, temperature):
    return SoftTopK.apply(x, count, temperature)
