"""Text that transformers generates: after the third token no program is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazygt
from lazygt.passes import template

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # what a library warns of is its users' affair
    pytest.mark.filterwarnings("ignore"),
]

#: No size that a text comes to while it is written, alone or times another, is one of the model's.
TOKENS, PROMPT = 20, 9
MODELS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_head": 2, "n_embd": 94, "vocab_size": 211, "n_positions": 139},
    "Llama": {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "hidden_size": 172, "intermediate_size": 197, "vocab_size": 211,
        "max_position_embeddings": 139,
    },
}  # fmt: skip


def model_of(family: str) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**MODELS[family])
    return getattr(transformers, family + kind)(config).eval()


def generated(model: Any, device: str, cache: str | None, seen: Any = None) -> list[list[int]]:
    def scored(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen()
        return scores

    prompt = torch.arange(1, PROMPT + 1, device="cpu").view(1, PROMPT).to(device)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    with torch.no_grad():
        text = model.generate(
            prompt, **settings, pad_token_id=0, cache_implementation=cache,
            logits_processor=[scored],
        )  # fmt: skip
    return text.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", MODELS)
def test_no_program_is_new_after_the_third_token(
    family: str, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs: list[int] = []
    run_passes = template.run_passes

    def counted(*args: Any) -> Any:
        runs.append(1)
        return run_passes(*args)

    monkeypatch.setattr(template, "run_passes", counted)
    model, counts = model_of(family), []

    def seen() -> None:
        """Before the next token is chosen: what was done for those before it."""
        stats = s.stats()
        templates = {plan.template.digest for plan in s.plans()}
        counts.append((len(runs), len(stats["plan_misses"]), stats["ops_inferred"], len(templates)))

    expected = generated(model, "cpu", cache)
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ) as s:
        assert generated(model.to("lazygt"), "lazygt", cache, seen) == expected
    assert len(counts) == TOKENS
    # the last two texts are as long as the cache of fixed size, or nearly
    assert set(counts[3:-2]) == {counts[3]}
