"""Bytes on the GPU of each phase of a step and of an evaluation, on top of the states.

A step has the phases of the gradient cache (`megaclip.step.gradient_cache`):

1. each tower forward, chunk by chunk: some chunks with their graph, which is kept, the others without;
2. the loss over all embeddings;
3. each tower backward: first the kept graphs, those of the text tower before those of the image tower, then the other
   chunks, which are encoded again;
4. the reduction of the last gradients, and the optimizer's step.

The sizes of the phases do not depend on the batch, except the loss, the embeddings, their gradients and the kept
graphs.
"""

import math

from megaclip.planner.constants import EVALUATED_TEXTS, EVALUATION_TILES
from megaclip.planner.losses import LossSizes, megaclip_loss_bytes
from megaclip.planner.states import (
    States,
    gathered_bytes,
    gradient_bytes,
    reduced_gradient_bytes,
    reduction_under_way,
)
from megaclip.planner.towers import TowerWork, image_tower, text_tower, tower_work
from megaclip.planner.workload import EvaluationSets, Workload

Phase = dict[str, float]
"""Bytes by part."""
Phases = dict[str, Phase]
KEPT = "kept graphs"
"""Name of the part of a phase for the kept graphs, including those of the phase itself. If all graphs of a partly
locked tower are kept, the last one is part of the activations of the forward pass that makes it."""


def loss_sizes(workload: Workload) -> LossSizes:
    """Return the loss's sizes on one rank."""
    return LossSizes(workload.local_batch, workload.model.embed_dim, workload.world_size, workload.compute_bytes)


def loss_bytes(workload: Workload) -> float:
    """Return the loss's peak on one rank's GPU. `workload` has no "auto" (`resolve_auto`)."""
    section = workload.megaclip
    return megaclip_loss_bytes(
        loss_sizes(workload),
        section.exchange,
        section.reduction,
        section.tile_budget_mib,
        section.loss,
        payload_bytes=workload.payload_bytes,
    )


def embedding_bytes(workload: Workload) -> float:
    """Return the bytes of both towers' embeddings of the local batch; their gradients take as much again."""
    return 2.0 * loss_sizes(workload).features


