"""Bytes on the GPU of each phase of a step and of an evaluation, on top of the states.

A step has the phases of the gradient cache (`megaclip.step.gradient_cache`):

1. each tower forward, chunk by chunk: some chunks with their graph, which is kept, the others without;
2. the loss over all embeddings;
3. each tower backward: first the kept graphs, those of the text tower before those of the image tower (after them if
   each tower has one chunk and passes of its own), then the other chunks, which are encoded again;
4. the reduction of the last gradients, and the optimizer's step.

The sizes of the phases do not depend on the batch, except the loss, the embeddings, their gradients and the kept
graphs.
"""

import math
from dataclasses import astuple, dataclass, fields, replace

from megaclip.losses.costs import Sizes
from megaclip.models.caption_decoder import LOGITS_AT_ONCE
from megaclip.planner.constants import EVALUATED_TEXTS, EVALUATION_TILES, MIB
from megaclip.planner.states import (
    States,
    gathered_bytes,
    gradient_bytes,
    reduction_under_way,
    states_of,
    updated_gradient_bytes,
)
from megaclip.planner.towers import TowerWork, tower_work
from megaclip.planner.traffic import exchange_sizes
from megaclip.planner.workload import EvaluationSets, Workload
from megaclip.step.layout import text_first


@dataclass(frozen=True)
class Phase:
    """Bytes of one phase by part."""

    embedding_gradients: float = 0.0
    kept_graphs: float = 0.0
    """Includes those of the phase itself. If all graphs of a partly locked tower are kept, the last one is part of the
    activations of the forward pass that makes it."""
    activations: float = 0.0
    data_chunks: float = 0.0
    embeddings: float = 0.0
    loss: float = 0.0
    features: float = 0.0
    """The features of an evaluation."""
    tiles: float = 0.0
    copies_of_features: float = 0.0
    gradients: float = 0.0
    gradient_sums: float = 0.0
    reduce_bucket: float = 0.0
    reduction: float = 0.0
    gathered_parameters: float = 0.0
    numbers: float = 0.0
    """Ids, ranks and similarities of an evaluation."""
    update: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Phases:
    """The phases of a step and of an evaluation. None: the run does not have the phase."""

    image_tower_forward: Phase
    text_tower_forward: Phase
    loss: Phase
    image_tower_backward: Phase | None
    text_tower_backward: Phase | None
    gradient_reduction: Phase
    optimizer_step: Phase
    evaluation_towers: Phase | None = None
    evaluation_retrieval: Phase | None = None

    def by_name(self) -> dict[str, Phase]:
        """Return the phases that the run has, by name, in their order."""
        named = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        return {name: phase for name, phase in named.items() if phase is not None}

    @property
    def largest(self) -> tuple[str, Phase]:
        """Name and bytes of the phase at the peak."""
        return max(self.by_name().items(), key=lambda named: named[1].total)


def loss_sizes(workload: Workload) -> Sizes:
    """Return the sizes of the features that one rank holds, and of the gradients that it exchanges."""
    return replace(exchange_sizes(workload), feature_bytes=workload.compute_bytes)


def loss_bytes(workload: Workload) -> float:
    """Return the loss's peak on one rank's GPU. `workload` has no "auto" (`resolve_auto`)."""
    section, sizes = workload.megaclip, loss_sizes(workload)
    more = 2.0 * sizes.features if section.same_ids == "mask" else 0.0  # the features in the order of their ids
    if section.same_ids == "positive":
        # Sums by id of the rank's pairs, and of all features of an exchange: in the order of their ids, and their sums.
        blocks = workload.world_size if section.exchange == "all_gather" else 1
        more = (6 + 2 * blocks) * sizes.unit + blocks * sizes.features
    settings = (section.exchange, section.reduction, section.tile_budget_mib, section.loss)
    return more + megaclip_loss_bytes(sizes, *settings, levels=workload.ring_levels)


