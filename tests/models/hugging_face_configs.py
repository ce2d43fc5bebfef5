"""Small models of transformers, as their config.json describes them."""

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": {"model_type": "llama"},
    "tied llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,  # from the third layer on: a layer's mask goes by its number
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma2": {"model_type": "gemma2"},
    "gpt_neox": {"model_type": "gpt_neox"},
}


def described(name, **more):
    return COMMON | MODELS[name] | more
