"""Communication between ranks over deepspeed.comm. This package does not depend on any loss.

- `groups`: start distributed training, and look up process groups.
- `parallelism`: the data-parallel and tensor-parallel groups of a run.
- `collectives`: gather, reduce and sum over ranks; raise one error on all ranks.
- `ring`: pass blocks from rank to rank while each rank computes.
- `recording`: CUDA graphs with collectives between them.
- `machine`: measure link speed, compute speed and free memory, for cost models.
"""
