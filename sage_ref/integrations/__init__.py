"""SageBwd and SLA2 in other libraries' models.

pytorch       `sage_ref.sdpa`: for code that calls F.scaled_dot_product_attention
transformers  SageBwd as an attention by name
diffusers     SageBwd as an attention backend; SLA2 as a part of the model
calls         the arguments of a call, and what happens where SageBwd can't compute it
parts         masks that leave parts of each sequence, computed part by part: padding, packed documents

On a CPU the reference computes, on a GPU the kernels where they can: as `sage_ref.sagebwd_attention` chooses.

| integration | tried with | forward | backward | torch.compile | test |
| --- | --- | --- | --- | --- | --- |
| `with sage_ref.sdpa()` | torch 2.13 | yes | yes, also under checkpoints | whole | test_sdpa |
| transformers | 5.24 | yes, generate() too | yes, autocast | whole | test_transformers |
| diffusers, SageBwd | 0.42.1 | yes | yes | whole | test_diffusers |
| diffusers, SLA2 | 0.42.1 | yes, saved and loaded | yes, in stages | whole | test_diffusers |

| integration | padding, packed documents (test_parts) | other masks, dropout | under torch.compile |
| --- | --- | --- | --- |
| `with sage_ref.sdpa()` | by parts | exact, said once; or error | no mask is read, each is one of the others |
| transformers | by parts, also in a static cache | error; or exact, said once | no attention_mask, use_cache=True |
| diffusers, SageBwd | by parts | error; or native, said once | the same |
| diffusers, SLA2 | error | error | error |

Under torch.compile `nn.MultiheadAttention` stays exact. Tests compile with the backends eager and aot_eager: on a CPU
the default, inductor, takes minutes to compile the reference's steps to C++; tried by hand it gives the same numbers.
Tests are in tests/integrations; `make test` installs what they need.
"""
