from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from livedraft.models.config import config_from_hf, hf_config
from livedraft.models.load import load_embedding_and_head, load_model
from livedraft.records import UserError
from tests.hf_folder import write_hf_folder
from tests.tiny import FAMILIES, TINY, decoder, random_tensors


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_hf_folder_round_trip(tmp_path, name, num_shards):
    config = FAMILIES[name]
    tensors = random_tensors(config)
    write_hf_folder(tmp_path, config, tensors, num_shards=num_shards)
    loaded = load_model(tmp_path, torch.float32)
    assert loaded.config == config
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors)


def test_fingerprint_follows_the_weights_not_the_dtype(tmp_path):
    write_hf_folder(tmp_path, TINY, random_tensors(TINY, seed=0))
    first = load_model(tmp_path, torch.float32).fingerprint
    assert load_model(tmp_path, torch.bfloat16).fingerprint == first
    write_hf_folder(tmp_path, TINY, random_tensors(TINY, seed=1))
    assert load_model(tmp_path, torch.float32).fingerprint != first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 tensor.*model.layers.1.mlp.up_proj.weight"),
        (
            lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}),
            "does not know: model.layers.0.extra.weight",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"model.norm.weight .* shape \(7,\)"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "model.norm.weight .* not numbers"),
    ],
)
def test_each_wrong_tensor_is_named(tmp_path, change, words):
    tensors = random_tensors(TINY)
    change(tensors)
    write_hf_folder(tmp_path, TINY, tensors)
    with pytest.raises(UserError, match=words):
        load_model(tmp_path, torch.float32)


def test_damaged_and_missing_files_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="No model at"):
        load_model(tmp_path / "nowhere", torch.float32)
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_model(tmp_path, torch.float32)
    write_hf_folder(tmp_path, TINY, random_tensors(TINY))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="damaged"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_model(tmp_path, torch.float32)
    odd = tmp_path / "model.bin"
    odd.write_bytes(b"x")
    with pytest.raises(UserError, match="neither a folder"):
        load_model(odd, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "mamba", "native families"),
        ("hidden_act", "gelu", "hidden_act"),
        ("attention_bias", True, "attention_bias"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "yarn"),
        ("use_sliding_window", True, "use_sliding_window"),
    ],
)
def test_what_the_runtime_would_get_wrong_is_refused(field, value, words):
    with pytest.raises(UserError, match=words):
        config_from_hf({**hf_config(TINY), field: value})


def write_gguf(path, config, tensors, quantization=None):
    """Written as llama.cpp's converter does: interleaved rotary halves for the Llama family."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer = GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.feed_forward_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocabulary_size)
    writer.add_eos_token_id(config.eos_token_ids[0])
    for name, tensor in tensors.items():
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        for letter, num_heads in heads.items():
            if config.family == "llama" and name.endswith(f"self_attn.{letter}_proj.weight"):
                rows, columns = tensor.shape
                tensor = (
                    tensor.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
                )
        gguf_name = names.get(name)
        if gguf_name is None:
            _, _, index, rest = name.split(".", 3)
            stem, part = rest.rsplit(".", 1)
            gguf_name = f"blk.{index}.{names[stem]}.{part}"
        data = tensor.contiguous().numpy()
        if quantization is not None and data.ndim == 2:
            writer.add_tensor(gguf_name, quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen2", "qwen3"])
def test_gguf_gives_the_same_logits_as_the_folder(tmp_path, name):
    config = FAMILIES[name]
    tensors = random_tensors(config)
    write_gguf(tmp_path / "tiny.gguf", config, tensors)
    write_hf_folder(tmp_path / "folder", config, tensors)
    from_gguf, from_folder = (load_model(p, torch.float32) for p in (tmp_path / "tiny.gguf", tmp_path / "folder"))
    rows = list(range(20))
    logits = [decoder(m).forward(rows, rows, [0] * 20, rows).logits_RV for m in (from_gguf, from_folder)]
    assert torch.allclose(*logits, atol=1e-5)


def test_quantised_gguf_is_dequantised(tmp_path):
    config = replace(TINY, feed_forward_width=64)  # rows divide into blocks of 32
    tensors = random_tensors(config)
    write_gguf(tmp_path / "q8.gguf", config, tensors, GGMLQuantizationType.Q8_0)
    loaded = load_model(tmp_path / "q8.gguf", torch.float32)
    for name, tensor in tensors.items():
        assert torch.allclose(loaded.tensors[name], tensor, atol=0.02), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_blocks_are_the_tensors_that_are_read(tmp_path, kind):
    config = replace(TINY, feed_forward_width=64)
    write_gguf(tmp_path / "q.gguf", config, random_tensors(config), GGMLQuantizationType[kind])
    if kind == "Q8_0":
        with pytest.raises(UserError, match="Q4_0 or Q4_1"):
            load_model(tmp_path / "q.gguf", torch.float32, keep_blocks=True)
        return
    loaded = load_model(tmp_path / "q.gguf", torch.float32, keep_blocks=True)
    assert set(loaded.blocks) == {name for name, tensor in loaded.tensors.items() if tensor.ndim == 2}
    for name, blocks in loaded.blocks.items():  # queries and keys too, whose rows are in another order in the file
        assert torch.allclose(blocks.values(), loaded.tensors[name], atol=1e-6), name
    assert load_model(tmp_path / "q.gguf", torch.float32).blocks == {}


def test_damaged_gguf_is_one_sentence(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TINY, random_tensors(TINY))
    whole = path.read_bytes()
    for bytes_left in (0, 10, 300, len(whole) - 100):
        path.write_bytes(whole[:bytes_left])
        with pytest.raises(UserError, match="damaged"):
            load_model(path, torch.float32)


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_trainer_gets_embedding_and_head(tmp_path, name):
    config = FAMILIES[name]
    tensors = random_tensors(config)
    write_hf_folder(tmp_path, config, tensors)
    found, embedding_VD, head_VD = load_embedding_and_head(tmp_path)
    assert found == config
    assert torch.equal(embedding_VD, tensors["model.embed_tokens.weight"])
    assert torch.equal(head_VD, tensors.get("lm_head.weight", embedding_VD))
