"""Context parallelism: one sequence with its tokens on several devices, by torch.distributed alone.

exchange   who takes part, this process's tokens, and heads for tokens in one all-to-all
ulysses    any attention, once every process has all tokens of some heads
ring       SageBwd with keys and values that go round, merged by their log-sum-exp: for fewer heads than processes
api, sla2  `parallel_sagebwd_attention` and the module `ParallelSLA2`

Process r of P holds the tokens r N/P to (r + 1) N/P of every sequence, in queries, keys and values alike. The rest of a
model, which treats tokens one by one, needs no change; positions are those of the whole sequence. Let the loss of each
process be the mean over its tokens: then DDP or FSDP2 over the same processes, which average gradients, give those of
the mean over all tokens. All processes make the same calls in the same order, forward and backward, or the others wait.

    torch.distributed.init_process_group("nccl")
    model = DistributedDataParallel(model)
    loss = model(local_tokens(tokens, 1), local_tokens(positions, 0))
    # in it: output = parallel_sagebwd_attention(query, key, value, is_causal=True), each [B, H, N/P, D]
"""

from sage_ref.parallel.api import METHODS, parallel_sagebwd_attention
from sage_ref.parallel.exchange import local_tokens
from sage_ref.parallel.sla2 import ParallelSLA2
from sage_ref.parallel.ulysses import ulysses

__all__ = ["METHODS", "ParallelSLA2", "local_tokens", "parallel_sagebwd_attention", "ulysses"]
