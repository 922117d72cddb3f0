"""Context parallelism: one sequence with its tokens on several devices, by torch.distributed alone.

exchange   the processes, this process's tokens, and the all-to-all that exchanges heads for tokens
ulysses    any attention, once every process has all tokens of some heads
ring       SageBwd with keys and values that go round, merged by their log-sum-exp: for fewer heads than processes
api, sla2  `parallel_sagebwd_attention` and the module `ParallelSLA2`

Process r of P holds the tokens r N/P to (r + 1) N/P of every sequence, in queries, keys and values alike. The rest of a
model treats tokens one by one and needs no change; positions count in the whole sequence. Let the loss of each process
be the mean over its tokens: DDP or FSDP2 over the same processes, which average gradients, then give the gradients of
the mean over all tokens. All processes must make the same calls in the same order, forward and backward, or they wait.

    torch.distributed.init_process_group("nccl")
    model = DistributedDataParallel(model)
    loss = model(local_tokens(tokens, 1), local_tokens(positions, 0))
    # in it: output = parallel_sagebwd_attention(query, key, value, is_causal=True), each [B, H, N/P, D]

Over several hosts, Ulysses can call a ring: `ulysses(partial(parallel_sagebwd_attention, method="ring", group=between),
query, key, value, group=inside)`, where `inside` has the processes of a host and `between` one process of each host.
"""

from sage_ref.parallel.api import METHODS, parallel_sagebwd_attention
from sage_ref.parallel.exchange import local_tokens
from sage_ref.parallel.sla2 import ParallelSLA2
from sage_ref.parallel.ulysses import ulysses

__all__ = ["METHODS", "ParallelSLA2", "local_tokens", "parallel_sagebwd_attention", "ulysses"]
