"""Context parallelism: one sequence with its tokens on several devices, by torch.distributed alone.

ulysses   any attention, once every process has all tokens of some heads
sla2      the module `ParallelSLA2`

Process r of P holds the tokens r N/P to (r + 1) N/P of every sequence, in queries, keys and values alike. The rest of a
model treats tokens one by one and needs no change; positions count in the whole sequence. Let the loss of each process
be the mean over its tokens: DDP or FSDP2 over the same processes, which average gradients, then give the gradients of
the mean over all tokens. All processes must make the same calls in the same order, forward and backward, or they wait.

    torch.distributed.init_process_group("nccl")
    model = DistributedDataParallel(model)
    loss = model(local_tokens(tokens, 1), local_tokens(positions, 0))
    # in it: output = ulysses(partial(sagebwd_attention, is_causal=True), query, key, value), each [B, H, N/P, D]
"""

from sage_ref.parallel.sla2 import ParallelSLA2
from sage_ref.parallel.ulysses import local_tokens, ulysses

__all__ = ["ParallelSLA2", "local_tokens", "ulysses"]
