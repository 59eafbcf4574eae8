"""The compiled step against the torch decoder, its slow twin; and what only it can do: a row's numbers do not depend on the
batch."""

import dataclasses
import random
import subprocess
import sys

import gguf
import pytest
import torch
import torch.nn.functional as F

from livedraft.config import EngineConfig
from livedraft.device import ExecutionPath
from livedraft.drafts.weights import draft_from_target, serving_weights
from livedraft.models import load
from livedraft.models import native as room
from livedraft.models.blocks import blocks_of, joined
from livedraft.models.decoder import Decoder, GatedLinear, Linear
from livedraft.models.load import build_weights
from livedraft.models.native import NativeDecoder, fitted, make_decoder, quantized, unavailable_reason, with_kernels
from livedraft.records import UserError
from livedraft.speculation.draft_model import DraftModel
from tests import tiny
from tests.tiny import FLOAT32, random_model, request, serve

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no kernels: {unavailable_reason()}")

COMPILED = ExecutionPath(device=torch.device("cpu"), dtype=torch.bfloat16, is_prepacked=False, is_compiled=True)
BUILD = room._library.__wrapped__
TORCH = dataclasses.replace(COMPILED, is_compiled=False)


@pytest.fixture(autouse=True, params=["auto", "avx512", "avx2"])
def instructions(request, monkeypatch):
    """What this CPU has, what it has without tiles, and what nearly every other has."""
    if request.param == "auto":
        return
    if request.param == "avx512" and " amx_bf16" not in room._cpu_name():
        pytest.skip("this CPU has no AMX: the same kernels")
    with monkeypatch.context() as patched:
        patched.setenv("LIVEDRAFT_KERNELS", request.param)
        library = BUILD()
    assert not isinstance(library, str), library
    if request.param == "avx2" and library.livedraft_super_block() == room._super_block():
        pytest.skip("this CPU has AVX2 and no more: nothing else to test")
    monkeypatch.setattr(room, "_library", lambda: library)


ONCE = pytest.mark.parametrize("instructions", ["auto"], indirect=True)


def shaped(config, **fields):
    """Large enough for the kernels, with odd corners: 3 query heads a key-value head, a vocabulary of no round size."""
    shape = {
        "width": 96,
        "feed_forward_width": 160,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_width": 32,
        "vocabulary_size": 203,
    }
    return dataclasses.replace(config, **{**shape, **fields})


FAMILIES = {name: shaped(config) for name, config in tiny.FAMILIES.items()} | {
    f"head width {width}": shaped(tiny.TINY, head_width=width, num_heads=2, num_kv_heads=1) for width in (64, 96, 128)
}


def model_of(config, seed=0):
    """Weights of a spread that keeps logits apart."""
    model = random_model(config, seed)
    return dataclasses.replace(model, tensors={n: t if "norm" in n else 0.3 * t for n, t in model.tensors.items()})


def decoder(model, path, num_slots=6, max_length=96):
    weights = build_weights(
        dataclasses.replace(model, tensors={n: t.to(path.dtype) for n, t in model.tensors.items()}), path
    )
    return make_decoder(model.config, weights, path, num_slots=num_slots, max_length=max_length)


