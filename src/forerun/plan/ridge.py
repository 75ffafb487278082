"""Up to which batch the arithmetic of drafts is spare: the roofline's ridge (Williams et al. 2009) in sequences."""

from __future__ import annotations

from forerun.errors import PlanError
from forerun.plan.hardware import Hardware


def spare_batch(hardware: Hardware, *, draft_length: int, weight_bytes: float = 2.0, dtype: str = "bf16") -> float:
    """Sequences at which multiplying takes as long as reading the weights, if each verifies `draft_length` tokens.

    A matrix of P weights moves P * weight_bytes bytes and takes 2 P FLOP a token, so n tokens have an intensity of
    2 n / weight_bytes FLOP/byte. It reaches the ridge with n = ridge * weight_bytes / 2 tokens, and a sequence has
    draft_length + 1 of them in a step. Below it a draft token costs no time of the target's, above it a whole token's.
    Peaks as the data sheet has them; activations are left out, which at that point come to a tenth of the bytes in a
    model of 8 billion parameters and a twentieth in one of 70 billion.

    Raises:
        PlanError: the hardware can't compute in `dtype`, a length below 0, or weights of no bytes.
    """
    if draft_length < 0:
        raise PlanError("draft length", f"{draft_length} is not allowed; expected at least 0")
    if not weight_bytes > 0:
        raise PlanError("weight bytes", f"{weight_bytes} is not allowed; expected above 0")
    return hardware.ridge(dtype) * weight_bytes / 2 / (draft_length + 1)
