"""Language models: a decoder of transformers, lowered once for every prompt length, with keys and values as state.

One file serves prefill and decode: it takes any number of tokens and the position of the first. Attention goes through
`keepdim::cached_attention`, so keys and values live in the delegate, and only the filled part is read.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from ..artifact import pte
from ..artifact.external_weights import MappedFile
from ..compat.lock import one_at_a_time
from ..compat.transformers import fixed_ropes, layer_buffers, replace_attention
from ..errors import fail
from ..files import new_folder, remove_with
from ..ir.quant import Quantised, fits, new_state, quantise
from ..ir.torch_ops import cached_attention
from ..module import Module, load
from ..settings import check_engine, check_precision
from ..shapes.blocks import STORED
from ..shapes.contract import dtype_name

if TYPE_CHECKING:  # exporting needs all of exir; running a file does not
    from ..capture.export import Captured

LEAST = 8  # tokens of a context: the example has 7
LOGITS = 128  # rows of logits that one call may ask for
COMPARED = 32  # elements of inputs at most where a decoder is compared with eager: long prompts take minutes there
CACHES = ("f32", "f16", "q8_0")
TEXT_METHOD = "keepdim_text"  # of the file, which returns the tokenizer data
NAME = "keepdim"  # of our attention among those of transformers
CACHE_NAMES = ("keepdim_keys", "keepdim_values")  # of the buffers of a layer


class Hold:
    """A thread's use of a model: for a call, or for as long as a stream is open."""

    def __init__(self) -> None:
        self.thread, self.process = threading.get_ident(), os.getpid()
        self.granted = False  # until it is known that no other thread was first

    def resume(self) -> None:
        """The stream continues, possibly in another thread."""
        self.thread = threading.get_ident()


