"""How good is a reconstruction? Distances, similarity, success rates and the controls that keep them honest.

Images are float arrays [n, channels, height, width] in `pixel_range`. Reconstructions are clamped to that
range before anything is measured: an unclamped diverged image has a huge error and would flatter a defence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import uniform_filter
from scipy.optimize import linear_sum_assignment

PAPERS_MSE = 0.70  # the papers' threshold; after clamping to [0, 1] a black image passes it
STRICT_MSE = 0.01
STRICT_SSIM = 0.8


@dataclass(frozen=True)
class Scores:
    """Per-image measurements of clamped reconstructions against the truth."""

    mse: np.ndarray
    ssim: np.ndarray

    @property
    def rmse(self) -> np.ndarray:
        return np.sqrt(self.mse)

    def psnr(self, pixel_range: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
        """Peak signal-to-noise ratio in dB; infinite for a perfect copy."""
        span = pixel_range[1] - pixel_range[0]
        with np.errstate(divide="ignore"):
            return 10.0 * np.log10(span**2 / self.mse)

    def success(self) -> np.ndarray:
        """Success by the strict threshold (unit pixel range): MSE < 0.01 and, for images, SSIM > 0.8."""
        return (self.mse < STRICT_MSE) & ((self.ssim > STRICT_SSIM) | np.isnan(self.ssim))

    def success_papers(self) -> np.ndarray:
        """Success by the papers' threshold MSE < 0.70."""
        return self.mse < PAPERS_MSE