def megaclip_loss_bytes(
    sizes: Sizes, exchange: str, reduction: str, tile_budget_mib: float, loss: str = "clip", *, levels: int = 1
) -> float:
    """Return the peak of a loss, forward and backward, beyond the features; the gradients that it returns are included.

    Gradients accumulate in float32 (2 units of 4 b D bytes) beside one tile of logits; then they are rounded to the
    features' dtype while the sums still exist. A ring also holds the blocks that it computes and receives, and text
    gradients that it exchanges; an all_gather holds the other ranks' texts and their gradients.

    sizes: `feature_bytes` are those of the features that the towers return. exchange, reduction, loss: settings of
        ds_config.json. levels: levels of the ring (`megaclip.comm.ring`), each of which sends and receives one sum of
        gradients.
    """
    unit, features, world_size = sizes.unit, sizes.features, sizes.world_size
    block_rows = sizes.batch * (world_size if exchange == "all_gather" else 1)
    tile = min(tile_budget_mib * MIB, sizes.feature_bytes * sizes.batch * block_rows)
    vectors = 12 * 4 * sizes.batch  # log-sum-exps, shifts, dots, positives and their sums
    if world_size == 1:
        at_tiles = 2.0 * unit
    elif exchange == "ring" and reduction == "feature":
        blocks = min(2, world_size - 1) * features
        at_tiles = (2 + levels * sizes.gradient_bytes / 2) * unit + blocks  # dx and dy; sums are sent and received
        tile = max(tile, (3 - sizes.gradient_bytes / 2) * unit)  # later their sum is sent, before they are freed
    elif exchange == "ring":
        at_tiles = 2 * unit + 4 * features  # two pairs of blocks
    elif reduction == "feature":
        at_tiles = unit + world_size * (unit + features)
    else:  # the sigmoid loss frees one side before it gathers the other
        at_tiles = 2 * unit + (1 if loss == "siglip" else 2) * world_size * features
    gathered = world_size * features if exchange == "all_gather" and world_size > 1 else 0
    at_finish = 2 * unit + 2 * features + gathered  # sums and rounded gradients; the tile is freed
    at_reduction = 0.0
    if gathered and reduction == "feature":  # the gradients of all texts and their sum; in bfloat16 both are copies
        copies = 1.0 if sizes.gradient_bytes == 4 else 1.5
        at_reduction = unit + world_size * (copies * unit + features) + copies * unit
    return max(at_tiles + tile, at_finish, at_reduction) + vectors


def embedding_bytes(workload: Workload) -> float:
    """Return the bytes of both towers' embeddings of the local batch; their gradients take as much again."""
    return 2.0 * loss_sizes(workload).features


