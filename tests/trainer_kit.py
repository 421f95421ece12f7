"""What the tests of the trainers share."""

import json

from retrain.trainer import GRPOTrainer

ROWS = [{"prompt": f"{c}=", "answer": c} for c in "abcd"]

SMALL = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "backend": {"type": "benchmarks.mock_engine:MockOptions"},
    "chat": "none",
    "sampling": {"max_tokens": 4},
    "run_dir": "run",
}


def grpo(**changes) -> GRPOTrainer:
    return GRPOTrainer.from_pretrained("tiny", **{**SMALL, **changes})


def variety(prompt: str, response: str) -> float:
    return len(set(response)) / 4


def rollouts(result) -> list[dict]:
    lines = (result.run_dir / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
