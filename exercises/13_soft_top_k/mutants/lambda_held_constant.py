HINT = "lambda_moves"

import torch


class SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count, temperature):
        logits = x / temperature
        share = torch.tensor(count / x.shape[-1], dtype=x.dtype).logit()
        lower, upper = share - logits.amax(-1, keepdim=True), share - logits.amin(-1, keepdim=True)
        for _ in range(80):
            middle = (lower + upper) / 2
            too_much = torch.sigmoid(logits + middle).sum(-1, keepdim=True) > count
            lower, upper = torch.where(too_much, lower, middle), torch.where(too_much, middle, upper)
        soft = torch.sigmoid(logits + (lower + upper) / 2)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx, grad_soft):
        (soft,) = ctx.saved_tensors
        w = soft * (1 - soft)
        return w * grad_soft / ctx.temperature, None, None


def soft_top_k(x, count, temperature):
    return SoftTopK.apply(x, count, temperature)