class LanguageModel:
    """A lowered decoder with the sequence it has seen so far.

    model = keepdim.lower_llm(LlamaForCausalLM(config).eval(), max_context=2048)
    logits = model(tokens)          # of the token after the last one
    model.rewind(2)                 # as if the last two had not been given

    It has one sequence, so one thread uses it at a time; another is refused. Load the file once per thread.
    """

    def __init__(self, module: Module):
        if not isinstance(module, Module):
            fail("generate", "model", f"is a {type(module).__name__}", "Load a file: LanguageModel.load(path)")
        names = [s.name for s in module.contract.inputs]
        if names != ["tokens", "position", "rows"]:
            fail("load", str(module.path), f"is not a language model (it takes {', '.join(names)})")
        top = module.contract.inputs[0].dims[1].bounds[1]
        assert top is not None
        self.module, self.max_context = module, top
        self.tokens: list[int] = []  # the sequence: what the caches hold up to here
        self.text: str = pte.text_of(module._file, TEXT_METHOD)  # what `lower_llm` was given
        self.notes: list[str] = []  # weights that are stored in another dtype than was asked for
        self._holds: list[Hold] = []  # in the order in which they were taken

    @property
    def position(self) -> int:
        """How many tokens the model has seen."""
        return len(self.tokens)

    @classmethod
    def load(cls, path: str | Path, weights: str | Path | None = None, *, verify: bool = False) -> LanguageModel:
        """From a file that `save` wrote; `weights` and `verify` as in `keepdim.load`."""
        return cls(load(path, weights, verify=verify))

    def save(self, path: str | Path) -> None:
        """Write the file; it contains neither the sequence nor weights that are mapped from a GGUF file, which has to
        be in the same folder."""
        self.module.save(path)

    def __reduce_ex__(self, _: object) -> NoReturn:
        fail("save", "model", "cannot be copied or pickled: it has an open file and a runtime",
             "Write it with save(path), and load that where it is needed")  # fmt: skip

    def __call__(self, tokens: Sequence[int] | torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits f32 [rows, vocabulary] after these tokens, which are added to the sequence.

        Only the rows asked for are computed: by default the last one, that of the next token.
        """
        given = _integers(tokens, "tokens", "Give at least one: the beginning of a text")
        with self.hold():
            return self._read(given, rows)

    def _read(self, given: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        count = len(given)
        if self.position + count > self.max_context:
            fail("generate", "tokens", f"{count} more at position {self.position} are beyond the context of "
                 f"{self.max_context}", "Lower with a larger max_context, or rewind")  # fmt: skip
        wanted = _integers([count - 1] if rows is None else rows, "rows", "Leave them out for the last one")
        out = self.module(given.unsqueeze(0), torch.tensor([self.position]), wanted)
        self.tokens += given.tolist()
        return out[0]

    def reset(self) -> None:
        """Forget the sequence."""
        with self.hold():
            self.tokens.clear()

    def rewind(self, count: int) -> None:
        """Take the last tokens back."""
        with self.hold():
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.position:
                fail("generate", "rewind", f"{count!r} is out of range 0..{self.position}")
            del self.tokens[self.position - count :]

    @contextlib.contextmanager
    def hold(self) -> Iterator[Hold]:
        """This thread uses the model until the block ends: what another thread does with it is refused.

        Without a lock, since a stream that is dropped ends its block wherever Python collects it: appending to a list
        is atomic, and who came first has the model.
        """
        mine = Hold()
        self._holds.append(mine)
        try:
            others = [h for h in self._users_before(mine) if h.thread != mine.thread]
            if any(h.process != mine.process for h in others):
                fail("fork", "model", "another thread was using it when this process was forked",
                     "Load the file in the new process, or start processes with spawn")  # fmt: skip
            if others:
                fail("generate", "model", "is in use by another thread, or by a stream that is open in one",
                     "Load the file once per thread")  # fmt: skip
            mine.granted = True
            yield mine
        finally:
            self._holds.remove(mine)

    def _users_before(self, mine: Hold) -> list[Hold]:
        """The earlier holds that were granted or will be; those that are about to be refused are ignored."""
        users: list[Hold] = []
        for hold in itertools.takewhile(lambda h: h is not mine, list(self._holds)):
            if hold.granted or all(u.thread == hold.thread for u in users):
                users.append(hold)
        return users


def _integers(values: object, subject: str, remedy: str) -> torch.Tensor:
    """As i64 [n]; one sequence of integers and nothing else."""
    try:
        given = torch.as_tensor(values)
        given = given.to_dense() if given.layout != torch.strided else given
    except (TypeError, ValueError, RuntimeError) as e:
        fail("generate", subject, f"are not a list of integers ({e})", cause=e)
    if given.numel() == 0:
        fail("generate", subject, "empty", remedy)
    if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        fail("generate", subject, f"are {str(given.dtype).removeprefix('torch.')}, expected integers")
    if given.dim() > 1 and given.shape != (1, given.numel()):
        fail(
            "generate",
            subject,
            f"have the shape {list(given.shape)}, and a model has one sequence",
            "Pass one sequence at a time",
        )
    return given.to(torch.int64).reshape(-1)


@one_at_a_time
def lower_llm(
    model: torch.nn.Module,
    max_context: int = 2048,
    *,
    cache: str = "f32",
    quant: str | None = None,
    weights: Mapping[str, Quantised] | None = None,
    mapped: MappedFile | None = None,
    text: str = "",
    engine: str = "ggml",
    precision: str = "f32",
) -> LanguageModel:
    """Lower a decoder of transformers (`...ForCausalLM`) for 1..max_context tokens.

    `cache` is the dtype in which keys and values are kept: f32, f16 or q8_0. `quant` is that of the weights of linear
    layers and embeddings: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, f16 or bf16; None leaves
    them as they are. `weights` are quantised already, by the name of the parameter, whose own data is then not read.
    Those stored in the file `mapped` stay there, and loading maps them from it. `text` is stored in the file with the
    model: its tokenizer, as `keepdim.generate` writes it. `engine` and `precision` as in `keepdim.lower`.
    """
    check_engine(engine)
    check_precision(precision)
    from ..frontend.ops import Unsupported
    from ..lowering.pipeline import check_options, lower_single

    check_options(engine, precision)
    _check_settings(quant, weights, text)
    wrapped = _wrapped(model, max_context, cache)
    captured = _captured(wrapped, values=not weights)
    stored, notes = _quantised(wrapped, quant) if quant else ({}, [])
    stored |= {f"model.{name}": w for name, w in (weights or {}).items()}
    folder = new_folder()
    try:
        path = folder / "model.pte"
        try:
            made = lower_single(captured, path, engine, stored, {TEXT_METHOD: text}, mapped, precision)
        except Unsupported as e:
            fail("lower", type(model).__name__, f"does not go into one delegate ({e})", cause=e)
        lowered = LanguageModel.load(path, mapped.path if mapped is not None else None)
        lowered.notes, lowered.module.report = notes, made.report
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    remove_with(lowered.module, folder)
    return lowered


def _check_settings(quant: object, weights: object, text: object) -> None:
    if quant is not None and (not isinstance(quant, str) or quant not in STORED):
        fail("lower", f"quant {quant!r:.80}", f"is not one of {', '.join(STORED)}")
    if weights is not None and not isinstance(weights, Mapping):
        fail("lower", "weights", f"is a {type(weights).__name__}", "Give a dict: name of a parameter -> Quantised")
    if not isinstance(text, str):
        fail("lower", "text", f"is a {type(text).__name__}, expected a str", 'Give what Text.to_json() returns, or ""')
    try:
        text.encode()
    except UnicodeEncodeError as e:
        fail("lower", "text", f"is not valid Unicode ({e.reason} at {e.start})", cause=e)


def _check_interface(model: Any) -> None:
    """Refuse what is not a decoder, or one that takes neither the positions of tokens nor which logits to compute."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation") or not hasattr(model, "set_attn_implementation"):
        fail("lower", name, "is not a model of transformers", "Give a ...ForCausalLM")
    known = inspect.signature(model.forward).parameters
    for parameter in ("position_ids", "logits_to_keep"):
        if parameter not in known:
            fail("lower", name, f"its forward does not take {parameter!r}", "Give a decoder: a ...ForCausalLM")
    if others := {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}:
        fail("lower", name, f"layers of the kind {sorted(others)[0]!r} are not handled")
    if model.training:
        fail("lower", name, "is in training mode", "Call eval() on it")
    for key, p in model.named_parameters():
        if p.dtype != torch.float32:
            dtype = dtype_name(p.dtype, key)
            fail("lower", name, f"its parameter {key!r} is {dtype}, expected f32",
                 f"Call float() on it; quant={dtype!r} keeps weights so in the file")  # fmt: skip