def graph_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes on the GPU of one kept graph of the image tower and of the text tower, with its embeddings."""
    image, text = (_graph_bytes(workload, work) for work in tower_work(workload))
    return image, text


def _graph_bytes(workload: Workload, work: TowerWork) -> float:
    width = workload.compute_bytes
    tower = work.tower.graph_bytes(work.micro_batch, width, workload.checkpointing)
    tower *= _positions_share(workload, work)
    # Embeddings, and their float32 values before they are scaled to unit length.
    return tower + work.micro_batch * workload.model.embed_dim * (width + 4)


def _positions_share(workload: Workload, work: TowerWork) -> float:
    """Return the share of a tower's token positions that its kept graphs hold. Without a known share of captions that
    are cut, it is 1: memory must be enough for captions of full length."""
    return 1 - (workload.text_positions_saved or 0.0) if work.tower.name == "text" else 1.0


def step_phases(workload: Workload, states: States) -> Phases:
    """Return the phases of a step. `workload` has no "auto", except for kept graphs, where "auto" counts as none."""
    image, text = tower_work(workload)
    image_graphs, text_graphs = (work.kept * _graph_bytes(workload, work) for work in (image, text))
    embeddings = embedding_bytes(workload)
    on_gpu = 0.0 if workload.megaclip.embeddings_offload else embeddings
    phases: Phases = {}
    kept = 0.0
    text_first = not text.parameters.trained and image.chunks == 1
    for number, work in enumerate((text, image) if text_first else (image, text)):
        kept += image_graphs if work is image else text_graphs
        activations, made = _forward_activations(workload, work)
        phases[f"{work.tower.name} tower forward"] = {
            KEPT: kept - made,
            "activations": activations,
            "data chunks": 2 * work.tower.input_bytes * work.micro_batch,
            "embeddings": on_gpu / 2 * (number + 1),
            "gathered parameters": gathered_bytes(workload, work.parameters),
        }
    phases["loss"] = {KEPT: kept, "embeddings": embeddings, "loss": loss_bytes(workload)}
    for work in (image, text):
        if work.parameters.trained:
            ways = _backward_phases(workload, states, work, image_graphs if work is image else kept)
            largest = max(ways, key=_total)
            phases[f"{work.tower.name} tower backward"] = {"embedding gradients": on_gpu, **largest}
    phases["gradient reduction"] = {
        "gradients": gradient_bytes(workload, image_done=True, text_done=True),
        "reduce bucket": states.bucket,
        "reduction": states.reduction,
    }
    phases["optimizer step"] = {"gradients": reduced_gradient_bytes(workload), "update": states.update}
    return _without_zeros(phases)


def _forward_activations(workload: Workload, work: TowerWork) -> tuple[float, float]:
    """Return the peak of a tower's last forward pass, and the bytes of it that belong to a kept graph.

    If a tower is locked, or some graphs are kept, a forward pass may have the highest peak of the step.
    """
    tower, samples, width = work.tower, work.micro_batch, workload.compute_bytes
    all_kept = work.kept == work.chunks
    if all_kept and _partly_locked(work):
        peak = tower.peak_of_forward_with_graph(samples, width, workload.checkpointing)
        return peak, tower.graph_bytes(samples, width, workload.checkpointing)
    return tower.forward_peak(samples, width), 0.0


def _backward_phases(workload: Workload, states: States, work: TowerWork, kept: float) -> list[Phase]:
    """Return the phases of the backward passes over a tower: over its kept graphs, and over chunks encoded again.

    kept: bytes of the graphs that are held when the first of its kept graphs is back-propagated.
    """
    image, text = tower_work(workload)
    tower, is_text = work.tower, work.tower.name == "text"
    activations = tower.backward_peak(work.micro_batch, workload.compute_bytes, workload.checkpointing)
    several = workload.backward_passes > 1
    other = (image if is_text else text).parameters if several else None

    def phase(other_done: bool) -> Phase:
        own_done = work.chunks > 1  # at the second chunk, beside the first one's gradients
        image_done, text_done = (other_done, own_done) if is_text else (own_done, other_done)
        done = image.parameters.trained * image_done + text.parameters.trained * text_done
        return {
            "gradients": gradient_bytes(workload, image_done=image_done, text_done=text_done),
            "gradient sums": workload.gradient_sum_bytes * done if several else 0.0,
            "reduce bucket": 0.0 if workload.coalesces else states.bucket,
            "reduction": reduction_under_way(workload, states, work.parameters, activations),
            "gathered parameters": gathered_bytes(workload, work.parameters, other=other),
        }

    phases: list[Phase] = []
    if work.kept:
        beyond_graph = max(0.0, _positions_share(workload, work) * activations - _graph_bytes(workload, work))
        phases.append({KEPT: kept, "activations": beyond_graph, **phase(not is_text and text.kept > 0)})
    if work.encoded_again:
        chunks = 2 * tower.input_bytes * work.micro_batch
        other_done = image.parameters.trained > 0 if is_text else text.kept > 0
        phases.append({"activations": activations, "data chunks": chunks, **phase(other_done)})
        if _partly_locked(work):  # the forward pass over the locked blocks may have the higher peak
            forward = tower.peak_of_forward_with_graph(work.micro_batch, workload.compute_bytes, workload.checkpointing)
            phases.append({**phases[-1], "activations": forward, "reduction": 0.0})
    return phases


def _partly_locked(work: TowerWork) -> bool:
    return work.tower.part_with_graph is not work.tower


def evaluation_phases(workload: Workload, evaluation: EvaluationSets) -> Phases:
    """Return the phases of an evaluation: both towers without graph, whose features are kept in float32; then
    retrieval, which copies them without padding, and the choice of example pictures, which takes the images' features
    in float32 and in float64."""
    width, dimensions = workload.compute_bytes, workload.model.embed_dim
    # An evaluation reads all patches.
    image = image_tower(workload.model.replace(vision_cfg={"patch_dropout": 0.0}), workload.tensor_ranks)
    text = text_tower(workload.model, workload.tensor_ranks)
    pairs = math.ceil(evaluation.pairs / workload.world_size)
    texts = max(EVALUATED_TEXTS if evaluation.labelled else 0, evaluation.batch if evaluation.pairs else 0)
    features = 2 * 4.0 * pairs * dimensions
    phases = {
        "evaluation: towers": {
            "activations": max(
                image.forward_peak(evaluation.batch, width) + evaluation.batch * image.input_bytes,
                text.forward_peak(texts, width),
            ),
            "features": features,
            "gathered parameters": max(gathered_bytes(workload, tower) for tower in workload.parameters),
        }
    }
    if pairs:
        # This rank's pairs have ids, their order, best similarities and ranks; all pairs have similarities and counts.
        numbers = 8.0 * (6 * pairs + 4 * evaluation.pairs)
        copies = {"tiles": EVALUATION_TILES, "copies of features": features, "numbers": numbers}
        pictures = {"copies of features": 1.5 * features, "numbers": numbers}
        larger = max(copies, pictures, key=lambda parts: sum(parts.values()))
        phases["evaluation: retrieval"] = {"features": features, **larger}
    return _without_zeros(phases)


def _total(phase: Phase) -> float:
    return sum(phase.values())


def _without_zeros(phases: Phases) -> Phases:
    return {name: {part: size for part, size in phase.items() if size} for name, phase in phases.items()}