def clamp(images: np.ndarray, pixel_range: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Into the pixel range, in float64; non-finite pixels become the middle of the range."""
    low, high = pixel_range
    x = np.nan_to_num(np.asarray(images, np.float64), nan=(low + high) / 2, posinf=high, neginf=low)
    return np.clip(x, low, high)


def mse(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Mean squared error per image."""
    difference = np.asarray(truth, np.float64) - np.asarray(guess, np.float64)
    return (difference.reshape(len(difference), -1) ** 2).mean(1)


def rmse_unclamped(
    truth: np.ndarray, guess: np.ndarray, pixel_range: tuple[float, float] = (0.0, 1.0)
) -> float | None:
    """Median over images of the root-mean-square error as the search left them, for comparison with papers that do not clamp; in
    units of the pixel range. Images that are not finite are left out."""
    finite = np.isfinite(guess.reshape(len(guess), -1)).all(1)
    if not finite.any():
        return None
    return float(np.median(np.sqrt(mse(truth[finite], guess[finite])))) / (pixel_range[1] - pixel_range[0])


def ssim(truth: np.ndarray, guess: np.ndarray, data_range: float = 1.0, window: int = 7) -> np.ndarray:
    """Structural similarity per image: uniform window, sample covariance, mean over the positions where the
    window lies inside the image and over channels. The window shrinks to the largest odd size that fits."""
    a, b = np.asarray(truth, np.float64), np.asarray(guess, np.float64)
    side = min(window, *a.shape[-2:])
    side -= 1 - side % 2
    size, edge, count = (1, 1, side, side), side // 2, side * side

    def mean(x: np.ndarray) -> np.ndarray:
        full = uniform_filter(x, size=size, mode="reflect")
        return full[..., edge : full.shape[-2] - edge, edge : full.shape[-1] - edge]

    unbias = count / max(count - 1, 1)
    mean_a, mean_b = mean(a), mean(b)
    var_a = unbias * (mean(a * a) - mean_a**2)
    var_b = unbias * (mean(b * b) - mean_b**2)
    cov = unbias * (mean(a * b) - mean_a * mean_b)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    top = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    bottom = (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    return (top / bottom).reshape(len(a), -1).mean(1)


def score(truth: np.ndarray, guess: np.ndarray, pixel_range: tuple[float, float] = (0.0, 1.0)) -> Scores:
    """Clamp the guess and measure it. MSE is in units of the pixel range squared (range scaled to 1), so the
    strict threshold means the same for every dataset."""
    low, span = pixel_range[0], pixel_range[1] - pixel_range[0]
    a = (np.asarray(truth, np.float64) - low) / span
    b = (clamp(guess, pixel_range) - low) / span
    if a.ndim == 4:
        return Scores(mse(a, b), ssim(a, b))
    return Scores(mse(a, b), np.full(len(a), np.nan))


def controls(
    truth: np.ndarray, mean_image: np.ndarray | None = None, pixel_range: tuple[float, float] = (0.0, 1.0)
) -> dict[str, dict[str, float]]:
    """What an attacker scores who saw nothing: the black image, and the mean image of public data (default:
    the mean of the victims themselves, which favours the control)."""
    truth = np.asarray(truth, np.float64)
    average = truth.mean(0) if mean_image is None else np.asarray(mean_image, np.float64)
    blind = {"black": np.full_like(truth, pixel_range[0]), "mean": np.broadcast_to(average, truth.shape)}
    return {name: summary(score(truth, image, pixel_range)) for name, image in blind.items()}


def summary(scores: Scores) -> dict[str, float]:
    """Means over the images, and success rates at both thresholds."""
    error = float(scores.mse.mean())
    return {
        "mse": error,
        "rmse": float(scores.rmse.mean()),
        "psnr": float(10 * np.log10(1.0 / max(error, 1e-12))),  # of the mean error: always finite
        "ssim": float(scores.ssim.mean()),
        "success_rate": float(scores.success().mean()),
        "success_rate_papers": float(scores.success_papers().mean()),
    }


def match(truth: np.ndarray, guess: np.ndarray, pixel_range: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Order of `guess` that pairs it best with `truth` (least total squared error after clamping).

    A batch gradient does not say which image came first; both arrays are [batch, ...] of one victim.
    Returns `order` such that guess[order[i]] belongs to truth[i]."""
    a = np.asarray(truth, np.float64).reshape(len(truth), -1)
    b = clamp(guess, pixel_range).reshape(len(guess), -1)
    cost = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    rows, columns = linear_sum_assignment(cost)
    order = np.empty(len(a), np.int64)
    order[rows] = columns
    return order


def label_accuracy(truth: np.ndarray, guess: np.ndarray) -> float:
    """Fraction of labels recovered; for batches [victims, batch] as multisets: order is not leaked."""
    truth, guess = np.asarray(truth), np.asarray(guess)
    if truth.ndim == 1:
        return float((truth == guess).mean())
    hits = 0
    for a, b in zip(truth, guess, strict=True):
        values, counts = np.unique(a, return_counts=True)
        hits += sum(min(int(n), int((b == v).sum())) for v, n in zip(values, counts, strict=True))
    return hits / truth.size


def label_control(
    truth: np.ndarray, guess: np.ndarray, public: np.ndarray | None = None, draws: int = 4000
) -> tuple[float | None, float | None]:
    """(what guesses that know nothing of the victim read, how often they read as much as the guesses made for it).

    Several victims: the same guesses, dealt to the victims at random (seed 0). The second number is the p-value of a permutation
    test, which with few victims cannot be small: about 1 / 120 for five. One victim: labels drawn at the frequencies of
    `public` labels; nothing without these."""
    truth, guess = (np.asarray(a).reshape(len(truth), -1) for a in (truth, guess))
    victims, size = truth.shape
    if truth.dtype.kind not in "iu":  # quantities are no labels
        return None, None
    rng = np.random.default_rng(0)
    classes = 1 + int(max(truth.max(), guess.max(), -1 if public is None else public.max()))
    there, said = (np.stack([np.bincount(row, minlength=classes) for row in a]) for a in (truth, guess))
    read = np.minimum(there[:, None], said[None]).sum(-1)  # [of this victim, by guesses made for that one]
    if victims > 1:
        dealt = rng.permuted(np.tile(np.arange(victims), (draws, 1)), axis=1)
        others = read[np.arange(victims), dealt].sum(1)
    elif public is not None and len(public):
        frequencies = np.bincount(public, minlength=classes) / len(public)
        others = np.minimum(there, rng.multinomial(size, frequencies, draws)).sum(1)
    else:
        return None, None
    return float(others.mean() / truth.size), float((1 + (others >= np.trace(read)).sum()) / (1 + draws))
