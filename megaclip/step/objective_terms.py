"""The objective of a run in one step: what it receives from the step, the factors of its terms, and their values.

The gradient of a chunk's term is a constant: weight * W / N, for N addends on all W ranks, because DeepSpeed averages
gradients over ranks. So a term is one more output of a chunk, and its cached gradient is known before the backward
passes.

Shapes: b rows of this rank.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaclip.cache.passes import Role
from megaclip.comm.collectives import gather_objects, sum_over_ranks
from megaclip.comm.groups import resolve
from megaclip.devices import upload
from megaclip.errors import ConfigError
from megaclip.logging import get_logger, log_once
from megaclip.objectives import Objective, WholeBatch
from megaclip.objectives.base import CONTRASTIVE, check_terms, leaves
from megaclip.step.batch import Tower
from megaclip.step.sample_store import StepStore

logger = get_logger(__name__)


class StepTerms:
    """The terms of one step. Without an objective there are none, and the loss is the contrastive loss."""

    def __init__(self, objective: Objective | None, batch: StepStore, device: torch.device) -> None:
        self._objective, self._batch, self._device = objective, batch, device
        self._chunk_sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._addends: dict[str, Tensor] = {}
        """Number of addends of a term on all ranks, where it is not the number of samples."""
        self._values: dict[str, Tensor] = {}
        """Values () of this rank's terms of the batch."""

    @property
    def pairs(self) -> bool:
        """True if a pass encodes a chunk of images together with its captions."""
        return self._objective is not None and self._objective.encodes_pairs()

    def weight(self, name: str) -> float:
        return 1.0 if self._objective is None else self._objective.weights.get(name, 1.0)

    def inputs(self, rows: Mapping[Tower, Tensor | slice], *, again: bool) -> dict[str, dict[str, Any]] | None:
        """Return what the model passes on to the objective in a pass, by call; None without an objective.

        rows: the samples that the pass encodes, as rows of the batch, for each of its towers.
        """
        if self._objective is None:
            return None
        if self.pairs:
            return {"pair": self._inputs(rows[Tower.IMAGE], again=again)}
        return {tower.name.lower(): self._inputs(of_tower, again=again) for tower, of_tower in rows.items()}

    def _inputs(self, rows: Tensor | slice, *, again: bool) -> dict[str, Any]:
        assert self._objective is not None
        fields = {name: values[rows] for name, values in self._batch.fields().items()}
        counts = self._objective.counts(self._batch.tokens()[rows], fields)
        if not again:
            self._counts.update(counts)
        moved = {name: upload(values, self._device) for name, values in fields.items()}
        return {"fields": moved, "counts": counts, "is_repeated": again}

    def add(self, outputs: Mapping[Role, Tensor]) -> None:
        """Add the chunk's terms, which the outputs of a pass with gradients contain, to their sums."""
        for role, output in outputs.items():
            if isinstance(role, str) and output.ndim == 0:
                self._chunk_sums[role] = output.detach() + self._chunk_sums.get(role, 0.0)

    def count(self) -> None:
        """Sum the numbers of addends over ranks. All ranks call it after all chunks have been encoded."""
        if self._counts:
            names = sorted(self._counts)
            own = upload(torch.tensor([float(self._counts[name]) for name in names]), self._device)
            self._addends = dict(zip(names, sum_over_ranks(own).clamp(min=1).unbind(), strict=True))

    def gradients(self) -> dict[Role, Tensor]:
        """Return the gradient of the loss by each term of a chunk that was computed, () on the device."""
        return {name: self._gradient(name) for name in self._chunk_sums}

    def _gradient(self, name: str) -> Tensor:
        if name in self._addends:
            return self.weight(name) * resolve().size / self._addends[name]
        return torch.full((), self.weight(name) / self._batch.rows(), device=self._device)

    def add_batch_terms(self, contrastive: Tensor, features: Mapping[Role, Tensor], scalars: list[Tensor]) -> Tensor:
        """Return this rank's weighted sum of the contrastive loss () and the terms of the batch.

        features: in the order of the batch, by role. scalars: logit_scale, and logit_bias if the model has one.
        """
        if self._objective is None:
            return contrastive
        fields = {name: upload(values, self._device) for name, values in self._batch.fields().items()}
        more = {role: each for role, each in features.items() if isinstance(role, str)}
        scale, bias = (*scalars, None)[:2]
        assert scale is not None
        whole = WholeBatch(features[Tower.IMAGE], features[Tower.TEXT], scale, bias, more, fields)
        own = self._objective.batch_terms(whole)
        check_terms(f"{type(self._objective).__name__}.batch_terms", own, self._objective.weights)
        used = set(map(id, leaves(own.values())))
        for name, parameter in self._objective.named_parameters():
            if id(parameter) in used:
                raise ConfigError(
                    f"{type(self._objective).__name__}.batch_terms uses the parameter {name}, which would not be "
                    "trained; use it in chunk_features or chunk_terms"
                )
        terms = {CONTRASTIVE: contrastive} | own
        self._values = {name: term.detach() for name, term in terms.items()}
        return sum((self.weight(name) * term for name, term in terms.items()), contrastive.new_zeros(()))

    def total(self, contrastive: Tensor, values: dict[str, Tensor] | None) -> Tensor:
        """Return the loss of the step, (), the same on every rank, after all passes.

        contrastive: the contrastive loss, the same on every rank. values: receives the value of each term, ().
        """
        if self._objective is None:
            return contrastive
        own = {name: value / self._batch.rows() for name, value in self._chunk_sums.items()}
        if missing := self._addends.keys() - own.keys():
            raise ConfigError(f"megaclip.objective: counts names {min(missing)!r}, which chunk_terms does not return")
        own |= {name: self._chunk_sums[name] * resolve().size / count for name, count in self._addends.items()}
        if twice := own.keys() & self._values.keys():
            raise ConfigError(f"the term {min(twice)!r} is one of chunks and of the batch; give it two names")
        own |= self._values
        self._check_names(sorted(own))
        means = sum_over_ranks(torch.stack([own[name].to(contrastive.dtype) for name in sorted(own)])) / resolve().size
        found = dict(zip(sorted(own), means.unbind(), strict=True)) | {CONTRASTIVE: contrastive}
        if found.keys() == {CONTRASTIVE}:
            log_once(logger.warning, "megaclip.objective: none of its methods returns a term")
        if unused := self._objective.weights.keys() - found.keys():
            log_once(logger.warning, f"megaclip.objective: its weights name {min(unused)!r}, and there is no such term")
        if values is not None:
            values.update(found)
        return sum((self.weight(name) * value for name, value in found.items()), contrastive.new_zeros(()))

    def _check_names(self, names: list[str]) -> None:
        """Raise ConfigError if a rank or a later step has other terms: ranks add up their terms by position."""
        assert self._objective is not None
        known = self._objective.term_names
        found = gather_objects(names) if known is None else [known, names]
        self._objective.term_names = found[0]
        for other in found:
            if other != found[0]:
                raise ConfigError(
                    f"{type(self._objective).__name__} returned the terms {', '.join(found[0]) or 'none'} on one rank "
                    f"or in one step, and {', '.join(other) or 'none'} in another; return the same in each, such as "
                    "0 * chunk.image_features.sum() where there is nothing to add"
                )
