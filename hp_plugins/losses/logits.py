"""What a model does to the output of its head: a scale and a soft cap, measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The argument at which a transform shows its scale alone, and the one at which it shows its cap alone. Powers of two,
# so that dividing by them loses nothing.
_SMALL, _LARGE = 2.0**-20, 2.0**30
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LogitTransform:
    """`softcap * tanh(scale * x / softcap)`, or `scale * x` without a soft cap.

    Cohere multiplies its logits, Granite divides them, Gemma 2 caps them softly.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """The logits for the outputs of the head."""
        logits = outputs * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def apply_(self, outputs: torch.Tensor, slope: torch.Tensor | None) -> None:
        """Turn the outputs of the head into logits, in place.

        Args:
            outputs: overwritten.
            slope: of the same shape; receives the derivative. None where there is no soft cap.
        """
        if self.softcap is None or slope is None:
            if self.scale != 1.0:
                outputs.mul_(self.scale)
            return
        outputs.mul_(self.scale / self.softcap).tanh_()
        torch.mul(outputs, outputs, out=slope)
        slope.neg_().add_(1.0).mul_(self.scale)
        outputs.mul_(self.softcap)

    def pull_back_(self, gradient: torch.Tensor, slope: torch.Tensor | None) -> None:
        """Turn a derivative by the logits into one by the outputs of the head, in place."""
        if slope is not None:
            gradient.mul_(slope)
        elif self.scale != 1.0:
            gradient.mul_(self.scale)

    @classmethod
    def measured(cls, outputs: torch.Tensor, logits: torch.Tensor) -> LogitTransform | None:
        """The transform that made these logits of the outputs of `probe_outputs`; None where it is of another form.

        Measuring needs no list of configuration names, and can't be misled by one: the `logits_scaling` of Granite
        divides, that of HyperCLOVA X multiplies.
        """
        if logits.shape != outputs.shape:
            return None
        found = logits.double()
        small, large = (float(one) for one in found.flatten()[:2])
        scale = small / _SMALL
        if scale == 0.0 or large == 0.0:
            return None
        if abs(scale - 1.0) < _TOLERANCE:
            # What is left of one after the model's own rounding.
            scale = 1.0
        is_capped = abs(large) < 0.5 * abs(scale) * _LARGE
        transform = cls(scale, abs(large) if is_capped else None)
        same = torch.allclose(transform(outputs), found, rtol=_TOLERANCE, atol=_TOLERANCE * _SMALL)
        return transform if same else None


def probe_outputs(*shape: int, device: torch.device) -> torch.Tensor:
    """Outputs of a head that show what a model does to them: from tiny to large, no two alike, in float64."""
    outputs = 1e3 * torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64, device=device) ** 3
    outputs[:3] = torch.tensor([_SMALL, _LARGE, 0.0], dtype=torch.float64)
    return outputs.reshape(shape)