@one_at_a_time
def export_llm(model: torch.nn.Module, max_context: int = 2048, *, cache: str = "f32") -> Captured:
    """A decoder as `lower_llm` takes it, before it is lowered: what `to_stablehlo` makes StableHLO of.

    It takes tokens [1, seq_len], position [1] and rows; keys and values of every layer are states.
    """
    return _captured(_wrapped(model, max_context, cache))


def _wrapped(model: Any, max_context: int, cache: str) -> _Decoder:
    if cache not in CACHES:
        fail("lower", f"cache {cache!r}", f"is not one of {', '.join(CACHES)}")
    _check_interface(model)
    limit = getattr(model.config, "max_position_embeddings", max_context)
    if not isinstance(max_context, int) or not LEAST <= max_context <= limit:
        fail("lower", "max_context", f"{max_context!r:.80} is out of range {LEAST}..{limit} of the model")
    return _Decoder(model, max_context, cache)


def _captured(wrapped: _Decoder, values: bool = True) -> Captured:
    """The decoder through the capture of every model. `values`: whether its parameters hold data; those of a GGUF file
    do not, and then sizes alone are compared with eager."""
    from ..capture.export import PLAIN, Checks, capture

    most = wrapped.context
    seq, rows = Dim("seq_len", min=1, max=most), Dim("rows", min=1, max=min(LOGITS, most))
    examples = (torch.zeros(1, LEAST - 1, dtype=torch.int64), torch.tensor([0]), torch.tensor([0, 1, 2]))
    shapes = {"tokens": {1: seq}, "position": None, "rows": {0: rows}}
    with wrapped.prepared():  # transformers' attention compares sizes with 1, which size-oblivious export refuses
        return capture(wrapped, examples, dynamic_shapes=shapes, modes=(PLAIN,), checks=Checks(COMPARED, values))