def prefill(made, tokens, slot=0):
    rows = list(range(len(tokens)))
    return made.forward(tokens, rows, [slot] * len(tokens), rows).logits_RV


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_torchs_bf16(family):
    model = model_of(FAMILIES[family])
    tokens = random.Random(0).choices(range(203), k=70)
    exact = prefill(decoder(model, FLOAT32), tokens)
    # The same rounded weights in all three: what is compared is the arithmetic.
    rounded = dataclasses.replace(model, tensors={n: t.bfloat16().float() for n, t in model.tensors.items()})
    exact = prefill(decoder(rounded, FLOAT32), tokens)
    compiled = decoder(model, COMPILED)
    assert type(compiled) is NativeDecoder
    own = (prefill(compiled, tokens) - exact).abs().mean()
    torchs = (prefill(decoder(model, TORCH), tokens) - exact).abs().mean()
    assert own < 1.2 * torchs, (own, torchs)
    assert own < 0.02 * exact.abs().mean()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_rows_numbers_do_not_depend_on_the_batch_nor_on_the_threads(family):
    """Bit for bit: alone, token by token; and in ragged passes of several slots, with one thread and with two."""
    model, chance = model_of(FAMILIES[family]), random.Random(1)
    texts = [chance.choices(range(203), k=40) for _ in range(6)]
    alone = decoder(model, COMPILED)
    expected = [
        torch.cat([alone.forward([token], [n], [slot], [0]).logits_RV for n, token in enumerate(text)])
        for slot, text in enumerate(texts)
    ]
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            together = decoder(model, COMPILED)
            done = [0] * 6
            while min(done) < 40:
                tokens, positions, slots, wanted = [], [], [], []
                for slot in range(6):
                    count = min(chance.choice([0, 1, 1, 2, 5, 9, 17]), 40 - done[slot])
                    wanted += [(slot, done[slot] + i) for i in range(count)]
                    tokens += texts[slot][done[slot] : done[slot] + count]
                    positions += range(done[slot], done[slot] + count)
                    slots += [slot] * count
                    done[slot] += count
                if tokens:
                    logits = together.forward(tokens, positions, slots, list(range(len(tokens)))).logits_RV
                    for row, (slot, position) in enumerate(wanted):
                        assert torch.equal(logits[row], expected[slot][position])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("head_width", "num_heads"), [(32, 6), (64, 2), (96, 14), (128, 8)])
def test_a_long_context_is_the_same_in_pieces_of_any_size(head_width, num_heads):
    """Stretches of the cache are put together: right, and bit for bit whatever the pass holds beside a row."""
    model = model_of(
        shaped(tiny.TINY, head_width=head_width, num_heads=num_heads, num_kv_heads=2, num_layers=2, max_positions=1024)
    )
    chance = random.Random(head_width)
    tokens = chance.choices(range(203), k=600)
    rounded = dataclasses.replace(model, tensors={n: t.bfloat16().float() for n, t in model.tensors.items()})
    exact = prefill(decoder(rounded, FLOAT32, max_length=600), tokens)
    whole = prefill(decoder(model, COMPILED, max_length=600), tokens)
    torchs = (prefill(decoder(model, TORCH, max_length=600), tokens) - exact).abs().mean(-1)
    own = (whole - exact).abs().mean(-1)
    assert own[:250].mean() < 1.2 * torchs[:250].mean()
    assert own[520:].mean() < 1.2 * torchs[520:].mean()
    made, done = decoder(model, COMPILED, max_length=600), 0
    while done < 600:
        near_an_end = any(-4 < done - end < 3 for end in (256, 512, 600))
        rows = list(range(done, min(done + (1 if near_an_end else chance.choice([1, 3, 8, 60])), 600)))
        logits = made.forward([tokens[row] for row in rows], rows, [0] * len(rows), list(range(len(rows)))).logits_RV
        assert torch.equal(logits, whole[rows]), done
        done += len(rows)


def test_slots_are_rewound_copied_and_cleared_as_the_torch_decoders():
    model = model_of(FAMILIES["llama"])
    made = decoder(model, COMPILED)
    text = list(range(30))
    whole = prefill(made, text)
    made.forward([7, 8, 9], [20, 21, 22], [0, 0, 0], [])  # rejected tokens
    again = made.forward(text[20:], list(range(20, 30)), [0] * 10, list(range(10))).logits_RV
    assert torch.equal(again, whole[20:])
    made.copy_slot(0, 3, 20)
    copied = made.forward(text[20:], list(range(20, 30)), [3] * 10, list(range(10))).logits_RV
    assert torch.equal(copied, whole[20:])
    made.clear_slot(3)
    assert not made.cache.keys[0][3].any()
    assert made.forward([1], [30], [0], []).logits_RV.shape == (0, 203)
    with pytest.raises(AssertionError):
        made.forward([203], [0], [0], [0])
    with pytest.raises(AssertionError):
        made.forward([1], [96], [0], [0])


