"""Is a tensor what the reference says? If not: where, and by how much."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 1 << 24  # elements compared at a time: a float64 copy of everything may not fit
OUTLIER = 16  # see differences()
PICTURE = 96  # largest side of the picture of wrong elements


@dataclass
class Wrong:
    """What differs. ``index`` is the first wrong one; ``picture`` marks 2-D blocks with errors."""

    index: tuple[int, ...]
    got: float
    expected: float
    count: int
    total: int
    shape: tuple[int, ...]
    picture: np.ndarray | None  # bool, at most PICTURE × PICTURE; None below 2 dimensions

    def __str__(self) -> str:
        share = f"{self.count:,} of {self.total:,} elements are wrong"
        nan = "  (memory that nobody writes reads nan here)" if self.got != self.got else ""
        return (
            f"{share}, the first at {list(self.index)}: got {self.got:.9g}, "
            f"expected {self.expected:.9g}{nan}"
        )

    def text_picture(self) -> str:
        """The picture in characters: ``#`` where something is wrong, ``.`` where all is right."""
        if self.picture is None:
            return ""
        small = shrink(torch.from_numpy(self.picture), 16, 48)
        rows = ["  " + "".join("#" if x else "." for x in row) for row in small.tolist()]
        size = " x ".join(str(n) for n in self.shape[-2:])
        return "\n".join([f"  where ({size}; # wrong, . right):", *rows])


def shrink(mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A smaller 2-D mask; True where anything in the block it stands for is True."""
    for dim, size in ((0, rows), (1, columns)):
        step = -(-mask.shape[dim] // size)
        if step > 1:
            parts = mask.split(step, dim)
            mask = torch.stack([part.any(dim) for part in parts], dim)
    return mask


def differences(
    out: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> tuple[float, Wrong | None]:
    """Compare ``out`` with ``expected`` (float64, same shape).

    Returns:
        ‖out − expected‖ / ‖expected‖ over the finite elements, and what is wrong, if anything:

        - the norm must be within ``tolerance``;
        - no element may differ by more than 16 · tolerance · (|expected| + its root mean square):
          one wrong element among 2^20 hides in the norm. Rounding errors of norm ``tolerance`` are
          about normal, and the largest of 2^31 of those is 6.5 times their root mean square;
        - NaN and infinities must be where the reference, rounded to the dtype, has them.
    """
    a, b = out.detach().reshape(-1), expected.detach().reshape(-1)
    finite = 0
    error = norm = torch.zeros((), dtype=torch.float64, device=b.device)
    for x, y in _chunks(a, b):
        good = y.isfinite()
        error = error + torch.where(good, x - y, 0.0).square().sum()
        norm = norm + torch.where(good, y, 0.0).square().sum()
        finite += int(good.sum())
    rms = (norm / max(finite, 1)).sqrt()
    relative = float((error / norm).sqrt()) if norm > 0 else float(error.sqrt())
    if relative != relative:
        relative = float("inf")  # NaN never passes
    masks = _wrong(a, b, OUTLIER * tolerance, rms)
    if relative > tolerance and not any(mask.any() for mask in masks):
        # No outlier, but many small errors: some element must be over this bound.
        masks = _wrong(a, b, 0.5 * tolerance, rms)
    count = sum(int(mask.sum()) for mask in masks)
    if not count:
        return relative, None
    wrong = torch.cat(masks).view(out.shape)
    starts = itertools.accumulate((len(m) for m in masks), initial=0)
    first = next(s + int(m.nonzero()[0]) for s, m in zip(starts, masks, strict=False) if m.any())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), out.shape))
    picture = None
    if out.dim() >= 2:
        picture = wrong.reshape(-1, *out.shape[-2:]).any(0)
        picture = shrink(picture, PICTURE, PICTURE).cpu().numpy()
    values = float(a[first]), float(b[first])
    return relative, Wrong(index, *values, count, out.numel(), tuple(out.shape), picture)


def _wrong(a: torch.Tensor, b: torch.Tensor, bound: float, rms: torch.Tensor) -> list[torch.Tensor]:
    masks = []
    for x, y in _chunks(a, b):
        same = (x == y) | (x.isnan() & y.isnan())
        near = y.isfinite() & ((x - y).abs() <= bound * (y.abs() + rms))
        masks.append(~(same | near))
    return masks


def _chunks(a: torch.Tensor, b: torch.Tensor):
    """Pairs of float64 pieces; what the dtype cannot hold counts as the infinity it rounds to."""
    for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True):
        rounded = y.to(x.dtype).double()
        yield x.double(), torch.where(rounded.isfinite(), y, rounded)