def _quantised(model: torch.nn.Module, dtype: str) -> tuple[dict[str, Quantised], list[str]]:
    """Weights of layers by name, and a note for each whose rows are not whole blocks of the dtype."""
    weights: dict[str, Quantised] = {}
    notes: list[str] = []
    done: dict[int, Quantised | None] = {}  # a tied weight has several names
    for name, layer in model.named_modules():
        if not isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
            continue
        w, full = layer.weight, f"{name}.weight"
        if id(w) not in done:
            used = next((d for d in (dtype, "q8_0") if fits(tuple(w.shape), d)), None)
            if used != dtype:
                notes.append(f"{full} {list(w.shape)}: wanted {dtype}, used {used or 'f32'}")
            done[id(w)] = quantise(w, used) if used else None
        q = done[id(w)]
        if q is not None:
            weights[full] = q
    return weights, notes


class _Call:
    """What attention needs from the call that is being traced, and transformers does not pass on."""

    position: torch.Tensor

    def __deepcopy__(self, _: object) -> _Call:
        return self  # copies of the decoder share the one attention that is registered with transformers


class _Decoder(torch.nn.Module):
    """The model as it is exported: tokens [1, seq_len], position [1] and rows → logits [1, rows, vocabulary]."""

    def __init__(self, model: Any, max_context: int, dtype: str):
        super().__init__()
        self.model, self.context, self._dtype = model, max_context, dtype
        self._call = _Call()
        self._layers: dict[torch.nn.Module, list[torch.Size]] = {}  # the shapes of keys and values of each

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self._call.position = position
        places = (position + torch.arange(tokens.shape[1])).unsqueeze(0)
        return self.model(input_ids=tokens, position_ids=places, use_cache=False, logits_to_keep=rows).logits

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """In this block the model's attention is ours, its rope does not change, and every layer has its caches."""
        with (
            replace_attention(self.model, NAME, self._attend),
            fixed_ropes(self._changing_ropes()),
            layer_buffers(self._new_caches()),
        ):
            yield

    def _changing_ropes(self) -> list[object]:
        """Those whose frequencies change with the length of the sequence: keys in a cache cannot be rotated again, so
        the context has to be short enough for one set of them."""
        found = []
        for rope in self.model.modules():
            kind = getattr(rope, "rope_type", None)
            if isinstance(kind, dict) and {"dynamic", "longrope"} & {*kind.values()}:
                fail("lower", type(rope).__name__, f"rope of kinds {', '.join(kind.values())} is not handled")
            if kind not in ("dynamic", "longrope"):
                continue
            limits = {"dynamic": rope.original_max_seq_len}
            limit = limits.get(kind) or rope.config.rope_parameters["original_max_position_embeddings"]
            if self.context > limit:
                fail("lower", "max_context", f"{self.context} is more than {limit}, where the model's rope ({kind}) "
                     "rotates all tokens again", f"Lower with at most {limit}")  # fmt: skip
            found.append(rope)
        return found

    def _new_caches(self) -> dict[torch.nn.Module, dict[str, torch.Tensor]]:
        """Buffers for keys and values of every layer that calls our attention."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            self.forward(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([0]), torch.tensor([0]))
        if (count := self.model.config.num_hidden_layers) != len(self._layers):
            fail("lower", type(self.model).__name__, f"{len(self._layers)} of its {count} layers call the attention "
                 "that transformers lets us replace; the others would see nothing of earlier calls")  # fmt: skip
        return {
            layer: {
                name: new_state((batch, heads, self.context, width), self._dtype)
                for name, (batch, heads, _, width) in zip(CACHE_NAMES, shapes, strict=True)
            }
            for layer, shapes in self._layers.items()
        }

    def _attend(self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attention_mask: torch.Tensor | None, scaling: float | None = None, sliding_window: int | None = None,
                **more: object) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attention as transformers calls it."""
        about = f"attention of {type(layer).__name__}"
        for name in ("softcap", "s_aux", "head_mask"):
            if more.get(name) is not None:
                fail("lower", about, f"its {name} is not handled")
        if attention_mask is not None:
            fail("lower", about, "a custom mask is not handled")
        if not getattr(layer, "is_causal", True):
            fail("lower", about, "it is not causal, as a decoder's has to be")
        if not hasattr(layer, CACHE_NAMES[0]):
            if layer in self._layers:
                fail("lower", about, "a layer that is called twice is not handled")
            self._layers[layer] = [key.shape, value.shape]
            return query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2), None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        keys, values = (getattr(layer, name) for name in CACHE_NAMES)
        out = cached_attention(query, key, value, keys, values, self._call.position, scale, sliding_window or 0)
        return out.transpose(1, 2), None
