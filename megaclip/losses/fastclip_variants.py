"""What tells the losses over the whole dataset apart: SogCLR, iSogCLR and FastCLIP's versions, a row of a table each.

`megaclip.losses.fastclip` has the formulas that the columns choose between, and the papers. The configuration reads the
table to refuse settings without effect, the cost formulas and the planner to count what a variant moves and keeps.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Variant:
    """One loss."""

    temperature: Literal["constant", "global", "individual"]
    """"global": one for all samples is learned; "individual": two for each sample are."""
    multiplied: bool
    """A sample's terms are multiplied by its temperature."""
    with_rho: bool
    """rho times the temperature is part of the objective."""
    gamma_schedule: Literal["constant", "cosine"]
    """Of the inner learning rate, where none is asked for."""

    @property
    def individual(self) -> bool:
        return self.temperature == "individual"


VARIANTS = {
    "sogclr": Variant("constant", True, False, "constant"),
    "isogclr": Variant("individual", True, True, "constant"),
    "fastclip_v0": Variant("global", False, False, "cosine"),
    "fastclip_v1": Variant("constant", True, False, "cosine"),
    "fastclip_v2": Variant("individual", True, True, "cosine"),
    "fastclip_v3": Variant("global", True, True, "cosine"),
}
