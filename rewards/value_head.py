"""A value head: what will the final score be, read from the reward model's state at a prefix?

One linear map a logged length, from (last hidden state, score) to the final score; between logged
lengths the two neighbours' predictions are mixed by the logarithm of the length, beyond the ends
the nearest one is used. It ranks unfinished answers at a rejection and nothing else: finished ones
rank by their score, and the winner is chosen by score alone. Fitted by
postprocess/fit_value_head.py; stored as safetensors with its provenance. Numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FORMAT = "speculative-rejection-value-head-1"
HEAD_SHA256 = "reward_head_sha256"  # in the metadata of logged states and of value heads
HIDDEN_DTYPE = np.float16  # of logged states; read the same way at use, so that replay is exact


class BadValueHead(ValueError):
    """The file is no value head, or one of another reward model."""


@dataclass(frozen=True, slots=True)
class ValueHead:
    """`lengths [m]` ascending, `weights [m, hidden + 1]` (the last one is the score's), `bias [m]`.

    `provenance` holds strings: the reward model's and generator's name, lambdas, prompts, scores.
    """

    lengths: np.ndarray
    weights: np.ndarray
    bias: np.ndarray
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        return self.weights.shape[1] - 1

    def predict(self, hidden: np.ndarray, scores: np.ndarray, length: int) -> np.ndarray:
        """Final scores of prefixes of `length` tokens: hidden `[n, h]`, scores `[n]` -> `[n]`."""
        x = features(hidden, scores)
        low, high, share = _between(self.lengths, length)
        weights = (1 - share) * self.weights[low] + share * self.weights[high]
        return x @ weights + (1 - share) * self.bias[low] + share * self.bias[high]

    def check(
        self, reward_name: str, hidden_size: int | None, head_sha256: str | None = None
    ) -> None:
        """Raises BadValueHead unless the head belongs to this reward model."""
        fitted_for = self.provenance.get("reward_model_name", "?")
        if fitted_for != reward_name:
            raise BadValueHead(
                f"--value_head was fitted for the reward model {fitted_for}, not {reward_name}; fit"
                " one from runs with --log_hidden: postprocess/fit_value_head.py"
            )
        if hidden_size is not None and hidden_size != self.hidden_size:
            raise BadValueHead(
                f"--value_head reads hidden states of size {self.hidden_size}, the reward model's "
                f"have {hidden_size}; it was fitted for another version of the model"
            )
        known = self.provenance.get(HEAD_SHA256)
        if known and head_sha256 and known != head_sha256:
            raise BadValueHead(
                f"--value_head was fitted for another {reward_name}, whose own head has other "
                f"weights (sha256 {known[:12]}..., here {head_sha256[:12]}...); fit one from this "
                "one's runs with --log_hidden: postprocess/fit_value_head.py"
            )

    def save(self, path: Path) -> None:
        """Written beside, then renamed."""
        from safetensors.numpy import save

        from suite.files import write_whole

        tensors = {
            "lengths": self.lengths.astype(np.int64),
            "weights": self.weights.astype(np.float32),
            "bias": self.bias.astype(np.float32),
        }
        write_whole(path, save(tensors, {"format": FORMAT, **self.provenance}))


def load_value_head(path: str | Path) -> ValueHead:
    """Raises BadValueHead with the reason where the file can't be used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadValueHead(f"--value_head {path} can't be read: {error}") from error
    if metadata.get("format") != FORMAT or set(tensors) != {"lengths", "weights", "bias"}:
        raise BadValueHead(
            f"--value_head {path} is not a value head; postprocess/fit_value_head.py makes one"
        )
    head = ValueHead(**tensors, provenance={k: v for k, v in metadata.items() if k != "format"})
    sizes = len(head.lengths), len(head.bias), len(head.weights)
    ascending = head.lengths.ndim == 1 and bool((np.diff(head.lengths) > 0).all())
    if head.weights.ndim != 2 or len(set(sizes)) != 1 or not sizes[0] or not ascending:
        raise BadValueHead(f"--value_head {path}: lengths, weights and bias do not fit together")
    if head.lengths[0] < 1 or not all(np.isfinite(t).all() for t in tensors.values()):
        raise BadValueHead(f"--value_head {path}: a value is not finite, or a length is below 1")
    return head


def features(hidden: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """`[n, hidden + 1]` float64, from states rounded as they are logged."""
    rounded = compact(hidden).astype(np.float64)
    return np.concatenate((rounded, np.asarray(scores, dtype=np.float64)[:, None]), axis=1)


def compact(hidden: np.ndarray) -> np.ndarray:
    """Hidden states as they are stored."""
    limit = float(np.finfo(HIDDEN_DTYPE).max)
    return np.clip(np.asarray(hidden, dtype=np.float32), -limit, limit).astype(HIDDEN_DTYPE)


def _between(lengths: np.ndarray, length: int) -> tuple[int, int, float]:
    """The neighbours of a length, and how far it lies towards the upper one."""
    high = int(np.searchsorted(lengths, length))
    if high == 0 or high == len(lengths):
        nearest = min(high, len(lengths) - 1)
        return nearest, nearest, 0.0
    low_log, high_log = math.log(lengths[high - 1]), math.log(lengths[high])
    return high - 1, high, (math.log(length) - low_log) / (high_log - low_log)
