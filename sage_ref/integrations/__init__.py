"""SageBwd and SLA2 in models that others wrote.

pytorch       `sage_ref.sdpa`: what calls F.scaled_dot_product_attention
transformers  SageBwd as an attention by name
diffusers     SageBwd as an attention backend; SLA2 as a part of the model
calls         what a call asks for, and what happens where SageBwd can't do that

On a CPU the reference computes, on a GPU the kernels where they can: as `sage_ref.sagebwd_attention` chooses.

Forward and backward pass, and torch.compile without a graph break, in all of them:

| integration | tried with | what else | a mask that isn't the causal one, dropout | test |
| --- | --- | --- | --- | --- |
| `with sage_ref.sdpa()` | torch 2.13 | nesting, threads, checkpoints | exact, said once; or error | test_sdpa |
| transformers | 5.23 | generate() with a cache, Trainer | error; or exact, said once | test_transformers |
| diffusers, SageBwd | 0.42.1 | grouped queries | error; or native, said once | test_diffusers |
| diffusers, SLA2 | 0.42.1 | stages, alpha, state_dict | error | test_diffusers |

Under torch.compile `nn.MultiheadAttention` stays exact, and transformers must get no `attention_mask`.
Tests are in tests/integrations; `make test` installs what they need. `python -m sage_ref drop-in` measures a pretrained
encoder with exact and with INT8 attention; notebooks/recorded/drop_in_cpu.json is what it found.
"""
