"""A checkpoint's config.json of each spelling."""

import pytest

# As transformers 5 writes it, with every value away from its default.
NEW = {
    "model_type": "deepseek_v3",
    "vocab_size": 129,
    "hidden_size": 60,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 26,
    "kv_lora_rank": 34,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 22,
    "head_dim": 8,
    "v_head_dim": 18,
    "intermediate_size": 98,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 30,
    "n_routed_experts": 12,
    "n_shared_experts": 3,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.25,
    "rms_norm_eps": 3e-6,
    "max_position_embeddings": 7000,
    "rope_interleave": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 30000.0,
        "factor": 20.0,
        "original_max_position_embeddings": 350,
        "beta_fast": 31.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}


@pytest.fixture
def new():
    """rope_parameters, with rope_theta and rope_type inside."""
    return NEW | {"rope_parameters": dict(NEW["rope_parameters"])}


@pytest.fixture
def old():
    """rope_scaling, with type inside and rope_theta beside it, as in the released files."""
    config = {key: value for key, value in NEW.items() if key != "rope_parameters"}
    scaling = {k: v for k, v in NEW["rope_parameters"].items() if not k.startswith("rope_")}
    more = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_theta": 30000.0,
        "rope_scaling": {"type": "yarn", **scaling},
        "ep_size": 1,
        "num_nextn_predict_layers": 1,
    }
    return config | more