def graph_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes on the GPU of one kept graph of the image tower and of the text tower, with its embeddings."""
    image, text = map(_graph_bytes, tower_work(workload))
    return image, text


def _graph_bytes(work: TowerWork) -> float:
    tower = work.micro_batch * work.costs.graph * _positions_share(work)
    # Embeddings, and their float32 values before they are scaled to unit length.
    return tower + work.micro_batch * work.workload.model.embed_dim * (work.workload.compute_bytes + 4)


def _positions_share(work: TowerWork) -> float:
    """Return the share of a tower's token positions that its kept graphs hold. Without a known share of captions that
    are cut, it is 1: memory must be enough for captions of full length."""
    return 1 - (work.workload.text_positions_saved or 0.0) if work.is_text else 1.0


def step_phases(workload: Workload) -> Phases:
    """Return the phases of a step, and of the run's evaluations. `workload` has no "auto", except for kept graphs,
    where "auto" counts as none."""
    image, text = tower_work(workload)
    states = states_of(workload)
    image_graphs, text_graphs = (work.kept * _graph_bytes(work) for work in (image, text))
    is_first = text_first((image.chunks, text.chunks), (bool(image.trained), bool(text.trained)))
    in_order = workload.one_chunk_each and not workload.encodes_together and not workload.pairs
    return Phases(
        image_tower_forward=_forward_phase(image, 0.0, 2 if is_first else 1),
        text_tower_forward=_forward_phase(text, 0.0 if is_first else image_graphs, 1 if is_first else 2),
        loss=Phase(
            kept_graphs=image_graphs + text_graphs,
            embeddings=embedding_bytes(workload),
            loss=loss_bytes(workload),
            gathered_parameters=gathered_bytes(workload, image.parameters)
            if workload.encodes_together or workload.pairs
            else 0.0,
        ),
        image_tower_backward=_backward_phase(image, states, image_graphs + text_graphs * in_order, not in_order),
        text_tower_backward=_backward_phase(text, states, image_graphs * (not in_order) + text_graphs, in_order),
        gradient_reduction=Phase(
            gradients=gradient_bytes(workload, workload.trained),
            reduce_bucket=states.bucket,
            reduction=states.reduction,
        ),
        optimizer_step=Phase(gradients=updated_gradient_bytes(workload), update=states.update),
        **({} if workload.evaluation is None else _evaluation_phases(workload, workload.evaluation)),
    )


def _forward_phase(work: TowerWork, kept: float, number: int) -> Phase:
    """Return the last forward pass of a tower without backward pass, which has the step's highest peak if the tower is
    locked or some graphs are kept.

    kept: bytes of the kept graphs of the tower that is encoded before. number: 1 for the first tower, 2 for the second.
    """
    workload, costs = work.workload, work.costs
    kept += work.kept * _graph_bytes(work)
    activations = work.micro_batch * costs.forward_peak
    if work.kept == work.chunks and work.parameters.is_partly_locked:
        activations = work.micro_batch * costs.backward_peak
        kept -= work.micro_batch * costs.graph
    embeddings = 0.0 if workload.megaclip.embeddings_offload else embedding_bytes(workload)
    return Phase(
        kept_graphs=kept,
        activations=activations + (_logit_bytes(work) if work.kept else 0.0),
        data_chunks=_data_chunks(work),
        embeddings=embeddings / 2 * number,
        gathered_parameters=gathered_bytes(workload, work.parameters),
    )


def _logit_bytes(work: TowerWork) -> float:
    """Return the bytes of the logits that a caption decoder computes at a time, which do not depend on the chunk."""
    if not (work.is_text and work.workload.model.has_decoder):
        return 0.0
    text = work.workload.model.text_cfg
    return 12.0 * min(LOGITS_AT_ONCE, work.micro_batch * text.context_length * text.vocab_size)


def _data_chunks(work: TowerWork) -> float:
    """Return the bytes of the chunk in use and of the next one: uint8 pixels, or int32 tokens."""
    workload = work.workload
    return 2 * work.micro_batch * (workload.caption_bytes if work.is_text else workload.image_bytes)


def _backward_phase(work: TowerWork, states: States, kept: float, after_other: bool) -> Phase | None:
    """Return the largest phase of a tower's backward passes, over its kept graphs and over chunks encoded again; None
    if the tower is not trained.

    kept: bytes of the graphs that are held when the first of its kept graphs is back-propagated. after_other: the kept
    graphs of the other tower have been back-propagated before.
    """
    workload = work.workload
    if not work.trained:
        return None
    image, text = tower_work(workload)
    several = not workload.one_chunk_each
    activations = work.micro_batch * work.costs.backward_peak + _logit_bytes(work)
    offloads = workload.megaclip.embeddings_offload

    def phase(other_done: bool) -> Phase:
        own_done = work.chunks > 1  # at the second chunk, beside the first one's gradients
        image_done, text_done = (other_done, own_done) if work.is_text else (own_done, other_done)
        if workload.pairs:
            image_done = text_done = own_done
        done = image.trained * image_done + text.trained * text_done
        other = (image if work.is_text else text).parameters if several else None
        return Phase(
            embedding_gradients=0.0 if offloads else embedding_bytes(workload),
            gradients=gradient_bytes(workload, done),
            gradient_sums=workload.gradient_sum_bytes * done if several else 0.0,
            reduce_bucket=0.0 if workload.coalesces else states.bucket,
            reduction=reduction_under_way(workload, states, work.parameters, activations),
            gathered_parameters=gathered_bytes(workload, work.parameters, other=other),
        )

    phases: list[Phase] = []
    if work.kept:
        beyond_graph = max(0.0, _positions_share(work) * activations - _graph_bytes(work))
        beside = phase(after_other and (image if work.is_text else text).kept > 0)
        phases.append(replace(beside, kept_graphs=kept, activations=beyond_graph))
    if work.encoded_again:
        beside = phase(image.trained > 0 if work.is_text else text.kept > 0)
        other_graph = _graph_bytes(image) if work.is_text and workload.pairs else 0.0
        phases.append(replace(beside, kept_graphs=other_graph, activations=activations, data_chunks=_data_chunks(work)))
    return max(phases, key=lambda phase: phase.total)


def _evaluation_phases(workload: Workload, evaluation: EvaluationSets) -> dict[str, Phase]:
    """Return the phases of an evaluation by their fields of `Phases`: both towers without graph, whose features are
    kept in float32; then retrieval, which copies them without padding, and the choice of example pictures, which takes
    the images' features in float32 and in float64."""
    evaluated = replace(
        workload.with_megaclip(compile=False),
        model=workload.model.replace(vision_cfg={"patch_dropout": 0.0}),  # an evaluation reads all patches
        checkpointing="",
        image_unlocked=None,
        text_unlocked=None,
    )
    image, text = (work.costs.forward_peak for work in tower_work(evaluated))
    dimensions = workload.model.embed_dim
    pairs = math.ceil(evaluation.pairs / workload.world_size)
    texts = max(EVALUATED_TEXTS if evaluation.labelled else 0, evaluation.batch if evaluation.pairs else 0)
    features = 2 * 4.0 * pairs * dimensions
    towers = Phase(
        activations=max(evaluation.batch * (image + workload.image_bytes), texts * text),
        features=features,
        gathered_parameters=max(gathered_bytes(workload, tower) for tower in workload.parameters),
    )
    if not pairs:
        return {"evaluation_towers": towers}
    # This rank's pairs have ids, their order, best similarities and ranks; all pairs have similarities and counts.
    numbers = 8.0 * (6 * pairs + 4 * evaluation.pairs)
    copies = Phase(features=features, tiles=EVALUATION_TILES, copies_of_features=features, numbers=numbers)
    pictures = Phase(features=features, copies_of_features=1.5 * features, numbers=numbers)
    retrieval = max(copies, pictures, key=lambda phase: phase.total)
    return {"evaluation_towers": towers, "evaluation_retrieval": retrieval}
