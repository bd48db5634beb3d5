"""Text sampled from the model at the end of a run."""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import nn

from hp_core.config.models import SamplesConfig
from hp_core.data.protocols import Tokenizer
from hp_core.model.compile import as_written
from hp_core.observe.run_directory import SAMPLES_FILE
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.evaluation import evaluating
from hp_core.training.run import Run, on_main


def write_samples(run: Run, model: nn.Module, tokenizer: Tokenizer, settings: SamplesConfig) -> None:
    """Continue each prompt, show the texts and append them to `samples.jsonl`.

    Every rank calls it: with sharded weights each forward pass is a collective. The main rank draws the tokens.
    """
    for prompt in settings.prompts:
        text = sample_text(model, tokenizer, prompt, settings, run.setup)
        run.console.say(f"sample: {text}")
        if run.setup.environment.is_main:
            with (run.directory.path / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": run.state.step, "prompt": prompt, "text": text}) + "\n")


def sample_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, settings: SamplesConfig, setup: DistributedSetup
) -> str:
    """`prompt` and what the model makes of it, up to `max_new_tokens` more tokens or the end of the document.

    With temperature 0 it takes the likeliest token, otherwise it draws from softmax(logits / temperature).
    """
    generator = torch.Generator().manual_seed(settings.seed)
    ids = tokenizer.encode_batch([prompt])[0] or [tokenizer.eos_id]
    with evaluating(model), as_written(model):
        for _ in range(settings.max_new_tokens):
            inputs = torch.tensor([ids], device=setup.device)
            logits = model(input_ids=inputs, use_cache=False).logits[0, -1, : tokenizer.vocab_size].float().cpu()
            if settings.temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial((logits / settings.temperature).softmax(-1), 1, generator=generator))
            # One rank's rounding must not end its loop while the others wait for it in a collective.
            token = on_main(partial(int, token), setup)
            if token == tokenizer.eos_id:
                break
            ids.append(token)
    return tokenizer.decode(ids)
