"""llama.cpp's own server for a small Llama of ours, in an environment that has its package.

Makes a GGUF file of the model's folder (what llama.cpp reads), begins to serve it on a port of
this machine's choice, prints the address, and ends with its standard input. Reads nothing of ours:

    .venv/.clients-llamacpp/bin/python -I serve.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(folder: Path) -> None:
    """Serve until nobody holds the other end of standard input."""
    file = folder / "model.gguf"
    write(folder, file)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.hostnames, params.port = ["127.0.0.1"], 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def write(folder: Path, file: Path) -> None:
    """A Llama's weights and tokenizer, as llama.cpp's architecture "llama" has them."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    into = gguf.GGUFWriter(file, "llama")
    into.add_context_length(config["max_position_embeddings"])
    into.add_embedding_length(config["hidden_size"])
    into.add_block_count(config["num_hidden_layers"])
    into.add_feed_forward_length(config["intermediate_size"])
    into.add_head_count(heads)
    into.add_head_count_kv(heads)
    into.add_layer_norm_rms_eps(config["rms_norm_eps"])
    into.add_rope_freq_base(rope["rope_theta"])
    into.add_rope_dimension_count(config["hidden_size"] // heads)
    into.add_file_type(gguf.LlamaFileType.ALL_F32)
    _tokenizer(folder, config, into)
    for name, weights in _tensors(folder / "model.safetensors"):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # A head's values turn in pairs: here half a head apart, there side by side.
            halves = weights.reshape(heads, 2, -1, weights.shape[1])
            weights = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
        into.add_tensor(_named(name), weights)
    into.write_header_to_file()
    into.write_kv_data_to_file()
    into.write_tensors_to_file()
    into.close()


def _tokenizer(folder: Path, config: dict[str, Any], into: Any) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    special = {one["content"] for one in told["added_tokens"]}
    words = sorted(told["model"]["vocab"], key=told["model"]["vocab"].get)
    merges = [one if isinstance(one, str) else " ".join(one) for one in told["model"]["merges"]]
    into.add_tokenizer_model("gpt2")
    into.add_tokenizer_pre("gpt-2")
    into.add_token_list(words)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    into.add_token_types([kinds[word in special] for word in words])
    into.add_token_merges(merges)
    into.add_bos_token_id(config["bos_token_id"])
    into.add_eos_token_id(config["eos_token_id"])
    into.add_add_bos_token(True)
    into.add_chat_template((folder / "chat_template.jinja").read_text())


def _tensors(file: Path) -> Any:
    """Names and arrays of a safetensors file of float32, by its layout."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, one in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = one["data_offsets"]
            values = np.frombuffer(data[8 + size + start : 8 + size + end], np.float32)
            yield name, values.reshape(one["shape"]).copy()


def _named(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_IN_A_LAYER[rest.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
