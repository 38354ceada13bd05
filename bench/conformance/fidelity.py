"""Does SmolLM2 generate the same tokens as elsewhere? Ours against transformers (f32) and llama.cpp (the same GGUF).

    python bench/conformance/fidelity.py greedy [--tokens 200]   # greedy tokens after 10 prompts, against transformers
    python bench/conformance/fidelity.py likelihood              # of real text, against llama.cpp (extra `llama`)

`greedy` ends with an error where a token differs and eager's own two best logits there differ by more than 1e-3.
`likelihood` takes the text of the repository's licence, in pieces of 500 tokens; for scale it also compares each
library with itself, a token at a time against many at a time: both are correct.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from keepdim.models import gguf
from keepdim.models.decoder import LOGITS, LanguageModel, lower_llm
from keepdim.models.generate import Writer, open_model, packaged

sys.path.insert(0, str(Path(__file__).parents[1]))
from ggufs import widened, write_as  # noqa: E402
from llm import CONTEXT, Job, Llama, cache_of  # noqa: E402

PROMPTS = (
    "What is the capital of France?",
    "Explain in one paragraph why the sky is blue.",
    "Write a short poem about the sea.",
    "List five uses of a paper clip.",
    "How do I boil an egg?",
    "Write a Python function that reverses a list.",
    "Who was Ada Lovelace?",
    "Translate 'good morning' into three languages.",
    "What is the difference between a frog and a toad?",
    "Tell me a story about a robot who learns to paint.",
)
GAP = 1e-3  # between eager's two best logits: below, rounding decides
PIECE, TOKENS = 500, 2000


def greedy(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smollm2.f32.gguf"
        write_as(path, packaged(), "f32")
        model = widened(path)
        ours = lower_llm(model, CONTEXT)
        writer = Writer.of(open_model("smollm2"))  # for its tokenizer data
        same = 0
        for i, prompt in enumerate(PROMPTS):
            writer.messages = [{"role": "user", "content": prompt}]
            tokens = writer.tokenizer.encode(writer.render(), add_special_tokens=False).ids
            got = list(continued(ours, tokens, count))
            with torch.inference_mode():
                given = torch.tensor([tokens])
                out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, eos_token_id=None,
                                     max_new_tokens=count, pad_token_id=0)  # fmt: skip
            want = out[0, len(tokens) :].tolist()
            first = next((k for k, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), count)
            note = ""
            if first < count:
                with torch.inference_mode():
                    top = model(torch.tensor([tokens + want[:first]]), logits_to_keep=1).logits[0, -1].topk(2)
                gap = float(top.values[0] - top.values[1])
                note = f"; there eager's two best differ by {gap:.1e}"
                if gap > GAP:
                    sys.exit(f"prompt {i}: token {first} differs{note}")
            same += first == count
            print(f"prompt {i}: {first} of {count} tokens are transformers'{note}", flush=True)
        print(f"{same} of {len(PROMPTS)} answers are the same to the last token")


def continued(model: LanguageModel, tokens: list[int], count: int) -> Iterator[int]:
    model.reset()
    for _ in range(count):
        token = int(model(tokens)[0].argmax())
        yield token
        tokens = [token]


# ---------------------------------------------------------------- likelihood
def ours_rows(model: LanguageModel, tokens: list[int], at_once: int = LOGITS) -> numpy.ndarray:
    """Logits after each token."""
    model.reset()
    parts = [tokens[i : i + at_once] for i in range(0, len(tokens), at_once)]
    return numpy.concatenate([model(p, rows=range(len(p))).numpy() for p in parts])


def llama_rows(llama: Llama, tokens: list[int], at_once: int) -> numpy.ndarray:
    lib, rows = llama.lib, []
    lib.llama_memory_clear(lib.llama_get_memory(llama.context), True)
    for start in range(0, len(tokens), at_once):
        part = tokens[start : start + at_once]
        batch = lib.llama_batch_init(len(part), 0, 1)
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, True
            batch.seq_id[i][0] = 0
        assert lib.llama_decode(llama.context, batch) == 0
        all_rows = numpy.ctypeslib.as_array(lib.llama_get_logits(llama.context), (len(part), llama.words))
        rows.append(all_rows.copy())
        lib.llama_batch_free(batch)
    return numpy.concatenate(rows)


def mean_likelihood(rows: list[numpy.ndarray], pieces: list[list[int]]) -> float:
    """Mean log-likelihood of a token after those before it in its piece."""
    found = []
    for logits, tokens in zip(rows, pieces, strict=True):
        chosen = torch.from_numpy(logits[:-1]).double().log_softmax(1)
        found.append(chosen.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)))
    return float(torch.cat(found).mean())


def compare(name: str, a: list[numpy.ndarray], b: list[numpy.ndarray]) -> str:
    d = numpy.concatenate([abs(x - y).ravel() for x, y in zip(a, b, strict=True)])
    agree = numpy.mean(numpy.concatenate([x.argmax(1) == y.argmax(1) for x, y in zip(a, b, strict=True)]))
    gap = f"logits differ by {d.mean():.2e} in the mean, {d.max():.2e} at most"
    return f"  {name}: {gap}; the best token is the same in {agree:.2%}"


def likelihood() -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = Writer.of(open_model("smollm2")).tokenizer.encode(text, add_special_tokens=False).ids[:TOKENS]
    assert len(tokens) == TOKENS, len(tokens)
    pieces = [tokens[i : i + PIECE] for i in range(0, TOKENS, PIECE)]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("f32", "q8_0", "q4_1", "q4_0"):
            job = Job("llama", "smollm2", dtype, Path(folder))
            if dtype == "q4_1":
                job.gguf.symlink_to(packaged())
            else:
                write_as(job.gguf, packaged(), dtype)
            found = gguf.read(job.gguf)
            model = lower_llm(found.model, CONTEXT, weights=found.weights, cache=cache_of(job))
            ours = [ours_rows(model, p) for p in pieces]
            llama = Llama(job)
            theirs = [llama_rows(llama, p, PIECE) for p in pieces]
            single = [llama_rows(llama, p, 1) for p in pieces]
            a, b = mean_likelihood(ours, pieces), mean_likelihood(theirs, pieces)
            print(f"{dtype}: mean log-likelihood {a:.5f}, llama.cpp {b:.5f}: differs by {abs(a / b - 1):.3%}")
            print(compare("ours and llama.cpp", ours, theirs))
            print(compare("llama.cpp by token and by piece", single, theirs))
            print(compare("ours by token and by piece", [ours_rows(model, p, 1) for p in pieces], ours), flush=True)


def main() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("greedy", "likelihood"))
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    return greedy(args.tokens) if args.what == "greedy" else likelihood()


if __name__ == "__main__":
    main()
