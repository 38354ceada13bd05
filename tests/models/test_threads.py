"""One language model and several threads: every answer is right or refused, and a stream never goes on wrongly."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepdim import KeepdimError
from keepdim.models.decoder import Hold, LanguageModel
from keepdim.models.generate import Stream, Writer, open_model

transformers = pytest.importorskip("transformers")
IN_USE = r"^\[generate\] model: is in use by another thread, or by a stream .* Load the file once per thread\.$"
OVERTAKEN = r"^\[generate\] stream: cannot go on: .* Finish a stream before the next, or load the file once for each\.$"
PROMPT, OTHER = "w1 w2 w3 w4 w5 w6", "w60 w50 w40"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small model of random weights, lowered with its tokenizer and a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=96, max_position_embeddings=256, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} w9 {% endfor %}"
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        open_model(folder, max_context=256).save(folder / "model.pte")
        yield folder / "model.pte"


@pytest.fixture
def model(path: Path) -> LanguageModel:
    return LanguageModel.load(path)


@pytest.fixture(scope="module")
def right(path: Path) -> Callable[[str], str]:
    """The answer of a model that nobody else uses."""
    return lambda prompt: "".join(Writer.of(LanguageModel.load(path)).complete(prompt, 40))


def in_thread(work: Callable[[], Any]) -> Any:
    """What it returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.mark.parametrize("how", ["writers", "one writer", "chats", "calls"])
def test_eight_threads_ask_one_model(how: str, path: Path, model: LanguageModel, right: Callable[[str], str]) -> None:
    """Every answer is right or a sentence, at least one is right, and then it works as before."""
    shared = Writer.of(model)
    writers = [shared if how in ("one writer", "chats") else Writer.of(model) for _ in range(8)]
    logits = LanguageModel.load(path)([1, 2, 3])
    barrier, results = threading.Barrier(8), []

    def ask(writer: Writer) -> Any:
        if how == "calls":
            with model.hold():
                model.reset()
                return torch.allclose(model([1, 2, 3]), logits)
        if how == "chats":
            return bool("".join(writer.chat(PROMPT, 40)))
        return "".join(writer.complete(PROMPT, 40)) == right(PROMPT)

    def work(writer: Writer) -> None:
        barrier.wait()
        try:
            results.append(ask(writer))
        except KeepdimError as e:
            results.append(str(e))
        except BaseException as e:
            results.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(w,)) for w in writers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    refused = [r for r in results if isinstance(r, str)]
    assert len(results) == 8 and all("is in use by another thread" in r for r in refused), results
    assert set(results) - set(refused) == {True}, results  # so at least one was right
    replay = Writer.of(LanguageModel.load(path))  # the dialogue of one writer, in one thread
    for asked in shared.messages[::2]:
        "".join(replay.chat(asked["content"], 40))
    assert shared.messages == replay.messages and len(shared.messages) == 2 * results.count(True) * (how == "chats")
    assert "".join(Writer.of(model).complete(PROMPT, 40)) == right(PROMPT)


def test_an_open_stream_keeps_others_out(model: LanguageModel, right: Callable[[str], str]) -> None:
    """Every use in another thread is refused until it ends; the stream itself is not disturbed."""
    writer = Writer.of(model)
    stream = writer.complete(PROMPT, 40)
    text = next(stream)
    for use in (
        lambda: model([1]),
        model.reset,
        lambda: model.rewind(1),
        lambda: next(writer.complete(OTHER, 3)),
        lambda: next(Writer.of(model).chat(OTHER, 3)),
    ):
        with pytest.raises(KeepdimError, match=IN_USE):
            in_thread(use)
    assert not writer.messages
    assert text + "".join(stream) == right(PROMPT)
    assert in_thread(lambda: "".join(writer.complete(OTHER, 40))) == right(OTHER)


def test_a_refused_thread_does_not_disturb_the_one_that_has_the_model(model: LanguageModel) -> None:
    """Whoever asks while the model is in use is on its list for an instant; the user's next call must not see it."""
    want = model([1, 2, 3])
    model.reset()
    with model.hold():
        asking = Hold()
        asking.thread = -1  # a thread that is about to be refused
        model._holds.append(asking)
        assert torch.equal(model([1, 2, 3]), want)
        with pytest.raises(KeepdimError, match=IN_USE):
            in_thread(lambda: model([1]))
        model._holds.remove(asking)


