"""A two-prompt archive written by hand: every number can be worked out on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLM, REWARD = "Gen-1.5B", "Reward-v0.1"
PAIR = f"{LLM}_{REWARD}"
PROMPTS = {1: "Name a colour.", 2: "Add 2 and 2."}
# What one token costs: generated x 1000, scored x 500.
PLAN = {"generator_params": 1000, "reward_params": 500}


def make_object(
    idx: int,
    scores: list[float],
    elapsed: float,
    *,
    rank: int = 0,
    seed: int = 0,
    tokens: tuple[int, int] = (100, 200),
    **fields: Any,
) -> dict[str, Any]:
    """One process's object. Candidate i answers `answer <process seed>.<i>`."""
    process_seed = seed + rank
    made = {
        "llm_name": LLM,
        "reward_model_name": f"some-org/{REWARD}",
        "speculative_rejection": False,
        "alpha": 0.5,
        "batch_size": len(scores),
        "max_tokens": 2048,
        "output_folder": "somewhere",
        "seed": seed,
        "process_seed": process_seed,
        "process_rank": rank,
        "prompt": {"JSON_idx": idx, "prompt": PROMPTS.get(idx, f"Prompt {idx}.")},
        "elapsed_sec": elapsed,
        "clock": [["generation: decode", elapsed / 2], ["reward: score", elapsed / 4]],
        "trajectories": [
            {
                "prompt": PROMPTS.get(idx, f"Prompt {idx}."),
                "output": f"answer {process_seed}.{candidate}",
                "score": score,
                "candidate": candidate,
            }
            for candidate, score in enumerate(scores)
        ],
        "tokens_generated": tokens[0],
        "tokens_scored": tokens[1],
        "peak_memory_bytes": 2**30 * (1 + rank),
        "plan": PLAN,
    }
    return {**made, **fields}


def write_run(archive: Path, name: str, prompts: dict[int, list[dict[str, Any]]]) -> Path:
    """One folder, one file a prompt."""
    folder = archive / name
    folder.mkdir(parents=True, exist_ok=True)
    for idx, objects in prompts.items():
        path = folder / f"{PAIR}_prompt_{idx:04d}.json"
        path.write_text(json.dumps(objects))
    return folder


def speculative(alpha: float | str, **fields: Any) -> dict[str, Any]:
    return {"speculative_rejection": True, "alpha": alpha, "batch_size": 20, **fields}


def make_archive(archive: Path) -> Path:
    """Base Bo8 on two processes, Bo4 on one, Speculative Rejection with three alphas.

    Bo8            max S   min S   range   seconds (slowest process)
      prompt 1     4       0       4       12
      prompt 2     2       -2      4       8            sum 20 s x 2 GPUs = 40
    Bo4            max 3 and 1: (3 - 4)/4 = (1 - 2)/4 = -.25, score 75; 10 s x 1: time .5, GPU .25
    SpR .5         max 3.5 and 1.5: -.125 each, score 87.5; 3 + 2 s: time .25, GPU .125
    SpR .9         max 5 and 2: +.25 and 0, score 112.5; 4 + 6 s: time .5, GPU .25
    SpR .1         max 1 and -1: -.75 each, score 25; 2 + 2 s: time .2, GPU .1
    """
    write_run(
        archive,
        f"Bo8_{PAIR}_0",
        {
            1: [make_object(1, [0, 1, 2, 3], 10), make_object(1, [1, 1, 2, 4], 12, rank=1)],
            2: [make_object(2, [-2, 0, 0, 2], 8), make_object(2, [-1, 0, 1, 1], 7, rank=1)],
        },
    )
    write_run(
        archive,
        f"Bo4_{PAIR}_0",
        {1: [make_object(1, [0, 1, 2, 3], 5)], 2: [make_object(2, [-2, -1, 0, 1], 5)]},
    )
    for alpha, best, seconds in (
        (0.5, (3.5, 1.5), (3, 2)),
        (0.9, (5, 2), (4, 6)),
        (0.1, (1, -1), (2, 2)),
    ):
        write_run(
            archive,
            f"SpR_alpha_{alpha}_{PAIR}_0",
            {
                idx: [
                    make_object(
                        idx,
                        [best[idx - 1]],
                        seconds[idx - 1],
                        tokens=(50, 60),
                        **speculative(alpha),
                    )
                ]
                for idx in (1, 2)
            },
        )
    return archive