@pytest.mark.parametrize("num_tokens", [1, 16, 63, 64, 65, 150])
def test_a_trimmed_head_is_those_rows_of_the_whole(num_tokens):
    model = model_of(FAMILIES["llama"])
    ids = sorted(random.Random(num_tokens).sample(range(203), num_tokens))
    draft = draft_from_target(model, num_layers=model.config.num_layers, token_ids=ids)
    target = decoder(model, COMPILED)
    weights = serving_weights(draft, target.weights, COMPILED, model.config)
    trimmed = make_decoder(model.config, weights, COMPILED, num_slots=2, max_length=96)
    tokens = [5, 9, 200, 3]
    assert torch.equal(prefill(trimmed, tokens), prefill(target, tokens)[:, ids])


def small_engine(model, k, noise, num_slots=8):
    target = decoder(model, COMPILED, num_slots=num_slots)
    if k is None:
        draft = None
    else:
        weights = draft_from_target(model, num_layers=2, token_ids=list(range(180)))
        generator = torch.Generator().manual_seed(1)
        for tensor in weights.tensors.values():
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        runtime = make_decoder(
            model.config, serving_weights(weights, target.weights, COMPILED, model.config), COMPILED,
            num_slots=num_slots, max_length=96,
        )  # fmt: skip
        draft = DraftModel(runtime, weights.draft_to_target_W, version="v1")
    config = EngineConfig(max_num_seqs=num_slots, max_model_len=96, num_prefix_slots=0)
    return tiny.engine(target, draft, k=k or 0, config=config)


@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_p": 0.9}])
@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_speculation_in_bf16_equals_plain_decoding_token_for_token(mode, num_requests):
    """With torch's kernels that holds in float32 only."""
    model = model_of(FAMILIES["llama"])
    chance = random.Random(2)
    requests = [request(chance.choices(range(203), k=3 + 2 * n), n, max_tokens=40, **mode) for n in range(num_requests)]
    alone = [serve(small_engine(model, None, 0.0), [one])[0] for one in requests]
    assert serve(small_engine(model, None, 0.0), requests) == alone
    accepted = 0
    for k in (1, 3, 5):
        served = small_engine(model, k, noise=0.02)
        assert serve(served, requests) == alone
        accepted += served.stats.num_accepted_tokens
    assert accepted > 0


def test_shapes_the_kernels_do_not_know_are_served_by_torch():
    model = random_model()  # heads 8 wide
    assert unavailable_reason(model.config) is not None
    made = decoder(model, COMPILED)
    assert type(made) is Decoder
    assert made.forward([1, 2], [0, 1], [0, 0], [1]).logits_RV.shape == (1, 64)


@ONCE
def test_on_a_cpu_without_bf16_products_only_the_compiled_step_runs_in_bf16():
    float32 = dataclasses.replace(TORCH, dtype=torch.float32)
    chosen = with_kernels(float32)
    assert (chosen.dtype, chosen.is_compiled) == (torch.bfloat16, True)
    assert with_kernels(float32, "float32") == float32  # asked for
    assert fitted(chosen, model_of(FAMILIES["llama"]).config) == chosen
    for other in (None, random_model().config):  # another family, another shape
        assert (fitted(chosen, other).dtype, fitted(chosen, other).is_compiled) == (torch.float32, False)
    assert fitted(COMPILED, None).dtype == torch.bfloat16  # asked for, or native