def test_arguments_of_an_answer(model: LanguageModel) -> None:
    """Before a stream begins."""
    writer = Writer.of(model)
    for most in (0, -3, "5", 2.5, True):
        for ask in (writer.complete, writer.chat):
            with pytest.raises(KeepdimError, match=r"^\[generate\] max_tokens: .* is not an integer of at least 1"):
                ask(PROMPT, most)
    for text in (5, None, b"x", "\ud800"):
        for ask in (writer.complete, writer.chat):
            with pytest.raises(KeepdimError, match=r"^\[generate\] (prompt|message): is (a|not valid Unicode) "):
                ask(text)


def test_one_stream_in_two_threads(model: LanguageModel) -> None:
    """Who asks while the other waits for the next piece is refused."""
    inside, leave = threading.Event(), threading.Event()

    def slow() -> Any:
        yield "a"
        inside.set()
        leave.wait()
        yield "b"

    stream = Stream(slow())
    assert next(stream) == "a"
    thread = threading.Thread(target=lambda: next(stream))
    thread.start()
    inside.wait()
    with pytest.raises(KeepdimError, match=r"^\[generate\] stream: another thread is taking its next piece"):
        next(stream)
    leave.set()
    thread.join()


def test_a_model_whose_thread_is_not_in_a_fork(model: LanguageModel) -> None:
    """The sentence is that of a fork."""
    held = Hold()
    held.thread, held.process, held.granted = -1, -1, True
    model._holds.append(held)
    with pytest.raises(
        KeepdimError, match=r"^\[fork\] model: another thread was using it when this process was forked"
    ):
        model([1])


def end_by_closing(stream: Iterator[str]) -> None:
    stream.close()  # type: ignore[attr-defined]


def end_by_finishing(stream: Iterator[str]) -> None:
    list(stream)


def end_by_error(stream: Iterator[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError)  # type: ignore[attr-defined]


def end_by_dropping(stream: Iterator[str]) -> None:
    pass


@pytest.mark.parametrize("end", [end_by_closing, end_by_finishing, end_by_error, end_by_dropping])
@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_a_stream_that_ends_releases(end: Any, kind: str, model: LanguageModel, right: Callable[[str], str]) -> None:
    """Finished, closed, failed or collected; one that was never started holds nothing."""
    ask = getattr(Writer.of(model), kind)
    never = ask(PROMPT, 9)
    stream = ask(PROMPT, 9)
    next(stream)
    end(stream)
    del stream
    gc.collect()
    assert in_thread(lambda: "".join(Writer.of(model).complete(OTHER, 40))) == right(OTHER)
    del never


def test_an_overtaken_stream_is_refused(model: LanguageModel, right: Callable[[str], str]) -> None:
    """In the same thread something new may begin; the older stream does not go on with its tokens."""
    writer = Writer.of(model)
    old = writer.complete(PROMPT, 40)
    next(old)
    assert "".join(writer.complete(OTHER, 40)) == right(OTHER)
    with pytest.raises(KeepdimError, match=OVERTAKEN):
        next(old)
    for change in (model.reset, lambda: model.rewind(1), lambda: model([5])):
        old = writer.complete(PROMPT, 40)
        next(old)
        change()
        with pytest.raises(KeepdimError, match=OVERTAKEN):
            next(old)
    first, second = writer.complete(PROMPT, 40), writer.complete(OTHER, 40)
    next(first)
    text = next(second)
    with pytest.raises(KeepdimError, match=OVERTAKEN):
        next(first)
    assert text + "".join(second) == right(OTHER)


def test_an_overtaken_chat_keeps_its_order(model: LanguageModel) -> None:
    """A message whose answer failed is gone; the other chat has its own."""
    writer = Writer.of(model)
    old = writer.chat(PROMPT, 9)
    next(old)
    answer = "".join(writer.chat(OTHER, 9))
    with pytest.raises(KeepdimError, match=OVERTAKEN):
        next(old)
    assert writer.messages == [{"role": "user", "content": OTHER}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_a_stream_may_move_between_threads(kind: str, path: Path, model: LanguageModel) -> None:
    """As web servers do: each piece is taken in another thread, one after the other."""
    want = list(getattr(Writer.of(LanguageModel.load(path)), kind)(PROMPT, 12))
    stream = getattr(Writer.of(model), kind)(PROMPT, 12)
    assert [in_thread(lambda: next(stream)) for _ in want] == want
    with pytest.raises(StopIteration):
        next(stream)
    assert model([1]).shape == (1, 96)
