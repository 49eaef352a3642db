"""Table of the losses over the whole dataset: one row for each version of SogCLR, iSogCLR and FastCLIP.

`megaclip.losses.fastclip` has the formulas that the columns select, and names the papers. The configuration uses the
table to refuse settings without effect. The cost formulas and the planner use it to count traffic and state.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Variant:
    """One loss."""

    temperature: Literal["constant", "global", "individual"]
    """"global": one learned temperature for all samples; "individual": two learned temperatures per sample."""
    multiplied: bool
    """Multiply the terms of a sample by its temperature."""
    with_rho: bool
    """Include rho times the temperature in the objective."""
    gamma_schedule: Literal["constant", "cosine"]
    """Default schedule of the inner learning rate gamma."""

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
