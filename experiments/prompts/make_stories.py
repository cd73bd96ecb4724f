"""Makes stories-test.jsonl: openings of stories that the packaged model tells at temperature 0.8.

Training texts are told with other seeds. Run from the repository root.
"""

import json
import re
from pathlib import Path

import specjax

COUNT, SEED = 100, 2**31


def main() -> None:
    """Keeps the first two sentences of each story, and each opening once."""
    target = specjax.load_target("stories260k")
    out = specjax.generate(
        target, [""] * (2 * COUNT), max_new_tokens=96, temperature=0.8, seed=SEED, batch_size=64
    )
    openings = []
    for text in out.text:
        found = re.match(r"\s*((?:[^.!?]*[.!?]\"?){2})\s", text)
        if found and found[1] not in openings:
            openings.append(found[1])
    lines = [json.dumps({"prompt": opening}) + "\n" for opening in openings[:COUNT]]
    assert len(lines) == COUNT
    Path("experiments/prompts/stories-test.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