def test_a_build_is_announced_and_done_once(monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(room.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    caplog.set_level("INFO", logger="livedraft.start")
    path = room._built(str(compiler), ())
    assert path.exists()
    assert [record.message for record in caplog.records] == [
        "Compiling the step for this CPU, once: a minute or less ..."
    ]
    assert room._built(str(compiler), ()) == path
    assert len(caplog.records) == 1


@ONCE
def test_where_nothing_can_be_built_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(room.platformdirs, "user_cache_path", lambda name: tmp_path)
    build = BUILD
    monkeypatch.setenv("LIVEDRAFT_KERNELS", "sse")
    with pytest.raises(UserError, match="LIVEDRAFT_KERNELS is 'sse'; give auto, avx512, avx2 or torch"):
        build()
    monkeypatch.delenv("LIVEDRAFT_KERNELS")
    monkeypatch.setenv("CXX", "/bin/false")
    assert "could not be built" in build()
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "no such instruction" in build()
    assert not list((tmp_path / "kernels").iterdir())  # nothing half-built is left
    monkeypatch.setenv("LIVEDRAFT_KERNELS", "torch")
    assert "switched off" in build()


@ONCE
def test_two_processes_may_build_at_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from livedraft.models import native as room; "
        "room.platformdirs.user_cache_path = lambda name: Path(sys.argv[1]); print(room.unavailable_reason())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=100)[0].strip() for process in started] == ["None", "None"]
    assert len(list((tmp_path / "kernels").glob("step-*.so"))) == 1


INT8 = dataclasses.replace(COMPILED, is_int8=True)


def rounded_weight(weight):
    """One scale an output, 127 steps."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def rounded_inputs(x, dtype):
    """One scale for each 32 neighbours, 127 steps; the last of a row may be fewer."""
    blocks = F.pad(x.to(dtype).float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]


def rounded_kinds(dtype):
    """The slow twins of the int8 products, in float32. `dtype`: of activations, before they are rounded to 8 bits."""

    class RoundedLinear(Linear):
        def __init__(self, weight, bias=None):
            super().__init__(rounded_weight(weight), bias)

        def __call__(self, x, residual=None):
            return super().__call__(rounded_inputs(x, dtype), residual)

    class RoundedGatedLinear(GatedLinear):
        def __init__(self, weight):
            super().__init__(rounded_weight(weight))

        def __call__(self, x):
            return super().__call__(rounded_inputs(x, dtype))

    return RoundedLinear, RoundedGatedLinear


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "head width 128"])
@pytest.mark.parametrize("width", [96, 80])
@pytest.mark.parametrize(("num_layers", "largest"), [(0, 5e-4), (1, 0.025)])
def test_int8_products_are_those_of_rounded_weights_and_rounded_inputs(family, width, num_layers, largest, monkeypatch):
    """Against float32 with the same roundings, at a width of whole blocks and at another. The head's are whole numbers, but for
    ties exact. In a layer keys and values are bf16, and what differs a little may be rounded to the next level of 127."""
    model = model_of(dataclasses.replace(FAMILIES[family], width=width, num_layers=num_layers))
    model = dataclasses.replace(model, tensors={n: t.bfloat16().float() for n, t in model.tensors.items()})
    tokens = random.Random(0).choices(range(203), k=50)
    own = prefill(decoder(model, INT8), tokens)
    unrounded = prefill(decoder(model, FLOAT32), tokens)
    differences = []
    for dtype in (torch.bfloat16, torch.float32):  # as the CPU has it
        with monkeypatch.context() as patched:
            patched.setattr(load, "linear_kinds", lambda path, config, dtype=dtype: rounded_kinds(dtype))
            right = prefill(decoder(model, FLOAT32), tokens)
        differences.append((own - right).abs().mean() / right.abs().mean())
    assert min(differences) < largest
    assert (own - unrounded).abs().mean() / unrounded.abs().mean() > 1.2 * min(differences)  # the rounding shows


def test_int8_products_pass_on_what_is_no_number():
    """The engine must see it; a largest input of NaN is no scale of zero."""
    model = model_of(FAMILIES["llama"])
    embedding = next(name for name in model.tensors if "embed" in name)
    model.tensors[embedding][7, 5] = float("nan")
    made = decoder(model, INT8)
    assert prefill(made, [3, 4]).isfinite().sum() >= 2 * 202  # a tied head's own row 7 is none
    assert prefill(made, [7]).isnan().all()


def test_int8_rows_do_not_depend_on_the_batch_either():
    model = model_of(FAMILIES["llama"])
    tokens = random.Random(3).choices(range(203), k=40)
    whole = prefill(decoder(model, INT8), tokens)
    made = decoder(model, INT8)
    for position, token in enumerate(tokens):
        assert torch.equal(made.forward([token], [position], [0], [0]).logits_RV[0], whole[position])


class Entry:
    """A tensor as the library reads it from a GGUF file."""

    def __init__(self, weight, kind):
        self.tensor_type = getattr(gguf.GGMLQuantizationType, kind)
        self.data = gguf.quantize(weight.numpy(), self.tensor_type)
        self.values = torch.from_numpy(gguf.dequantize(self.data, self.tensor_type))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_hold_what_the_library_reads(kind):
    entry = Entry(torch.randn(5, 96, generator=torch.Generator().manual_seed(0)), kind)
    blocks = blocks_of(entry)
    assert blocks.shape == (5, 96)
    assert torch.equal(blocks.values(), entry.values)
    both = joined([blocks, blocks.of_rows(torch.tensor([4, 0]))])
    assert torch.equal(both.values(), torch.cat([entry.values, entry.values[[4, 0]]]))


def in_blocks(model, kind, head_kind="Q8_0"):
    """(the model with its matrices as blocks, the same with plain numbers)"""
    entries = {
        name: Entry(weight, head_kind if "lm_head" in name else kind)
        for name, weight in model.tensors.items()
        if weight.ndim == 2 and "embed" not in name
    }
    plain = dataclasses.replace(model, tensors=model.tensors | {n: entry.values for n, entry in entries.items()})
    return dataclasses.replace(plain, blocks={n: blocks_of(entry) for n, entry in entries.items()}), plain


INT4 = dataclasses.replace(COMPILED, is_int4=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_files_own_blocks_are_run_without_rounding(family, kind):
    model, plain = in_blocks(model_of(FAMILIES[family]), kind)
    tokens = random.Random(0).choices(range(203), k=50)
    exact = prefill(decoder(plain, FLOAT32), tokens)
    own = (prefill(decoder(model, INT4), tokens) - exact).abs().mean()
    in_bf16 = (prefill(decoder(plain, COMPILED), tokens) - exact).abs().mean()
    assert own < in_bf16  # which rounds the weights
    assert (
        own < 0.03 * exact.abs().mean()
    )  # keys, values, the embedding and, where the CPU multiplies it, activations are bf16


def test_rows_of_blocks_do_not_depend_on_the_batch_either():
    model, _ = in_blocks(model_of(FAMILIES["llama"]), "Q4_1")
    tokens = random.Random(3).choices(range(203), k=40)
    whole = prefill(decoder(model, INT4), tokens)
    made, done = decoder(model, INT4), 0
    for count in (1, 2, 3, 4, 5, 1, 9, 15):
        rows = list(range(done, done + count))
        logits = made.forward([tokens[row] for row in rows], rows, [0] * count, list(range(count))).logits_RV
        assert torch.equal(logits, whole[rows])
        done += count
    assert done == 40


def test_int8_where_it_cannot_be_had_is_refused():
    assert quantized(COMPILED, "auto").is_int8
    assert not quantized(TORCH, "auto").is_int8
    assert not quantized(COMPILED, "none").is_int8
    with pytest.raises(UserError, match="compiled bf16 step"):
        quantized(FLOAT32, "int8")
    assert quantized(COMPILED, "int4").is_int4
    with pytest.raises(UserError, match="int4 weights need the compiled"):
        quantized(TORCH, "int4")
    with pytest.raises(ValueError, match="none, int8 or int4"):
        quantized(COMPILED, "int3")
