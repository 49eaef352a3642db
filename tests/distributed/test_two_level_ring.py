"""The ring on several nodes (3 x 2, 2 x 3 and 2 x 2 ranks, set by LOCAL_WORLD_SIZE): blocks, sums and losses.

tests/distributed/test_fastclip_loss.py tests the losses of FastCLIP on two nodes.
"""

import os

import pytest
import torch

from megaclip.comm import ring
from megaclip.comm.groups import NodeGroup, by_node, group_size, resolve
from megaclip.losses import ClipLoss, SigLipLoss
from tests.distributed import test_clip_loss
from tests.distributed.harness import run_ranks
from tests.distributed.test_comm import merged, recorded_messages
from tests.tolerances import exceeded


def check_ring(per_node: int) -> list[tuple[int, int]]:
    """Check that every block arrives once, the rank's own block first, and that carried sums include every rank.

    Return the messages as (receiver, number of elements).
    """
    ranks = by_node(resolve())
    assert isinstance(ranks, NodeGroup) and ranks.inner.size == per_node
    assert ranks.rank == per_node * ranks.outer.rank + ranks.inner.rank
    carried, seen = ring.Carried(merged, group=ranks), []
    with recorded_messages() as messages:
        for owner, (block,) in ring.circulate((torch.full((5,), float(ranks.rank)),), group=ranks):
            assert block.unique().tolist() == [owner]
            seen.append(owner)
            carried.add((torch.tensor([100.0 * owner + 2**ranks.rank]),))
        (total,) = carried.home()
    assert seen[0] == ranks.rank and sorted(seen) == list(range(ranks.size))
    assert [owner // per_node for owner in seen] == [
        (ranks.outer.rank - hop // per_node) % ranks.outer.size for hop in range(ranks.size)
    ]
    # The ranks' parts are distinct powers of two, so the sum shows that each arrived once.
    assert total.tolist() == [100.0 * ranks.size * ranks.rank + 2**ranks.size - 1]
    return [(message.peer, message.tensor.numel()) for message in messages]


def check_losses() -> list[str]:
    found = []
    for batch, embedding in ((1, 3), (5, 7)):
        whole = test_clip_loss.random_batch(batch * group_size(), embedding, torch.float64)
        scale, bias = torch.tensor(9.0).double(), torch.tensor(-3.0).double()
        for kind, scalars in ((ClipLoss, [scale]), (SigLipLoss, [scale, bias])):
            expected = test_clip_loss.oracle(kind, *whole, *scalars)
            for reduction in ("feature", "scalar"):
                options = {"exchange": "ring", "reduction": reduction}
                found += exceeded(test_clip_loss.comparisons(kind, whole, scalars, expected, **options))
    return found


def check_unequal_nodes() -> None:
    """Check that nodes of different sizes, two ranks and one rank, form a ring of one level."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if resolve().rank == 2 else "2"
    assert not isinstance(by_node(resolve()), NodeGroup)


def check_nodes_of_one() -> None:
    """Check that nodes of one rank form a plain ring, which sends a part at once, before the next tile."""
    ranks = by_node(resolve())
    assert isinstance(ranks, NodeGroup) and (ranks.inner.size, ranks.outer.size) == (1, 2)
    carried = ring.Carried(merged, group=ranks)
    for owner, (block,) in ring.circulate((torch.full((5,), float(ranks.rank)),), group=ranks):
        assert block.unique().tolist() == [owner]
        with recorded_messages() as messages:
            carried.add((torch.tensor([100.0 * owner + 2**ranks.rank]),))
        assert len(messages) == 1
    assert carried.home()[0].tolist() == [200.0 * ranks.rank + 3]


def test_nodes_of_one_rank_form_a_plain_ring() -> None:
    run_ranks(check_nodes_of_one, 2, environment={"LOCAL_WORLD_SIZE": "1"})


def test_nodes_of_different_sizes_have_one_level() -> None:
    run_ranks(check_unequal_nodes, 3)


@pytest.mark.parametrize(("nodes", "per_node"), [(3, 2), (2, 3)])
def test_every_block_once_and_one_transfer_between_nodes_per_round(nodes: int, per_node: int) -> None:
    size, environment = per_node * nodes, {"LOCAL_WORLD_SIZE": str(per_node)}
    for rank, messages in enumerate(run_ranks(check_ring, size, per_node, environment=environment)):
        node, place = divmod(rank, per_node)
        abroad = [elements for peer, elements in messages if peer // per_node != node]
        assert sorted(abroad) == [1] * nodes + [5] * (nodes - 1)
        neighbour = node * per_node + (place + 1) % per_node
        assert {peer for peer, _ in messages} == {neighbour, (rank + per_node) % size}


def test_losses_equal_one_process_on_the_whole_batch() -> None:
    assert run_ranks(check_losses, 4, environment={"LOCAL_WORLD_SIZE": "2"}) == [[]] * 4
